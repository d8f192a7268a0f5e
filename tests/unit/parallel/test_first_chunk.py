"""The reducer whose first chunk carries the record: no other message in a usual step, and every difference found."""

import threading

import numpy as np
import pytest
from thread_ranks import run

import mpdp
from mpdp.comm.solo import SoloCommunicator
from mpdp.errors import CommunicationError, DisagreementError
from mpdp.parallel.record import Kind, exchange

CHUNK = 256 << 10  # bytes; the first is a quarter, above what travels as a small message


def make(comm, width=300_000, chunk_bytes=CHUNK):
    arena = mpdp.GradientArena({"w": (width,), "b": (3,)}, "float32", "cpu", comm=comm)
    return arena, mpdp.Reducer(arena, comm, chunk_bytes=chunk_bytes)


def step(comm, arena, reducer, **arguments):
    """Reduce once, check the sums, and return how many messages it took beyond the chunks."""
    arena["w"][...] = np.arange(arena["w"].size) % 7 + comm.rank
    arena["b"][...] = 1
    early = arguments.pop("early", False)
    before = comm.activity.count
    if early:
        reducer.ready("w")
        reducer.ready("b")
    total = reducer.finish(**arguments)
    messages = comm.activity.count - before - len(reducer.chunks)
    n = comm.size
    expected = n * (np.arange(arena["w"].size) % 7) + n * (n - 1) / 2
    assert np.allclose(arena["w"], expected / (total or 1))
    assert np.allclose(arena["b"], n / (total or 1))
    return total, messages


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_step_that_ends_in_finish_takes_no_message_but_its_chunks(size):
    def body(comm):
        arena, reducer = make(comm)
        assert len(reducer.chunks) > 4
        assert [step(comm, arena, reducer) for _ in range(12)] == [(None, 0)] * 12
        for count in (1.5, 0.25, 0):
            total, messages = step(comm, arena, reducer, count=count + comm.rank)
            assert total == sum(count + rank for rank in range(size))
            assert messages == 0
        assert reducer.step == 15

    run(size, body)


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_that_are_announced_early_leave_the_count_to_one_message(size):
    def body(comm):
        arena, reducer = make(comm)
        for _ in range(3):
            assert step(comm, arena, reducer, count=1, early=True) == (size, 1)

    run(size, body)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_may_start_it_differently(size):
    """One announces early, the others finish: the record is exchanged after all, and the count once more."""

    def body(comm):
        arena, reducer = make(comm)
        for turn in range(6):
            early = turn % size == comm.rank
            assert step(comm, arena, reducer, count=2, early=early) == (2 * size, 2)
        assert step(comm, arena, reducer) == (None, 0)

    run(size, body)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("odd", [0, 1])
def test_memory_that_one_rank_has_elsewhere(size, odd):
    """That rank's chunk cannot carry the record, so it exchanges one, and the others come to it."""

    def body(comm):
        arena, reducer = make(comm)
        if comm.rank == odd:
            arena, _ = make(SoloCommunicator())
        reducer = mpdp.Reducer(arena, comm, chunk_bytes=CHUNK)
        for _ in range(3):
            assert step(comm, arena, reducer, count=3)[0] == 3 * size
            assert step(comm, arena, reducer, early=True)[0] is None
        assert step(comm, arena, reducer, early=comm.rank == odd)[0] is None

    run(size, body)


def refused(comm, call, error, match):
    with pytest.raises(error, match=match) as caught:
        call()
    assert caught.value.agreed


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("early", [False, True])
def test_ranks_at_different_steps_are_told_and_go_on(size, early):
    def body(comm):
        arena, reducer = make(comm)
        step(comm, arena, reducer)
        before = arena.array.copy()

        def reduce():
            if early:
                reducer.ready("b")
                reducer.ready("w")
            reducer.finish(count=1)

        reducer.step += comm.rank == 1
        refused(
            comm,
            reduce,
            DisagreementError,
            "at the same step, got rank 0.* at step 1; rank 1 in .* at step 2",
        )
        assert np.array_equal(arena.array, before)
        reducer.step = 1
        for _ in range(12):
            step(comm, arena, reducer, count=1, early=early)

    run(size, body)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_in_another_call_is_met_there(size, early, odd):
    """It waits on the urgent lane for ranks that wait for its first chunk, with all theirs announced."""

    def body(comm):
        arena, reducer = make(comm)
        step(comm, arena, reducer)
        before = arena.array.copy()

        def reduce():
            if comm.rank == odd:
                exchange(comm, Kind.SAVE, 1)
            if early:
                reducer.ready("b")
                reducer.ready("w")
            reducer.finish()

        for _ in range(3):
            refused(
                comm, reduce, DisagreementError, rf"expected every rank to call it .*rank {odd} in save\(\)"
            )
            assert np.array_equal(arena.array, before)
        refused(
            comm,
            reduce if comm.rank != odd else comm.barrier,
            CommunicationError,
            rf"expected the same call, .* barrier on rank {odd}",
        )
        for _ in range(12):
            step(comm, arena, reducer, early=early)

    run(size, body)


@pytest.mark.parametrize("size", [2, 3])
def test_a_plain_sum_of_the_same_length_is_another_call(size):
    def body(comm):
        _, reducer = make(comm)
        call = reducer.finish if comm.rank else lambda: comm.all_reduce(reducer.views[0])
        refused(
            comm, call, CommunicationError, r"got all_reduce \(sum\) .* rank 0; checked_all_reduce \(sum\)"
        )

    run(size, body)


@pytest.mark.parametrize("width", [300_000, 350_000, 450_000])
def test_another_reducer_is_another_call(width):
    """Whether its first chunk is as long or not."""

    def body(comm):
        one, other = make(comm), make(comm, width)
        arena, reducer = (one, other)[comm.rank]
        refused(comm, reducer.finish, DisagreementError, r"a Reducer at step 0 of model \d.* of model \d")
        for arena, reducer in (one, other):
            step(comm, arena, reducer)

    run(2, body)


@pytest.mark.parametrize("size", [2, 3])
def test_a_bad_count_is_an_error_of_all(size):
    def body(comm):
        arena, reducer = make(comm)
        bad = (1, -2, 3)[comm.rank]
        with pytest.raises(ValueError, match="count: expected a number of samples of 0 or more, got -2"):
            reducer.finish(count=bad)
        with pytest.raises(ValueError, match="count: expected a number of samples of 0 or more, got -2"):
            reducer.finish(count=-2)
        with pytest.raises(
            ValueError, match="count: expected one on every rank or on none, got none on 1 of"
        ):
            reducer.finish(count=None if comm.rank == 1 else 1)
        with pytest.raises(ValueError, match="count: expected a global count above 0, got 0"):
            reducer.finish(count=0)
        step(comm, arena, reducer, count=1)

    run(size, body)


def test_what_another_reducer_has_started_is_taken_back_too():
    """Where ranks disagree in the first of two, the second has to be started again, and says so."""
    ahead = threading.Event()

    def body(comm):
        (_, first), (arena, second) = (make(comm, chunk_bytes=1 << 20) for _ in "12")
        if comm.rank == 0:
            for reducer in (first, second):
                reducer.ready("b")
                reducer.ready("w")
            ahead.set()
        else:
            first.step = 1
            ahead.wait()
        refused(comm, first.finish, DisagreementError, "at the same step")
        if comm.rank == 0:
            with pytest.raises(
                CommunicationError, match="all_reduce: expected it to be carried out, got ranks"
            ):
                second.wait()
            second.abandon()
        first.step = 0
        step(comm, arena, second, count=1)

    run(2, body)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_its_sums_have_the_bits_of_those_behind_a_record(dtype):
    def body(comm):
        def reduced(chunk, early):
            arena = mpdp.GradientArena({"w": (300_001,), "b": (3,)}, dtype, "cpu", comm=comm)
            reducer = mpdp.Reducer(arena, chunk_bytes=chunk)
            random = np.random.default_rng(comm.rank)
            arena["w"][...] = random.standard_normal(300_001)
            arena["b"][...] = random.standard_normal(3)
            if early:
                reducer.ready("w")
            before = comm.activity.count
            reducer.finish(count=0.1 * (comm.rank + 1))
            return arena.array.tobytes(), comm.activity.count - before - len(reducer.chunks)

        carried, none = reduced(CHUNK, False)
        sent, one = reduced(64 << 10, False)
        early, _ = reduced(CHUNK, True)
        assert (none, one) == (0, 1)
        assert carried == sent == early

    run(3, body)
