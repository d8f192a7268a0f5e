"""The same script in threads and in processes: equal bits, and the same ends."""

import re

import numpy as np
import pytest
from launching import PROGRAMS

SCRIPT = PROGRAMS / "threads.py"


def steps_of(output):
    """Return rank -> updates, from what the ranks print."""
    return {int(rank): int(steps) for rank, steps in re.findall(r"rank (\d+) of \d+ did (\d+)", output)}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_threads_and_processes_have_the_same_bits(job, tmp_path, size):
    job(SCRIPT, tmp_path, "none", n=size, form="mpdp run", flags=("--threads",)).check()
    job(SCRIPT, tmp_path, "none", n=size, form="mpdp run").check()
    files = sorted(tmp_path.glob("*.npz"))
    assert [file.name for file in files] == [
        f"{'solo' if size == 1 else 'shared_memory'}-{size}.npz",
        f"threads-{size}.npz",
    ] or [file.name for file in files] == [f"shared_memory-{size}.npz", f"threads-{size}.npz"]
    one, other = (np.load(file) for file in files)
    assert one.files == other.files
    for name in one.files:
        assert (one[name] == other[name]).all()


def test_a_failing_thread_ends_the_job_with_one_report(job, tmp_path):
    result = job(SCRIPT, tmp_path, "raise", n=3, form="mpdp run", flags=("--threads",))
    assert result.rc == 1 and not result.timed_out and result.seconds < 15
    assert re.findall(r"\[\d/\d\] error.*", result.output) == [
        "[1/3] error in step 4: ValueError: a fault of rank 1"
    ]
    assert result.output.count("Traceback") == 1 and "on rank 1 of 3 threads" in result.output


def test_a_request_to_stop_stops_all_threads(job, tmp_path):
    result = job(SCRIPT, tmp_path, "stop", n=3, form="mpdp run", flags=("--threads",)).check()
    steps = steps_of(result.output)
    assert sorted(steps) == [0, 1, 2] and len(set(steps.values())) == 1 and steps[0] < 15


def test_an_exit_of_a_thread_is_the_exit_of_the_job(job, tmp_path):
    result = job(SCRIPT, tmp_path, "exit", n=2, form="mpdp run", flags=("--threads",))
    assert result.rc == 7 and "Traceback" not in result.output


def test_an_interrupt_ends_all_threads(job, tmp_path):
    result = job(SCRIPT, tmp_path, "interrupt", n=2, form="mpdp run", flags=("--threads",))
    assert result.rc == 130 and not result.timed_out and result.seconds < 15
    assert "KeyboardInterrupt" in result.output and "Traceback" not in result.output


def test_threads_need_no_mpi(job, tmp_path):
    environ = {"MPI4PY_LIBMPI": "/nonexistent"}
    job(SCRIPT, tmp_path, "none", n=2, form="mpdp run", flags=("--threads",), environ=environ).check()
