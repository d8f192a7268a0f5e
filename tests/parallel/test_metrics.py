"""Metrics and predictions: the same numbers on every rank, for any number of ranks; see programs/metrics.py."""

import pytest
from launching import PROGRAMS


def numbers(job, size):
    result = job(PROGRAMS / "metrics.py", n=size, timeout=60).check()
    assert result.output.count("all passed on rank") == size
    assert all(found == result.results[0] for found in result.results), "bit-equal on every rank"
    return result.results[0]


def test_the_same_metrics_for_any_number_of_ranks(job):
    one = numbers(job, 1)
    for size in (2, 3, 4):
        for mine, theirs in zip(numbers(job, size), one):
            exact = ("accuracy", "top_2")  # counts are whole
            assert {k: mine[k] for k in exact} == {k: theirs[k] for k in exact}
            assert mine == pytest.approx(theirs, rel=1e-12)
