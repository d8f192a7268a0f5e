"""Ranks on a GPU against ranks on the CPU; see programs/gpu_twins.py. Several ranks share one GPU."""

import re

import pytest
from launching import PROGRAMS


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_gpu_computes_what_the_cpu_computes(gpu, job, size):
    result = job(PROGRAMS / "gpu_twins.py", n=size, timeout=180).check()
    assert result.output.count("all passed on rank") == size


def test_more_ranks_than_gpus_is_said_once(gpu, job):
    result = job(PROGRAMS / "gpu_where.py", n=3, timeout=60).check()
    where = result.results
    assert [w["ordinal"] for w in where] == [w["local_rank"] % w["gpus"] for w in where]
    if where[0]["gpus"] < 3:
        assert result.output.count("ranks share a GPU") == 1
    # Nobody has a context on a GPU that is not its own.
    for w in where:
        assert w["current"] == w["ordinal"]


def test_a_bad_label_ends_the_job_with_its_rank_and_step(gpu, job):
    result = job(PROGRAMS / "gpu_label.py", n=2, timeout=60)
    assert result.rc != 0 and not result.timed_out and not result.orphans, f"{result}"
    report = r"error in step 2: ValueError: target: expected class indices in 0\.\.2, got 7 at sample 1.*on rank 1 of 2"
    assert re.search(report, result.output), f"{result}"
