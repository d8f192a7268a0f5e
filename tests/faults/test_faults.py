"""Faults injected into short trainings: the short form of ``mpdp bench faults``, under the MPI at hand.

The long form is run by hand; ``docs/reliability.md`` has its figures.
"""

import json
import sys

import launching
import pytest

from mpdp.bench.faults.moment import Fault
from mpdp.bench.faults.trial import SCRIPT


def bench(tmp_path, *words, timeout=400.0):
    if launching.mpi() is None:
        pytest.skip("no MPI")
    path = tmp_path / "faults.json"
    line = [sys.executable, "-m", "mpdp", "bench", "faults", *words, "--json", str(path)]
    result = launching.run(line, timeout=timeout)
    assert path.exists(), result
    return result, json.loads(path.read_text())


def test_a_dozen_faults_end_as_promised(tmp_path):
    result, found = bench(tmp_path, "--quick")
    assert result.rc == 0 and not result.orphans, result
    assert found["faults"] == 12 and found["wrong"] == 0 and found["rows_wrong"] == []
    for name in ("hangs", "false_successes", "orphans", "lost_checkpoints"):
        assert found[name] == 0
    quick = [found["groups"][name]["p95_seconds"] for name in ("raise", "exit", "kill")]
    assert max(quick) <= 5, result
    assert found["plan"]["mpis"].keys() == {launching.mpi()[0]}


def test_a_run_goes_on_where_it_was_broken_off(tmp_path):
    words = ("--kinds", "exit_3,loss", "--trials", "2", "--seed", "3")
    result, found = bench(tmp_path, *words, "--seconds", "-1")  # none is begun
    assert result.rc == 0 and found["faults"] == 0 and "| all | 0 |" in result.output, result
    result, found = bench(tmp_path, *words, "--seconds", "0.001")
    assert result.rc == 0 and found["faults"] in (0, 1) and "faults are left" in result.output, result
    result, found = bench(tmp_path, *words)
    assert result.rc == 0 and found["faults"] == 2, result
    result, again = bench(tmp_path, *words)
    assert again["groups"] == found["groups"] and "2 faults are in " in result.output


def test_the_cost_of_the_checks_can_be_measured(tmp_path):
    if launching.mpi() is None:
        pytest.skip("no MPI")
    line, settings = launching.mpirun(2)
    path = tmp_path / "cost.json"
    words = [*line, sys.executable, "-m", "mpdp", "bench", "faults", "--cost", "--quick", "--json", str(path)]
    launching.run(words, environ=settings, timeout=60).check()
    found = json.loads(path.read_text())
    assert found["ranks"] == 2 and found["step_us"] > 0 and found["unchecked_step_us"] > 0
    assert len(found["checked_blocks_us"]) == len(found["unchecked_blocks_us"]) == 3
    assert -100 < found["cost_percent"] < 1000


@pytest.mark.parametrize("loop", ["fit", "own"])
def test_where_nothing_is_broken_the_status_is_0(job, tmp_path, loop):
    """Also where the program has a loop of its own, which listens for signals until its end."""
    fault = Fault("none", 0, 0, 0.0, loop, str(tmp_path), 60.0)
    job(SCRIPT, n=3, form="mpdp run", environ=fault.environ()).check()


def test_faults_of_a_gpu_end_as_promised(gpu, tmp_path):
    """Last of all, and without CUDA's multi-process service, where one client's fault hits all."""
    words = ("--device", "cuda", "--kinds", "device_memory,kill,nan,device_fault", "--trials", "4")
    result, found = bench(tmp_path, *words)
    assert result.rc == 0 and found["faults"] == 4 and found["wrong"] == 0, result
