"""SIGTERM and SIGUSR1: one checkpoint at one agreed update, a status of its own, and a run that goes on from there."""

import os
import signal
import time

import launching
import numpy as np
import pytest
from launching import PROGRAMS

from mpdp.errors import Preempted
from mpdp.training import checkpoint

PROGRAM = PROGRAMS / "preempted.py"


def pids(folder, n):
    """Return the processes of the ranks once signals may come."""
    deadline = time.monotonic() + 50
    while time.monotonic() < deadline:
        found = [folder / "pids" / str(rank) for rank in range(n)]
        if all(path.exists() for path in found):
            return [int(path.read_text()) for path in found]
        time.sleep(0.01)
    raise AssertionError("the ranks are not there")


def whole_checkpoints(folder, killed=False):
    """Return the steps of the checkpoints, all of which are whole; nothing else is left but by a killed save."""
    root = folder / "run" / "checkpoints"
    found, reasons = checkpoint.newest(root)
    assert not reasons
    names = sorted(path.name for path in root.iterdir() if not (killed and path.name.startswith(".tmp-")))
    assert found is not None and all(name.startswith("step-") for name in names), names
    return [int(name.split("-")[1]) for name in names]


def finish(job, folder, how, n, reference, environ=None):
    """Resume, and compare with the run that nobody disturbed."""
    job(PROGRAM, folder, how, n=n, environ={"RESUMED": "1", **(environ or {})}, timeout=60).check()
    assert np.array_equal(np.load(folder / "weights.npy"), reference)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Weights of the undisturbed run by (how, n)."""
    known = {}

    def find(job, how, n):
        how = how if how == "step" else "fit"
        if (how, n) not in known:
            folder = tmp_path_factory.mktemp(f"whole-{how}-{n}")
            (folder / "run").mkdir()
            job(PROGRAM, folder, how, n=n, timeout=60).check()
            known[how, n] = np.load(folder / "weights.npy")
        return known[how, n]

    return find


def send_to(folder, n, number, target, times=1):
    def send(process):
        ranks = pids(folder, n)
        for _ in range(times):
            targets = {"one": ranks[-1:], "all": ranks, "command": [process.pid]}[target]
            for pid in targets:
                os.kill(pid, number)
            time.sleep(0.02)

    return send


@pytest.mark.parametrize(
    "number, target, times, n, form, how",
    [
        ("SIGTERM", "one", 1, 3, "mpirun", "fit"),
        ("SIGUSR1", "all", 2, 2, "mpdp run", "step"),
        ("SIGUSR1", "command", 1, 2, "mpirun", "fit"),
        ("SIGTERM", "command", 2, 2, "mpdp run", "save"),
        ("SIGTERM", "all", 1, 2, "mpdp run", "evaluate"),
        ("SIGTERM", "command", 2, 2, "threads", "fit"),
        ("SIGTERM", "one", 1, 1, "python", "fit"),
    ],
)
def test_a_signal_ends_the_run_saved(job, tmp_path, reference, number, target, times, n, form, how):
    """J3: within a batch of a validation too. The threads of one process go on as processes do."""
    after = send_to(tmp_path, n, signal.Signals[number], target, times)
    flags = ("--threads",) if form == "threads" else ()
    line = "mpdp run" if form == "threads" else form
    result = job(PROGRAM, tmp_path, how, n=n, form=line, flags=flags, after=after)
    assert result.rc == Preempted.STATUS and not result.timed_out and not result.orphans, result
    shown = "SIGUSR1" if (target, form) == ("command", "mpdp run") else number  # as it goes to the ranks
    assert result.output.count(f" warning {shown} on ") == 1, result
    assert "Traceback" not in result.output, result
    steps = whole_checkpoints(tmp_path)
    assert set(result.values.values()) == {steps[-1]}, result  # every rank was told of the last checkpoint
    assert f"stopped after update {steps[-1]}; " in result.output
    assert 3 <= steps[-1] < 60 and steps[:-1] == [20, 40][: (steps[-1] - 1) // 20], steps
    if how == "evaluate":
        assert steps == [4]
    finish(job, tmp_path, how, n, reference(job, how, n))


@pytest.mark.parametrize("n, form, how", [(1, "python", "fit"), (2, "mpdp run", "step")])
def test_a_signal_ends_captured_steps_on_a_gpu_saved(gpu, job, tmp_path, n, form, how):
    """The checkpoint holds the update that the ranks agreed on, whichever steps were under way when the signal came."""
    on_gpu = {"DEVICE": "cuda"}
    (tmp_path / "whole" / "run").mkdir(parents=True)
    job(PROGRAM, tmp_path / "whole", how, n=n, form=form, environ=on_gpu, timeout=60).check()
    reference = np.load(tmp_path / "whole" / "weights.npy")
    after = send_to(tmp_path, n, signal.SIGTERM, "one")
    result = job(PROGRAM, tmp_path, how, n=n, form=form, environ=on_gpu, after=after)
    assert result.rc == Preempted.STATUS and not result.timed_out and not result.orphans, result
    steps = whole_checkpoints(tmp_path)
    assert f"stopped after update {steps[-1]}; " in result.output, result
    assert 3 <= steps[-1] < 60, steps
    finish(job, tmp_path, how, n, reference, on_gpu)


def test_sigterm_to_mpirun_in_a_save(job, tmp_path, reference):
    """D1: MPICH's mpirun lets the ranks end; Open MPI's kills them half a second later, and the one before is whole."""
    result = job(PROGRAM, tmp_path, "save", n=2, after=send_to(tmp_path, 2, signal.SIGTERM, "command"))
    assert result.rc != 0 and not result.timed_out and not result.orphans, result
    steps = [step for step in whole_checkpoints(tmp_path, killed=True) if step > 0]
    if launching.mpi()[0] == "mpich":
        assert result.rc == Preempted.STATUS and steps[:-1] == [20, 40], (steps, result)
    else:
        assert steps[0] == 20
    finish(job, tmp_path, "save", 2, reference(job, "save", 2))


@pytest.mark.parametrize(
    "form, n, how, wait",
    [
        ("mpirun", 2, "fit", 0),
        ("mpdp run", 2, "save", 0),
        ("mpdp run", 2, "fit", 0.4),
        ("python", 1, "fit", 0),
    ],
)
def test_ctrl_c_twice(job, tmp_path, form, n, how, wait):
    """J2: in a step, in a save, while ranks start: all end, and what was saved is whole."""

    def send(process):
        if wait:
            time.sleep(wait)
        else:
            pids(tmp_path, n)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        send.begin = time.monotonic()

    result = job(PROGRAM, tmp_path, how, n=n, form=form, after=send)
    assert result.rc != 0 and not result.timed_out and not result.orphans, result
    assert time.monotonic() - send.begin < 8, result  # 3 of them to look for orphans
    if how == "save":
        assert [step for step in whole_checkpoints(tmp_path, killed=True) if step < 40] == [20]


def test_a_job_is_started_again_until_it_has_finished(job, tmp_path, reference):
    """A death, an error, a preemption; the end is that of the run that nobody disturbed, to the bit."""
    faults = {"FAULTS": "kill:23 raise:30 term:45", "RESUMED": None}
    result = job(
        PROGRAM, tmp_path, n=2, form="mpdp run", flags=("--max-restarts", "5"), environ=faults, timeout=90
    ).check()
    assert result.results == [[60, 2, 3]] * 2
    lines = [line for line in result.output.splitlines() if line.startswith("mpdp run: restart ")]
    assert [line.partition(" (")[0] for line in lines] == [
        f"mpdp run: restart {k} of 5 in {wait} s with 2 ranks, saved at update {step}"
        for k, wait, step in ((1, 1, 20), (2, 2, 20), (3, 1, 46))
    ], result
    assert lines[1].endswith("(rank 1 failed in step 30: ValueError: a bad sample)")
    assert lines[2].endswith("(a signal has stopped it)")
    assert np.array_equal(np.load(tmp_path / "weights.npy"), reference(job, "fit", 2))


def test_a_job_goes_on_with_fewer_ranks(job, tmp_path, reference):
    """A start that loses a rank before its first update is followed by one without it; results agree to rounding."""
    flags = ("--max-restarts", "5", "--min-ranks", "2")
    faults = {"FAULTS": "kill:23 lost", "RESUMED": None}
    result = job(PROGRAM, tmp_path, n=3, form="mpdp run", flags=flags, environ=faults, timeout=90).check()
    assert result.results[:2] == [[60, 2, 2]] * 2  # the third has recorded its last save
    assert "mpdp run: restart 1 of 5 in 1 s with 3 ranks, saved at update 20 (" in result.output, result
    assert "mpdp run: restart 2 of 5 in 2 s with 2 ranks, saved at update 20 (" in result.output, result
    assert np.allclose(np.load(tmp_path / "weights.npy"), reference(job, "fit", 2), rtol=1e-4, atol=1e-5)
