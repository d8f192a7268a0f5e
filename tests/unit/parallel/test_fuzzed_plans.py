"""Plans of a reduction, drawn at random: parameters, frozen ones, sizes of chunks, order of writes, announcements.

Every chunk is reduced once, in order, when the last write into it is done, and no sooner or later; what comes out is
twice what was written, to the bit. `pytest --hypothesis-profile=long` draws 20,000 plans.
"""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mpdp.comm.solo import SoloCommunicator
from mpdp.parallel.arena import GradientArena
from mpdp.parallel.chunks import chunk_table
from mpdp.parallel.layout import BLOCK, SPAN
from mpdp.parallel.reducer import Reducer

SHAPES = st.one_of(
    st.sampled_from([(), (0,), (3, 0), (1,), (BLOCK - 1,), (BLOCK,), (BLOCK + 1,), (SPAN,), (3, SPAN - 1)]),
    st.tuples(st.integers(0, 70), st.integers(0, 70)),
    st.tuples(st.integers(0, 3 * SPAN)),
)
LAST = 12  # of the positions of backward


class Doubling(SoloCommunicator):
    """Two equal ranks, as one of them sees it: what is reduced doubles, and when it was is noted."""

    def __init__(self, edge):
        super().__init__()
        self.chunk_edge = edge
        self.ranges, self.array = [], None

    def _all_reduce(self, array, op, lane):
        if lane == "bulk":
            start = (array.ctypes.data - self.array.ctypes.data) // array.itemsize
            self.ranges.append((start, start + array.size))
            array *= 2


@st.composite
def problems(draw):
    """Return shapes, frozen names, dtype, bytes of a chunk, edge, and the positions of the writes of each parameter."""
    shapes = {f"p{i}": shape for i, shape in enumerate(draw(st.lists(SHAPES, min_size=1, max_size=9)))}
    names = list(shapes)
    frozen = draw(st.sets(st.sampled_from(names), max_size=len(names) - 1))
    writes = {
        name: sorted(draw(st.sets(st.integers(0, LAST), max_size=3))) for name in names if name not in frozen
    }
    itemsize = draw(st.sampled_from([2, 4, 8]))
    chunk_bytes = draw(st.one_of(st.integers(1, 6 * SPAN * 8), st.just(SPAN * itemsize)))
    return shapes, frozen, f"float{8 * itemsize}", chunk_bytes, draw(st.integers(1, 6)), writes


def make(problem):
    shapes, frozen, dtype, chunk_bytes, edge, writes = problem
    comm = Doubling(edge)
    arena = GradientArena(shapes, dtype, "cpu", comm, frozen=frozen)
    comm.array = arena.array
    return comm, arena, Reducer(arena, chunk_bytes=chunk_bytes), writes


def check_layout(arena, frozen):
    """Ranges lie apart, on blocks, the trainable ones first and alone in their zone."""
    layout = arena.layout
    assert layout.trainable_size % SPAN == 0 and len(arena.array) == layout.trainable_size
    for before, entry in pairwise(layout.entries):
        assert entry.start >= before.stop
    for entry in layout.entries:
        assert entry.start % BLOCK == 0 and (entry.name in frozen) != entry.trainable
        assert (
            entry.stop <= layout.trainable_size if entry.trainable else entry.start >= layout.trainable_size
        )


def check_chunks(arena, reducer, chunk_bytes, edge):
    """Chunks cover the trainable zone once, in order, on spans, and are no larger than was asked for."""
    cuts = [start for start, _ in reducer.chunks] + [arena.layout.trainable_size]
    assert all((start, stop) == pair for (start, stop), pair in zip(reducer.chunks, pairwise(cuts)))
    assert not reducer.chunks or cuts[0] == 0
    for start, stop in reducer.chunks:
        assert start % SPAN == 0 and 0 < (stop - start) * arena.dtype.itemsize <= max(
            chunk_bytes, SPAN * arena.dtype.itemsize
        )
    assert reducer.chunks == chunk_table(arena.layout.trainable_size, arena.dtype.itemsize, chunk_bytes, edge)


def final_at(arena, chunks, writes):
    """Return after which position each chunk may be reduced: the last write into it or one before it."""
    found, latest = [], -1
    for start, stop in chunks:
        for entry in arena.layout.trainable:
            if max(start, entry.start) < min(stop, entry.stop) and writes[entry.name]:
                latest = max(latest, writes[entry.name][-1])
        found.append(latest)
    return found


@settings(deadline=None)
@given(problem=problems(), data=st.data())
def test_a_plan_reduces_each_chunk_once_as_soon_as_it_is_final(problem, data):
    shapes, frozen, _, chunk_bytes, edge, _ = problem
    comm, arena, reducer, writes = make(problem)
    check_layout(arena, frozen)
    check_chunks(arena, reducer, chunk_bytes, edge)
    final = final_at(arena, reducer.chunks, writes)
    plan = reducer.plan({name: positions[-1] for name, positions in writes.items() if positions})
    for step in range(2):
        comm.ranges.clear()
        for name in writes:
            arena[name][...] = 0
        expected = dict.fromkeys(writes, 0)
        for position in range(-1, LAST + 1):
            for name, positions in writes.items():
                if position in positions:
                    arena[name][...] += position + 1 + step
                    expected[name] += position + 1 + step
            if position in plan:
                plan[position]()
            done = sum(at <= position for at in final)
            assert comm.ranges == list(reducer.chunks[:done])
        reducer.wait()
        assert comm.ranges == list(reducer.chunks) and reducer.step == step + 1
        for name, value in expected.items():
            assert arena[name].shape == tuple(shapes[name]) and np.all(arena[name] == 2 * value)
    announced = data.draw(st.permutations(list(writes)))
    check_announcements(comm, arena, reducer, announced[: data.draw(st.integers(0, len(announced)))])


def check_announcements(comm, arena, reducer, announced):
    """In whatever order gradients are announced, chunks start in theirs, as soon as they are complete."""
    comm.ranges.clear()
    ready = set()
    for name in announced:
        arena[name][...] = 3
        reducer.ready(name)
        ready.add(name)
        complete = 0
        for start, stop in reducer.chunks:
            members = [
                e for e in arena.layout.trainable if e.start < stop and start < e.stop and e.start < e.stop
            ]
            if not all(entry.name in ready for entry in members):
                break
            complete += 1
        # Chunks start when the first one that is missing is announced, so some may wait for a name.
        assert comm.ranges == list(reducer.chunks[: len(comm.ranges)]) and len(comm.ranges) <= complete
    reducer.finish(count=4)
    assert comm.ranges == list(reducer.chunks)
    for name in announced:
        assert np.all(arena[name] == 1.5)
