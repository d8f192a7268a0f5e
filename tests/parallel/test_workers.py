"""Worker processes beside MPI: same numbers, no second MPI, nothing left behind; see programs/workers.py."""

import re

import pytest
from launching import PROGRAMS

PROGRAM = PROGRAMS / "workers.py"


def test_the_same_training_with_and_without_workers(job, tmp_path):
    """I8: a data set of the script itself, read in workers of every rank."""
    plain = job(PROGRAM, "none", tmp_path, n=2).check().results
    for kind, n, processes in (("processes", 2, True), ("processes", 3, True), ("threads", 2, False)):
        result = job(PROGRAM, kind, tmp_path, n=n).check()
        for history, weights, in_worker, with_mpi in result.results:
            assert in_worker == processes and (not with_mpi or not processes)
            if n == 2:
                assert [history, weights] == plain[0][:2], "bit-equal"
            assert history[-1]["loss"] == pytest.approx(plain[0][0][-1]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("sample", r"ValueError: a bad sample"),
        (
            "worker killed",
            r"WorkerError: Workers: expected an answer of worker \d, got its end \(status -9\)",
        ),
        ("rank killed", r"rank 1 died|signal 9"),  # or the launcher sees it first
        (
            "unguarded",
            r"WorkerError: dataset: expected one that a worker process can load, got WorkerError: Trainer",
        ),
    ],
)
def test_what_fails_ends_the_job_and_its_workers(job, tmp_path, kind, told):
    result = job(PROGRAM, kind, tmp_path, n=2)
    assert result.rc != 0 and not result.timed_out and result.seconds < 20, result
    assert not result.orphans, result
    assert re.search(told, result.output), result


def test_folders_that_ranks_see_differently(job, tmp_path):
    """E5: one file more on one rank."""
    pytest.importorskip("PIL")
    result = job(PROGRAM, "listing", tmp_path, n=2)
    assert result.rc != 0 and not result.timed_out, result
    told = r"fit: expected the same list of images of class cat on all ranks, got 2 files \(\w+\) on rank 0; 3 files"
    assert re.search(told, result.output) or "length of the data set" in result.output, result
