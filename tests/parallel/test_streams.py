"""Streams: each element once, the same updates as from arrays, for any number of ranks; see programs/streams.py."""

import pytest
from launching import PROGRAMS


def results(job, size, folder):
    result = job(PROGRAMS / "streams.py", folder, n=size, timeout=60).check()
    assert result.output.count("all passed on rank") == size
    return result.results


def test_the_same_for_any_number_of_ranks(job, tmp_path):
    alone = results(job, 1, tmp_path)[0]
    for order in alone[0]:
        assert sorted(order) == list(range(23)) and order != list(range(23))
    assert alone[0][0] != alone[0][1]
    for size in (2, 3, 4):
        found = results(job, size, tmp_path)
        for epoch in (0, 1):
            assert sorted(i for mine, _ in found for i in mine[epoch]) == list(range(23)), "each element once"
        for _, weights in found:
            assert weights == pytest.approx(alone[1], rel=1e-11)
