"""Ranks on declared nodes: ``nodes.py CASE [TRANSPORT]``; see test_two_level.py for what is expected."""

import os
import sys
import threading
import time
from itertools import pairwise

import numpy as np
from launching import record

import mpdp

CASE, TRANSPORT = sys.argv[1], (sys.argv[2:] or ["auto"])[0]
RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def where():
    world = mpdp.init(transport=TRANSPORT)
    total = np.array([1.0])
    world.comm.all_reduce(total)
    assert total[0] == world.size
    record([world.local_rank, world.local_size, world.node, world.num_nodes, world.transport])


def different():
    os.environ["MPDP_NODES"] = str(1 + RANK % 2)
    where()


def mismatch():
    """Two ranks of the last node bring different lengths: to the inside of a step, and to a call that is compared."""
    world = mpdp.init()
    comm = world.axis("data") if sys.argv[2] == "inside" else world.comm
    comm.all_reduce(np.zeros(10 + (world.rank == world.size - 1)))


def private():
    """The last node cannot map large buffers; the first one can."""
    from mpdp.comm import mapping

    for name in ("_open", "_free_bytes"):
        way = getattr(mapping, name)

        def refuse(*arguments, way=way, name=name):
            if arguments[-1] > 4 << 20 and RANK == 3:
                raise PermissionError(f"{name} is forbidden")
            return way(*arguments)

        setattr(mapping, name, refuse)
    world = mpdp.init(transport=TRANSPORT)
    array = world.comm.allocate(8 << 20).array(np.float64, 1 << 20)
    array[...] = world.rank + 1
    world.comm.all_reduce(array)
    assert np.all(array == world.size * (world.size + 1) / 2)
    record(world.transport)


def lanes():
    """While the bulk lane waits for a rank that is late, in a thread, messages of the urgent lane pass."""
    world = mpdp.init(transport=TRANSPORT, timeout=20)
    comm = world.comm.duplicate()
    array = comm.allocate(1 << 20).array(np.float32, 1 << 18)
    late = threading.Event()

    def carry():
        comm.adopt("bulk")
        if world.rank == world.size - 1:
            assert late.wait(20)
        comm.all_reduce(array)

    for _ in range(3):
        array[...] = world.rank
        late.clear()
        thread = threading.Thread(target=carry)
        thread.start()
        for i in range(20):
            few = np.array([world.rank + i])
            comm.all_reduce(few, lane="urgent")
            assert few[0] == world.size * (world.size - 1) // 2 + i * world.size
            if i == 0:
                time.sleep(0.05)  # the others are inside the bulk lane now
        token = np.array([float(world.rank)])
        if world.rank == 0:
            comm.send(token, to=world.size - 1)
        elif world.rank == world.size - 1:
            comm.recv(token, source=0)
            assert token[0] == 0
        assert thread.is_alive()
        comm.all_reduce(few, lane="urgent")  # all have looked
        late.set()
        thread.join()
        assert np.all(array == world.size * (world.size - 1) / 2)
    comm.close()
    record(world.transport)


def staged():
    """Arrays of a device that is none, over two levels."""
    from unit.comm.test_staged import FakeArray, FakeCopies

    from mpdp.comm.staged import StagedCommunicator
    from mpdp.device import Device

    world = mpdp.init(transport=TRANSPORT)
    comm = StagedCommunicator(
        world.comm.duplicate(), Device("cuda", 0), piece_bytes=40_000, copies=FakeCopies()
    )
    memories = [np.full(25_001, world.rank + i, dtype=np.float32) for i in range(5)]
    requests = [comm.start_all_reduce(FakeArray(memory)) for memory in memories]
    few = np.array([world.rank])
    comm.all_reduce(few, lane="urgent")
    for i, (memory, request) in enumerate(zip(memories, requests)):
        request.wait()
        assert np.all(memory == world.size * (world.size - 1) / 2 + i * world.size)
    assert few[0] == world.size * (world.size - 1) // 2
    last = world.size - 1
    for lane in ("bulk", "urgent"):
        memory = np.full(25_001, world.rank, dtype=np.float32)
        comm.broadcast(FakeArray(memory), root=last, lane=lane)
        assert np.all(memory == last)
        memory[...] = world.rank
        if world.rank == 0:
            comm.send(FakeArray(memory), to=last, lane=lane)
        elif world.rank == last:
            comm.recv(FakeArray(memory), source=0, lane=lane)
            assert np.all(memory == 0)
        bounds = [25_001 * r // world.size for r in range(world.size + 1)]
        memory[...] = world.rank
        comm.all_gather(FakeArray(memory), bounds, lane=lane)
        assert all(np.all(memory[a:b] == r) for r, (a, b) in enumerate(pairwise(bounds)))
        memory[...] = world.rank
        comm.reduce_scatter(FakeArray(memory), bounds, lane=lane)
        assert np.all(memory[bounds[world.rank] : bounds[world.rank + 1]] == world.size * last / 2)
        memory[...] = world.rank
        comm.start_reduce_scatter(FakeArray(memory), bounds, lane=lane).wait()
        comm.start_all_gather(FakeArray(memory), bounds, lane=lane).wait()
        assert np.all(memory == world.size * last / 2)
        assert comm.exclusive_sum(world.rank, lane=lane) == world.rank * (world.rank - 1) // 2
        comm.barrier(lane=lane)
    transport = comm.transport
    comm.close()
    record(transport)


def large():
    """One buffer of more than 2^31 bytes a rank, looked at in pieces to save memory."""
    world = mpdp.init(transport=TRANSPORT, timeout=300)
    comm, rank, size = world.comm, world.rank, world.size
    count = 2**31 + 4099
    array = comm.allocate(count).array(np.uint8, count)
    step = 1 << 24

    def check(start, stop, value):
        for i in range(start, stop, step):
            piece = array[i : min(i + step, stop)]
            assert piece.min() == piece.max() == value, (i, value)

    array.fill(rank + 1)
    array[-1] = 7
    comm.all_reduce(array)
    check(0, count - 1, size * (size + 1) // 2)
    assert array[-1] == 7 * size
    bounds = [count * r // size for r in range(size + 1)]
    array.fill(rank + 5)
    comm.all_gather(array, bounds)
    for r in range(size):
        check(bounds[r], bounds[r + 1], r + 5)
    array[-1] = 9
    if rank == 0:
        comm.send(array, to=size - 1)
    elif rank == size - 1:
        array.fill(0)
        comm.recv(array, source=0)
        check(0, bounds[1], 5)
        assert array[-1] == 9
    comm.barrier()
    record([world.transport, int(array.nbytes)])


{
    "where": where,
    "different": different,
    "mismatch": mismatch,
    "private": private,
    "lanes": lanes,
    "staged": staged,
    "large": large,
}[CASE]()
