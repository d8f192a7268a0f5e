"""The direct transport's algorithm, with threads as ranks: every collective against formulas, and its misuse."""

import threading
import time

import ml_dtypes
import numpy as np
import pytest
from thread_ranks import run

from mpdp.comm.activity import Activity
from mpdp.errors import CommunicationError, RankFailedError

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.uint8, np.int32, np.int64, np.uint64]
LENGTHS = [0, 1, 3, 127, 128, 129, 1023, 1025]
CUTS = [{}, {"small_bytes": 64, "piece_bytes": 1024}]


def values(rank, length, dtype):
    """Return numbers whose sums are exact."""
    return ((np.arange(length) + rank) % 5).astype(dtype)


def total(size, length, dtype):
    return sum(values(rank, length, dtype).astype(np.float64) for rank in range(size)).astype(dtype)


@pytest.mark.parametrize("where", ["private", "mapped", "mixed"])
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective(size, cuts, where):
    def body(comm):
        rank = comm.rank
        buffer = comm.allocate(12 << 10)

        def put(array):
            if where == "private" or (where == "mixed" and rank == size - 1):
                return array
            offset = 3 if where == "mapped" else rank  # off a cache line, and elsewhere on each rank
            view = buffer.array(array.dtype, array.size, offset * array.itemsize)
            view[...] = array
            return view

        for dtype in DTYPES:
            for length in LENGTHS:
                expected = total(size, length, dtype)
                mine = put(values(rank, length, dtype))
                comm.all_reduce(mine)
                assert mine.tobytes() == expected.tobytes()
                mine = put(values(rank, length, dtype))
                comm.all_reduce(mine, op="max", lane="urgent")
                most = np.max([values(r, length, np.float64) for r in range(size)], axis=0).astype(dtype)
                assert mine.tobytes() == most.tobytes()
                mine = put(values(rank, length, dtype))
                comm.broadcast(mine, root=size - 1)
                assert mine.tobytes() == values(size - 1, length, dtype).tobytes()
                mine = put(values(rank, length, dtype))
                comm.reduce(mine, root=size // 2)
                if rank == size // 2:
                    assert mine.tobytes() == expected.tobytes()
                bounds = [0, *sorted(length * (r * 7 % 5) // 5 for r in range(size - 1)), length]
                own = slice(bounds[rank], bounds[rank + 1])
                mine = put(values(rank, length, dtype))
                comm.reduce_scatter(mine, bounds)
                assert mine[own].tobytes() == expected[own].tobytes()
                comm.barrier()
                mine = put(values(rank, length, dtype))
                mine[own] = rank + 1
                comm.all_gather(mine, bounds)
                for r in range(size):
                    assert np.all(mine[bounds[r] : bounds[r + 1]] == np.array(r + 1, dtype))
        assert comm.exclusive_sum(rank + 1) == rank * (rank + 1) // 2
        assert comm.all_gather_bytes(bytes([rank]) * rank) == [bytes([r]) * r for r in range(size)]

    run(size, body, **cuts)


@pytest.mark.parametrize("size", [2, 3])
def test_started_reductions_of_ranks_at_different_speeds(size):
    """More of them than a rank may be ahead, waited for in order, with small messages between."""

    def body(comm):
        buffer = comm.allocate(40 * 8192)
        parts = [buffer.array(np.float64, 1024, 8192 * i) for i in range(40)]
        for turn in range(3):
            for i, part in enumerate(parts):
                part[...] = comm.rank + i
            requests = []
            for i, part in enumerate(parts):
                if (i + turn) % size == comm.rank:
                    time.sleep(0.0005)
                requests.append(comm.start_all_reduce(part))
                if i == 20:
                    word = np.array([comm.rank])
                    comm.all_reduce(word, lane=("bulk", "urgent", "bulk")[turn])
                    assert word[0] == size * (size - 1) // 2
            for request in requests:
                request.wait()
            for i, part in enumerate(parts):
                assert np.all(part == size * (size - 1) / 2 + size * i)

    run(size, body, small_bytes=1024)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("mapped", [True, False])
def test_started_parts_of_ranks_at_different_speeds(size, mapped):
    """Chunks are scattered, changed by their owners and gathered, with more under way than a rank may be ahead."""

    def body(comm):
        buffer = comm.allocate(40 * 8192)
        memory = buffer.array(np.float64, 40 * 1024) if mapped else np.zeros(40 * 1024)
        parts = [memory[1024 * i : 1024 * (i + 1)] for i in range(40)]
        bounds = [0, *(1024 * (r + 1) // size // 3 * 3 for r in range(size - 1)), 1024]
        own = slice(bounds[comm.rank], bounds[comm.rank + 1])
        for turn in range(3):
            for i, part in enumerate(parts):
                part[...] = comm.rank + i
            requests = []
            for i, part in enumerate(parts):
                if (i + turn) % size == comm.rank:
                    time.sleep(0.0005)
                requests.append(comm.start_reduce_scatter(part, bounds))
            for request in requests:
                request.wait()
            requests.clear()
            for i, part in enumerate(parts):
                total = size * (size - 1) / 2 + size * i
                assert np.all(part[own] == total)
                part[own] *= 2
                requests.append(comm.start_all_gather(part, bounds))
            for i, (request, part) in enumerate(zip(requests, parts)):
                request.wait()
                assert np.all(part == size * (size - 1) + 2 * size * i)

    run(size, body, small_bytes=1024)


def test_started_parts_with_other_bounds_are_an_error_on_all_ranks():
    def body(comm):
        array = comm.allocate(80_000).array(np.float64, 10_000)
        with pytest.raises(CommunicationError, match=r"reduce_scatter \(sum\) of 10000 float64, bounds"):
            comm.start_reduce_scatter(array, [0, 10 + comm.rank, 10_000]).wait()

    run(2, body)


def test_a_rank_that_is_ahead_goes_on():
    """It starts a reduction, computes, and finds the sum when the other has come."""
    late = threading.Event()

    def body(comm):
        array = comm.allocate(80_000).array(np.float64, 10_000)
        array[...] = comm.rank + 1
        if comm.rank == 1:
            assert late.wait(20)
        request = comm.start_all_reduce(array)
        late.set()
        request.wait()
        assert np.all(array == 3)

    run(2, body)


@pytest.mark.parametrize("length", [3, 1000])
def test_ranks_in_different_calls_all_get_an_error_and_may_go_on(length):
    def body(comm):
        array = np.ones(length, np.float32 if comm.rank == 0 else np.float64)
        with pytest.raises(
            CommunicationError, match="all_reduce: expected the same call, dtype and length"
        ) as caught:
            comm.all_reduce(array)
        assert f"all_reduce (sum) of {length} float32 on rank 0; all_reduce (sum) of {length} float64" in str(
            caught.value
        )
        assert caught.value.agreed
        word = np.ones(1)
        comm.all_reduce(word)
        return word[0]

    assert run(3, body, small_bytes=1024) == [3, 3, 3]


def test_messages_between_two_ranks():
    def body(comm):
        got = np.zeros(5)
        comm.send(np.full(5, comm.rank + 1.0), to=1 - comm.rank)
        comm.recv(got, source=1 - comm.rank)
        return got[0]

    assert run(2, body) == [2, 1]


def test_a_duplicate_shares_the_memory_and_no_message():
    def body(comm):
        other = comm.duplicate()
        array = comm.allocate(80_000).array(np.float64, 10_000)
        array[...] = 1
        request = comm.start_all_reduce(array)
        word = np.array([1])
        other.all_reduce(word, lane="bulk")
        request.wait()
        other.all_reduce(array)
        return array[0], word[0]

    assert run(2, body) == [(4, 2), (4, 2)]


def test_a_wait_ends_when_a_rank_fails():
    activity = Activity()

    def body(comm):
        if comm.rank == 1:
            time.sleep(0.05)
            activity.failure = "rank 1 failed"
            return
        with pytest.raises(
            RankFailedError, match=r"all_reduce: expected all ranks alive, got a failure \(rank 1"
        ):
            comm.all_reduce(np.ones(3))

    run(2, body, activity=activity)


def test_a_communicator_belongs_to_its_thread():
    def body(comm):
        errors = []

        def use():
            try:
                comm.barrier()
            except CommunicationError as error:
                errors.append(str(error))

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        return errors[0]

    assert "expected calls from the thread that made the communicator" in run(1, body)[0]


def test_memory_that_nobody_looks_at_any_more_is_forgotten():
    def body(comm):
        buffer = comm.allocate(1000)
        view = buffer.array(np.uint8, 10)
        del buffer
        assert len(comm._regions) == 1
        del view
        return len(comm._regions)

    assert run(2, body) == [0, 0]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 3, 9000])
def test_numbers_are_reduced_in_one_message(size, count):
    def body(comm):
        low, high = -(2**63), 2**63 - 1
        integers = [low, high - comm.rank, *[i * (comm.rank + 1) for i in range(count)]]
        most, sums = comm.reduce_numbers(
            integers, (0.1, comm.rank, float("inf") if comm.rank else -float("inf"))
        )
        assert most == [low, high, *[i * size for i in range(count)]]
        in_order = 0.0
        for _ in range(size):
            in_order += 0.1
        assert sums[:2] == [in_order, size * (size - 1) / 2]
        assert np.isnan(sums[2]) if size > 1 else sums[2] == -float("inf")
        return comm.activity.count

    assert run(size, body) == [1 if count < 9000 else 2] * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_numbers_of_which_the_maxima_are_equal(size):
    """What a step record is like; on the last rank they differ in the second round, so that both ways meet."""

    def body(comm):
        last = comm.rank == size - 1
        for integers in ([3, ~3, -(2**63)], [3, 4 + last, 5]):
            most, sums = comm.reduce_numbers(integers, (0.1, comm.rank, 2.0**-40))
            assert most == [integers[0], max(integers[1], 5 if integers[2] == 5 else ~3), integers[2]]
            in_order = 0.0
            for _ in range(size):
                in_order += 0.1
            assert sums == [in_order, size * (size - 1) / 2, size * 2.0**-40]

    run(size, body)


def test_an_array_that_was_started_before_is_known_again_and_no_other_is():
    def body(comm):
        buffer = comm.allocate(800_000)
        first = buffer.array(np.float32, 100_000)
        for turn in range(3):
            first[...] = comm.rank + turn
            comm.start_all_reduce(first).wait()
            assert first[7] == 1 + 2 * turn
        assert len(comm._known) == 1
        for turn in range(20):  # views that come and go have addresses of objects in common
            view = buffer.array(np.float32, 90_000 + turn, 4 * turn)
            view[...] = comm.rank
            comm.start_all_reduce(view, op="max" if turn % 2 else "sum").wait()
            assert view.min() == view.max() == 1
            del view
        del first, buffer
        return len(comm._regions)

    assert run(2, body) == [0, 0]


def test_ranks_with_different_counts_of_numbers_get_an_error():
    def body(comm):
        with pytest.raises(
            CommunicationError, match=r"all_reduce of 3 integers and 2 floats on rank 0; .* 1 integers"
        ):
            comm.reduce_numbers([1] * (3 - 2 * comm.rank), [1.0, 2.0])

    run(2, body)
