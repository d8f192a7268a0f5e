"""Collectives between GPUs of one process: against sums in the order of ranks, for each dtype and call."""

import ml_dtypes
import numpy as np
import pytest

import mpdp
from mpdp import threads
from mpdp.comm.activity import Activity
from mpdp.comm.thread_gpu import Board
from mpdp.errors import CommunicationError, RankFailedError

SIZES = [1, 2, 3, 4]
COUNTS = [1, 5, 1000, 300_001]


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def values(rank, count, dtype):
    random = np.random.default_rng(rank)
    if dtype.kind in "iu":
        return random.integers(0, 50, count).astype(dtype)
    return random.standard_normal(count).astype(dtype)


def added(parts, op):
    """The sum in the order of ranks, 16 bits in float32."""
    wide = np.float32 if parts[0].dtype.itemsize == 2 and parts[0].dtype.kind not in "iu" else parts[0].dtype
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = total + part.astype(wide) if op == "sum" else np.maximum(total, part.astype(wide))
    return total.astype(parts[0].dtype)


def on_ranks(size, body):
    return threads.run(lambda: body(mpdp.init(device="cuda", timeout=60)), size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "name", ["float16", "bfloat16", "float32", "float64", "uint8", "int32", "int64", "uint64"]
)
def test_all_reduce_adds_in_the_order_of_ranks(gpu, size, name):
    dtype = dtype_of(name)

    def body(world):
        xp, made = world.device.xp, []
        for count in COUNTS:
            for op in ("sum", "max"):
                array = xp.asarray(values(world.rank, count, dtype))
                world.comm.all_reduce(array, op=op)
                made.append(xp.asnumpy(array))
        return made

    for made in on_ranks(size, body):
        for i, count in enumerate(COUNTS):
            for j, op in enumerate(("sum", "max")):
                expected = added([values(rank, count, dtype) for rank in range(size)], op)
                assert made[2 * i + j].tobytes() == expected.tobytes(), (count, op)


@pytest.mark.parametrize("size", SIZES)
def test_the_other_calls(gpu, size):
    count = 10_007

    def body(world):
        xp, comm, rank = world.device.xp, world.comm, world.rank
        bounds = [0, *(count * (r + 1) // size for r in range(size))]
        mine = values(rank, count, np.dtype("float32"))
        made = {}
        array = xp.asarray(mine)
        comm.broadcast(array, root=size - 1)
        made["broadcast"] = xp.asnumpy(array)
        array = xp.asarray(mine)
        comm.all_gather(array, bounds, lane="urgent")
        made["all_gather"] = xp.asnumpy(array)
        array = xp.asarray(mine)
        comm.reduce_scatter(array, bounds)
        made["reduce_scatter"] = xp.asnumpy(array[bounds[rank] : bounds[rank + 1]])
        array, other = xp.asarray(mine), xp.asarray(mine)
        requests = [comm.start_reduce_scatter(array, bounds), comm.start_all_gather(other, bounds)]
        for request in requests:
            request.wait()
        assert (
            xp.asnumpy(array[bounds[rank] : bounds[rank + 1]]).tobytes() == made["reduce_scatter"].tobytes()
        )
        assert xp.asnumpy(other).tobytes() == made["all_gather"].tobytes()
        array = xp.asarray(mine)
        comm.reduce(array, root=0)
        made["reduce"] = xp.asnumpy(array)
        array = xp.asarray(mine)
        comm.send(array, to=(rank + 1) % size)
        comm.recv(array, source=(rank - 1) % size)
        made["recv"] = xp.asnumpy(array)
        made["before"] = comm.exclusive_sum(rank + 1)
        requests, many = [], [xp.full(5000 + i, rank + i, dtype="float32") for i in range(20)]
        for each in many:
            requests.append(comm.start_all_reduce(each))
        comm.barrier()
        for request in reversed(requests):
            request.wait()
        made["many"] = [float(each[-1]) for each in many]
        return made

    parts = [values(rank, count, np.dtype("float32")) for rank in range(size)]
    total = added(parts, "sum")
    bounds = [0, *(count * (r + 1) // size for r in range(size))]
    for rank, made in enumerate(on_ranks(size, body)):
        assert (made["broadcast"] == parts[-1]).all()
        for r in range(size):
            assert (
                made["all_gather"][bounds[r] : bounds[r + 1]] == parts[r][bounds[r] : bounds[r + 1]]
            ).all()
        assert (made["reduce_scatter"] == total[bounds[rank] : bounds[rank + 1]]).all()
        if rank == 0:
            assert (made["reduce"] == total).all()
        assert (made["recv"] == parts[(rank - 1) % size]).all()
        assert made["before"] == sum(range(1, rank + 1))
        assert made["many"] == [sum(r + i for r in range(size)) for i in range(20)]


def test_a_reduction_comes_behind_the_work_of_each_stream(gpu):
    def body(world):
        xp = world.device.xp
        a = xp.random.default_rng(world.rank).standard_normal((2000, 2000))
        array = xp.zeros(1 << 20)
        for _ in range(10):
            a = a @ a / 2000  # keeps the stream busy
            array += 1
            world.comm.all_reduce(array)
            array /= world.size
        return float(array.min()), float(array.max())

    assert on_ranks(3, body) == [(10.0, 10.0)] * 3


def test_calls_that_do_not_match_are_an_error_on_all_ranks(gpu):
    def body(world):
        array = world.device.xp.ones(100 + world.rank, dtype="float32")
        with pytest.raises(CommunicationError, match="all_reduce: expected the same call, dtype and length"):
            world.comm.all_reduce(array)
        array = world.device.xp.ones(10)
        world.comm.all_reduce(array)
        return float(array[0])

    assert on_ranks(2, body) == [2.0, 2.0]


def test_an_entry_of_the_board_is_gone_when_all_have_read_it():
    board = Board(2)
    board.post(1, 0, 1, "b")
    assert not board.complete(1, 0)
    board.post(1, 0, 0, "a")
    assert board.read(1, 0, Activity()) == ["a", "b"] == board.read(1, 0, Activity())
    assert not board.complete(1, 0)


def test_who_waits_for_a_rank_that_has_failed_is_told():
    activity = Activity()
    activity.failure = "rank 1: KeyError"
    with pytest.raises(RankFailedError, match="rank 1: KeyError"):
        Board(2).read(1, 0, activity)
