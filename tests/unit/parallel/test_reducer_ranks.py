"""The reducer over several ranks (threads): how many messages a step takes, and ranks that come to it differently."""

import numpy as np
import pytest
from thread_ranks import run

import mpdp

SHAPES = {"first": (3000,), "last": (5000,)}


def reduce_once(comm, early):
    """Return messages of one step in which this rank announces its gradients first, or only finishes."""
    arena = mpdp.GradientArena(SHAPES, "float32", "cpu", comm=comm)
    reducer = mpdp.Reducer(arena, chunk_bytes=16384)
    counts = []
    for step in range(3):
        before = comm.activity.count
        arena["first"][...] = comm.rank + step
        arena["last"][...] = 1
        if early:
            reducer.ready("last")
            reducer.ready("first")
        assert reducer.finish(count=comm.rank + 1) == comm.size * (comm.size + 1) / 2
        total = comm.size * (comm.size + 1) / 2
        expected = (comm.size * step + comm.size * (comm.size - 1) / 2) / total
        assert np.allclose(arena["first"], expected)
        assert np.allclose(arena["last"], comm.size / total)
        counts.append(comm.activity.count - before - len(reducer.chunks))
    assert len(set(counts)) == 1
    return counts[0]


@pytest.mark.parametrize("size", [2, 3])
def test_one_record_carries_both_where_all_ranks_reduce_in_finish(size):
    assert run(size, lambda comm: reduce_once(comm, early=False)) == [1] * size


@pytest.mark.parametrize("size", [2, 3])
def test_two_records_where_any_rank_started_before(size):
    assert run(size, lambda comm: reduce_once(comm, early=True)) == [2] * size
    assert run(size, lambda comm: reduce_once(comm, early=comm.rank == 0)) == [2] * size


@pytest.mark.parametrize("placement", ["root", "sharded"])
def test_each_rank_has_the_sums_of_its_own_ranges(placement):
    def body(comm):
        arena = mpdp.GradientArena({"w": (50_000,)}, "float32", "cpu", comm=comm)
        reducer = mpdp.Reducer(arena, chunk_bytes=65536, placement=placement)
        arena["w"][...] = np.arange(50_000) + comm.rank
        reducer.ready("w")
        reducer.wait()
        whole = comm.size * np.arange(50_000) + comm.size * (comm.size - 1) / 2
        for start, stop in reducer.placement.held:
            assert np.array_equal(arena["w"][start:stop], whole[start:stop])
        with pytest.raises(ValueError, match='finish: expected placement="replicated", got'):
            reducer.finish()
        return reducer.placement.held

    for size in (2, 3):
        held = run(size, body)
        assert sum(stop - start for ranges in held for start, stop in ranges) == 53248
        assert placement == "sharded" or held[1:] == [()] * (size - 1)
