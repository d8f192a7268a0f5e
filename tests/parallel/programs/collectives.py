"""Every collective of every transport against formulas in rank and size, also with tiny pieces and a thread."""

import sys
import threading

import ml_dtypes
import numpy as np

import mpdp
from mpdp.comm.mpi import MpiCommunicator
from mpdp.comm.shared_memory import SharedMemoryCommunicator
from mpdp.comm.two_level import TwoLevelCommunicator
from mpdp.errors import CommunicationError

world = mpdp.init(timeout=20)
rank, size = world.rank, world.size
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.uint8, np.int32, np.int64, np.uint64]


def check(comm, in_place=False, dtypes=DTYPES):
    buffer = comm.allocate(16 << 10)

    def put(values):
        if not in_place:
            return values
        array = buffer.array(values.dtype, values.size, 3 * values.itemsize)  # off a cache line
        array[...] = values
        return array

    for lane in ("bulk", "urgent"):
        for dtype in dtypes:
            for length in (0, 1, 3, 127, 129, 1000):
                base = np.arange(length) % 5
                mine = put((base + rank).astype(dtype))
                comm.all_reduce(mine, lane=lane)
                assert mine.dtype == dtype
                assert np.array_equal(mine, (base * size + size * (size - 1) // 2).astype(dtype)), (
                    dtype,
                    length,
                )
                mine = put((base + rank).astype(dtype))
                comm.all_reduce(mine, op="max", lane=lane)
                assert np.array_equal(mine, (base + size - 1).astype(dtype)), (dtype, length)
                if lane == "bulk" and getattr(comm, "progress", "") == "thread":
                    continue
                for root in range(size):
                    mine = put((base + rank).astype(dtype))
                    comm.broadcast(mine, root=root, lane=lane)
                    assert np.array_equal(mine, (base + root).astype(dtype))
                    mine = put((base + rank).astype(dtype))
                    comm.reduce(mine, root=root, lane=lane)
                    if rank == root:
                        assert np.array_equal(mine, (base * size + size * (size - 1) // 2).astype(dtype))
                even = [length * r // size for r in range(size + 1)]
                uneven = [0, *sorted(length * (r * 7 % 5) // 5 for r in range(size - 1)), length]
                for bounds, started in ((even, False), (uneven, False), (uneven, True)):
                    mine = put((base + rank).astype(dtype))
                    if started:
                        comm.start_reduce_scatter(mine, bounds, lane=lane).wait()
                    else:
                        comm.reduce_scatter(mine, bounds, lane=lane)
                    own = slice(bounds[rank], bounds[rank + 1])
                    total = (base * size + size * (size - 1) // 2).astype(dtype)
                    assert np.array_equal(mine[own], total[own])
                    mine = put(np.full(length, rank).astype(dtype))
                    if started:
                        comm.start_all_gather(mine, bounds, lane=lane).wait()
                    else:
                        comm.all_gather(mine, bounds, lane=lane)
                    for r in range(size):
                        assert np.all(mine[bounds[r] : bounds[r + 1]] == np.array(r, dtype=dtype))
    assert comm.exclusive_sum(rank + 1) == rank * (rank + 1) // 2
    comm.barrier()
    for floats in (0, 1, 3000):  # none, few, and more than fit one message
        most, total = comm.reduce_numbers([rank, -rank], [rank + 0.5] * floats)
        assert most == [size - 1, 0]
        assert total == [size * (size - 1) / 2 + size / 2] * floats
    assert comm.all_gather_bytes(bytes([rank]) * rank) == [bytes([r]) * r for r in range(size)]
    assert comm.broadcast_bytes(b"text" if rank == size - 1 else None, root=size - 1) == b"text"


def check_float_maxima(comm):
    """The maximum keeps NaN and infinities, which MPI itself does not."""
    for dtype in (np.float16, np.float32, np.float64):
        values = np.array([1, np.inf, -np.inf, -0.0, -3, 2], dtype=dtype)
        last = np.array([np.nan, 1, -np.inf, 0.0, -4, np.nan], dtype=dtype)
        mine = last.copy() if rank == size - 1 else values.copy()
        comm.all_reduce(mine, op="max")
        every = [last] if size == 1 else [values, last]
        expected = np.max(every, axis=0)
        assert np.array_equal(mine, expected, equal_nan=True), (mine, expected)


def check_half_sums(comm):
    """Sixteen-bit floats are summed in float32 and rounded once."""
    mine = np.full(5, 1 / 3, dtype=np.float16)
    comm.all_reduce(mine)
    assert np.array_equal(mine, np.full(5, np.float32(np.float16(1 / 3)) * size, dtype=np.float16))


def check_ring(comm):
    if size == 1:
        return
    token = np.array([float(rank)], dtype=np.float64)
    if rank == 0:
        comm.send(token, to=1)
        comm.recv(token, source=size - 1)
        assert token[0] == size * (size - 1) / 2
    else:
        got = np.zeros(1)
        comm.recv(got, source=rank - 1)
        comm.send(got + rank, to=(rank + 1) % size)
    big = np.full(5000, rank, dtype=np.float32)
    if rank == 0:
        comm.send(big, to=size - 1)
    elif rank == size - 1:
        comm.recv(big, source=0)
        assert np.all(big == 0)


def check_owner(comm):
    """A communicator belongs to the thread that made it."""
    errors = []

    def use():
        try:
            comm.barrier()
        except CommunicationError as error:
            errors.append(str(error))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert errors and "expected calls from the thread that made the communicator" in errors[0]


def check_mpi():
    from mpi4py import MPI

    for piece_bytes, progress in ((4 << 20, "caller"), (1024, "caller"), (8, "caller"), (1024, "thread")):
        own = MpiCommunicator(MPI.COMM_WORLD, world.activity, piece_bytes=piece_bytes, progress=progress)
        if piece_bytes > 8:
            check(own)
        check_float_maxima(own)
        check_half_sums(own)
        if progress == "caller":
            check_ring(own)
            other = own.duplicate()
            check_owner(other)
            other.close()
        own.close()
    own = MpiCommunicator(MPI.COMM_WORLD, world.activity, progress="thread")
    arrays = [np.full(100_000, float(rank + i)) for i in range(4)]
    for request in [own.start_all_reduce(array) for array in arrays]:
        request.wait()
    for i, array in enumerate(arrays):
        assert np.all(array == size * (size - 1) / 2 + i * size)
    own.close()


def check_shared_memory():
    from mpi4py import MPI

    for small_bytes, piece_bytes in ((16 << 10, 256 << 10), (64, 1024), (64, 64)):
        mpi = MpiCommunicator(MPI.COMM_WORLD, world.activity)
        own = SharedMemoryCommunicator(mpi, small_bytes=small_bytes, piece_bytes=piece_bytes)
        for in_place in (False, True):
            check(own, in_place)
        check_float_maxima(own)
        check_half_sums(own)
        check_ring(own)
        other = own.duplicate()
        check_owner(other)
        other.close()
        own.close()


def check_two_level():
    """Nodes of equal and unequal size, of one rank, one node, and nodes whose ranks lie between one another."""
    from mpi4py import MPI

    few = {"small_bytes": 64, "piece_bytes": 1024, "staging_bytes": 1024}
    contiguous = [r * world.num_nodes // size for r in range(size)]
    assert world.node == contiguous[rank]
    for nodes, cuts, in_place in (
        (contiguous, {}, False),
        (contiguous, few, True),
        ([r % 2 for r in range(size)], few, True),
        ([0] * size, few, False),
        ([min(r, 1) for r in range(size)], few, True),
    ):
        mpi = MpiCommunicator(MPI.COMM_WORLD, world.activity)
        own = TwoLevelCommunicator(mpi, nodes[rank], **cuts)
        other = own.duplicate()
        declared = nodes is contiguous
        check(other if cuts and declared else own, in_place, DTYPES if declared else DTYPES[::3])
        check_float_maxima(own)
        check_half_sums(own)
        check_ring(own)
        check_order(own, nodes)
        check_owner(other)
        other.close()
        own.close()


def check_order(comm, nodes):
    """Sums are in the order of local ranks, then of nodes, in every bit, at any length and on every rank."""
    for length in (1, 100, 5000, 70_001):
        for dtype in (np.float32, np.float16):
            parts = [np.random.default_rng(r).standard_normal(length).astype(dtype) for r in range(size)]
            of_node = {}
            for part, where in zip(parts, nodes):
                wide = part.astype(np.float32)
                of_node[where] = of_node[where] + wide if where in of_node else wide
            first, *rest = [of_node[where] for where in sorted(of_node)]
            for sums in rest:
                first = first + sums
            expected = first.astype(dtype)
            for private in (True, False):
                mine = parts[rank].copy()
                if not private:
                    mine = comm.allocate(mine.nbytes).array(dtype, length)
                    mine[...] = parts[rank]
                comm.all_reduce(mine)
                assert mine.tobytes() == expected.tobytes(), (length, dtype)


comm = world.comm
checks = {"mpi": check_mpi, "shared_memory": check_shared_memory, "two_level": check_two_level}
checks.get(world.transport, lambda: check(comm))()
sys.stdout.write(f"collectives passed on rank {rank} of {size}, {world.transport}\n")
