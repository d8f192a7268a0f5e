"""The reducer on one rank: order of chunks, announcements, plans, counts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpdp.comm.solo import SoloCommunicator
from mpdp.parallel.arena import GradientArena
from mpdp.parallel.layout import SPAN
from mpdp.parallel.reducer import Reducer

SHAPES = {f"p{i}": (SPAN // 2 + 300 * i,) for i in range(12)} | {"scalar": (), "empty": (0, 3)}
CHUNK_BYTES = 2 * SPAN * 4


class Recorder(SoloCommunicator):
    """A communicator of one that notes what it is asked to reduce, and doubles it."""

    def __init__(self):
        super().__init__()
        self.base = None
        self.ranges = []

    def _all_reduce(self, array, op, lane):
        if lane == "bulk":
            start = (array.ctypes.data - self.base) // array.itemsize
            self.ranges.append((start, start + array.size))
            array *= 2


def make(chunk_bytes=CHUNK_BYTES):
    comm = Recorder()
    arena = GradientArena(SHAPES, "float32", comm=comm)
    comm.base = arena.array.ctypes.data
    return comm, arena, Reducer(arena, chunk_bytes=chunk_bytes)


def test_chunks_are_as_large_as_the_transport_says_unless_the_caller_does():
    class Small(SoloCommunicator):
        chunk_bytes = 4 * SPAN * 4
        chunk_edge = 2

    arena = GradientArena(SHAPES, "float32", comm=Small())
    spans = [(stop - start) // SPAN for start, stop in Reducer(arena).chunks]
    assert spans[0] == spans[-1] == 2 and max(spans) == 4
    assert max(stop - start for start, stop in Reducer(arena, chunk_bytes=1).chunks) == SPAN


def test_a_long_buffer_has_larger_chunks_where_ranks_wait_at_each():
    arena = GradientArena({"w": (100 * SPAN,)}, comm=SoloCommunicator())
    arena.comm.chunk_bytes = 2 * SPAN * 4
    few = Reducer(arena).chunks
    arena.comm.most_chunks = 10
    larger = Reducer(arena).chunks
    assert max(stop - start for start, stop in few) == 2 * SPAN and len(few) > 50
    assert max(stop - start for start, stop in larger) == 10 * SPAN and len(larger) <= 12
    arena.comm.most_chunks = 1000
    assert Reducer(arena).chunks == few


@given(st.permutations(list(SHAPES)), st.integers(0, len(SHAPES)))
def test_chunks_start_in_index_order_whatever_the_order_of_announcements(names, announced):
    comm, _arena, reducer = make()
    for step in range(2):
        comm.ranges.clear()
        for name in names[:announced]:
            reducer.ready(name)
        assert comm.ranges == list(reducer.chunks[: len(comm.ranges)])
        reducer.finish()
        assert comm.ranges == list(reducer.chunks)
        assert reducer.step == step + 1
    assert len(reducer.chunks) > 3


def test_a_chunk_starts_only_when_all_its_parameters_are_ready():
    comm, arena, reducer = make()
    first_chunk = [e.name for e in arena.layout.trainable if e.start < reducer.chunks[0][1]]
    for name in first_chunk[:-1]:
        reducer.ready(name)
    assert comm.ranges == []
    reducer.ready(first_chunk[-1])
    assert comm.ranges == [reducer.chunks[0]]


@given(st.lists(st.integers(0, 40), min_size=len(SHAPES), max_size=len(SHAPES)))
def test_a_plan_starts_each_chunk_once_after_its_last_write(positions):
    comm, arena, reducer = make()
    last_write = dict(zip(SHAPES, positions))
    plan = reducer.plan(last_write)
    for position in range(-1, 41):
        if position in plan:
            plan[position]()
        done = len(comm.ranges)
        for entry in arena.layout.trainable:
            for index, (start, stop) in enumerate(reducer.chunks):
                if entry.start < stop and start < entry.stop and index < done:
                    assert last_write[entry.name] <= position
    assert comm.ranges == list(reducer.chunks)
    reducer.wait()
    assert comm.ranges == list(reducer.chunks)


def test_parameters_without_an_operation_are_final_from_the_start():
    comm, _arena, reducer = make()
    plan = reducer.plan({})
    assert set(plan) == {-1}
    plan[-1]()
    assert comm.ranges == list(reducer.chunks)


def test_finish_divides_by_the_global_count():
    _comm, arena, reducer = make()
    arena["p3"][...] = 3.0
    assert reducer.finish(count=4) == 4.0
    assert np.all(arena["p3"] == 1.5)  # doubled by the recorder, divided by 4
    assert arena["scalar"].shape == ()


def test_views_never_move():
    _comm, arena, reducer = make()
    before = arena["p1"].ctypes.data
    for _ in range(3):
        reducer.finish(count=1)
    assert arena["p1"].ctypes.data == before


def test_wrong_announcements_are_errors():
    _comm, _arena, reducer = make()
    reducer.ready("p1")
    with pytest.raises(ValueError, match=r"expected one announcement a step, got a second for 'p1'"):
        reducer.ready("p1")
    with pytest.raises(KeyError, match=r"got 'nobody'"):
        reducer.ready("nobody")
    frozen = Reducer(GradientArena({"a": (3,), "b": (3,)}, comm=SoloCommunicator(), frozen=["b"]))
    with pytest.raises(ValueError, match=r"expected a trainable parameter, got the frozen 'b'"):
        frozen.ready("b")
    with pytest.raises(ValueError, match=r"expected a trainable parameter, got the frozen 'b'"):
        frozen.arena["b"]


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf")])
def test_a_bad_count_is_an_error(count):
    _, _, reducer = make()
    with pytest.raises(ValueError, match=r"count: expected a number of samples of 0 or more, got"):
        reducer.finish(count=count)


def test_a_global_count_of_zero_is_an_error():
    _, _, reducer = make()
    with pytest.raises(ValueError, match=r"count: expected a global count above 0, got 0"):
        reducer.finish(count=0)


def test_an_arena_needs_parameters_and_a_float_dtype():
    with pytest.raises(ValueError, match=r"shapes: expected at least one parameter, got none"):
        GradientArena({}, comm=SoloCommunicator())
    with pytest.raises(ValueError, match=r"dtype: expected float16, float32 or float64, got int32"):
        GradientArena({"a": (2,)}, "int32", comm=SoloCommunicator())
