"""Every collective between GPUs through CUDA IPC, against formulas and float64 references: argv = quick, or nothing.

Runs at any n, on one GPU or several; ``MPDP_TRANSPORT`` may name another transport for GPUs, which then agrees to
rounding.
"""

import sys
import time
from itertools import pairwise

import ml_dtypes
import numpy as np

import mpdp
from mpdp.comm.cuda_ipc import CudaIpcCommunicator

world = mpdp.init(device="cuda", timeout=30)
rank, size, xp = world.rank, world.size, world.device.xp
QUICK = "quick" in sys.argv
EXACT = world.transport == "cuda_ipc" or size == 1
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(name) for name in ("float32", "float64", "int64", "float16")] + [BF16]
EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53, "int64": 0.0}
LENGTHS = [0, 1, 3, *(2**k + d for k in (4, 9, 12, 15, 16, 20) for d in (-1, 1))]
CASES = []


def case(function):
    CASES.append(function)
    return function


def values(of, length, dtype, seed=0):
    """Return what a rank gives: magnitudes over seven decades, the same on every rank that asks."""
    random = np.random.default_rng([seed, of, length])
    if dtype.kind == "i":
        return random.integers(-(2**40), 2**40, length).astype(dtype)
    spread = 2 if dtype.itemsize == 2 else 4
    return (random.standard_normal(length) * 10.0 ** random.integers(-3, spread, length)).astype(dtype)


def put(comm, data, mapped, offset=0):
    """Return data on the GPU, ``offset`` elements behind an aligned address."""
    nbytes = data.nbytes + offset * data.itemsize
    if mapped:
        array = comm.allocate(nbytes, world.device).array(data.dtype, data.size, offset * data.itemsize)
    else:
        array = xp.empty(nbytes, np.uint8)[offset * data.itemsize :].view(data.dtype)
    array.view(np.uint8)[...] = xp.asarray(np.ascontiguousarray(data).view(np.uint8))
    return array


def get(array):
    return xp.asnumpy(array.view(np.uint8)).view(array.dtype)


def check_sum(got, every, dtype, op="sum"):
    if op == "max":
        assert np.array_equal(got.astype(np.float64), np.max([e.astype(np.float64) for e in every], axis=0))
        return
    if dtype.kind == "i":
        assert np.array_equal(got, np.sum(every, axis=0))
        return
    wide = np.longdouble if dtype == np.float64 else np.float64
    reference = np.sum([e.astype(wide) for e in every], axis=0)
    room = np.sum([np.abs(e.astype(wide)) for e in every], axis=0) * EPSILON[dtype.name] * (size + 1)
    assert np.all(np.abs(got.astype(wide) - reference) <= room + 1e-37), dtype
    if EXACT:
        total = every[0].astype(np.float32) if dtype.itemsize == 2 else every[0].copy()
        for other in every[1:]:
            total = total + other.astype(total.dtype)
        assert np.array_equal(got.view(np.uint8), total.astype(dtype).view(np.uint8)), (
            "bits",
            dtype,
            len(got),
        )


@case
def sums_of_every_dtype_and_length():
    comm = world.axis("data")
    for dtype in DTYPES:
        for length in LENGTHS if not QUICK or dtype == np.float32 else (1, 513, 65537):
            every = [values(r, length, dtype) for r in range(size)]
            for mapped in (True, False):
                for offset in (0, 1):
                    for lane in ("bulk", "urgent") if length < 70_000 else ("bulk",):
                        array = put(comm, every[rank], mapped, offset)
                        comm.all_reduce(array, lane=lane)
                        check_sum(get(array), every, dtype)
            array = put(comm, every[rank], True)
            comm.all_reduce(array, op="max")
            check_sum(get(array), every, dtype, "max")


@case
def the_other_collectives():
    comm = world.axis("data")
    dtype = np.dtype("float32")
    for length in (1, 5, 4097, 100_003):
        every = [values(r, length, dtype) for r in range(size)]
        cuts = sorted(np.random.default_rng(length).integers(0, length + 1, size - 1).tolist())
        bounds = [0, *cuts, length]
        own = slice(bounds[rank], bounds[rank + 1])
        for mapped in (True, False):
            for root in range(size):
                array = put(comm, every[rank], mapped)
                comm.broadcast(array, root=root)
                assert np.array_equal(get(array), every[root])
                array = put(comm, every[rank], mapped)
                comm.reduce(array, root=root, lane="urgent")
                if rank == root:
                    check_sum(get(array), every, dtype)
            array = put(comm, every[rank], mapped)
            comm.reduce_scatter(array, bounds)
            check_sum(get(array)[own], [e[own] for e in every], dtype)
            array = put(comm, every[rank], mapped)
            comm.start_reduce_scatter(array, bounds).wait()
            check_sum(get(array)[own], [e[own] for e in every], dtype)
            array = put(comm, every[rank], mapped)
            comm.start_all_gather(array, bounds).wait()
            assert all(np.array_equal(get(array)[a:b], e[a:b]) for e, a, b in zip(every, bounds, bounds[1:]))
            array = put(comm, every[rank], mapped)
            comm.all_gather(array, bounds)
            gathered = np.concatenate([every[r][bounds[r] : bounds[r + 1]] for r in range(size)])
            assert np.array_equal(get(array), gathered)


@case
def nan_infinities_and_subnormals():
    comm = world.axis("data")
    for dtype in (np.float32, np.float64, np.float16):
        first = np.array([1, np.inf, -np.inf, -3, 2, np.inf, 0], dtype)
        last = np.array([np.nan, 1, -np.inf, -4, np.nan, -np.inf, -1], dtype)
        every = [last if r == size - 1 else first for r in range(size)]
        for op, reduce in (("max", np.max), ("sum", np.sum)):
            array = put(comm, every[rank], True)
            comm.all_reduce(array, op=op)
            with np.errstate(invalid="ignore"):
                assert np.array_equal(get(array), reduce(every, axis=0), equal_nan=True), (
                    dtype,
                    op,
                    get(array),
                )
    tiny = np.full(100, 1e-41, np.float32)
    array = put(comm, tiny, False)
    comm.all_reduce(array)
    if EXACT:
        total = tiny.copy()
        for _ in range(size - 1):
            total = total + tiny
        assert np.array_equal(get(array), total) and total[0] > 0
    small = np.array([1e-41, 0, -1e-41], np.float32) * (rank + 1)
    array = put(comm, small, True)
    comm.all_reduce(array, op="max")
    if EXACT:
        assert np.array_equal(get(array), np.float32([size * np.float32(1e-41), 0, -np.float32(1e-41)]))


@case
def bits_do_not_depend_on_the_chunks():
    comm = world.axis("data")
    data = values(rank, 1_000_003, np.dtype("float32"))
    results = []
    for chunk in (data.size, 300_001, 65_536):
        array = put(comm, data, True)
        requests = [comm.start_all_reduce(array[i : i + chunk]) for i in range(0, data.size, chunk)]
        for request in requests:
            request.wait()
        results.append(get(array).tobytes())
    if EXACT:
        assert len(set(results)) == 1
    again = put(comm, data, False)
    comm.all_reduce(again)
    if EXACT:
        assert get(again).tobytes() == results[0]


@case
def lanes_and_streams():
    """Urgent messages between chunks, from a stream that is still busy when the call is made."""
    comm = world.axis("data")
    stream = xp.cuda.Stream(non_blocking=True)
    chunks = [put(comm, np.full(300_000, float(rank + i), np.float32), True) for i in range(6)]
    with stream:
        requests = []
        for i, chunk in enumerate(chunks):
            chunk *= np.float32(2)
            requests.append(comm.start_all_reduce(chunk))
            flag = xp.full(5, float(rank * i))
            comm.all_reduce(flag, op="max", lane="urgent")
            chunks[i] = (chunk, flag)
        for request in requests:
            request.wait()
        for i, (chunk, flag) in enumerate(chunks):
            assert bool((chunk == 2 * (size * (size - 1) / 2 + i * size)).all()), i
            assert bool((flag == (size - 1) * i).all())


@case
def messages_between_two_ranks():
    comm = world.axis("data")
    if size == 1:
        return
    for length in (1, 7, 100_000, 1_000_001):
        array = put(comm, np.full(length, float(rank), np.float32), length % 2 == 0)
        if rank == 0:
            comm.send(array, to=size - 1)
        elif rank == size - 1:
            comm.recv(array, source=0)
            assert bool((array == 0).all())
    token = xp.full(1, float(rank))
    if rank == 0:
        comm.send(token, to=1)
        comm.recv(token, source=size - 1)
        assert float(token[0]) == size * (size - 1) / 2
    else:
        got = xp.zeros(1)
        comm.recv(got, source=rank - 1)
        comm.send(got + rank, to=(rank + 1) % size)


@case
def a_graph_replayed_with_other_data():
    if not EXACT:
        return
    comm = world.axis("data")
    data = put(comm, np.zeros(200_000, np.float32), True)
    small = put(comm, np.zeros(1000), True)
    loose = put(comm, np.zeros(90_000, np.float32), False)
    step, wrong = xp.zeros(1, np.float32), xp.zeros(1)  # a graph's temporary arrays would be given to others
    stream = xp.cuda.Stream(non_blocking=True)

    def body():
        step.__iadd__(1)
        data.fill(rank + 1)
        data.__imul__(step)
        small.fill(rank)
        small.__iadd__(step)
        loose.fill(rank + 2)
        loose.__imul__(step)
        chunk = comm.start_all_reduce(data)
        comm.all_reduce(small, op="max", lane="urgent")
        comm.all_reduce(loose, lane="urgent")
        chunk.wait()

    xp.cuda.get_current_stream().synchronize()
    with stream:
        body()  # compiles the kernels, and gives the pool what the capture needs
        stream.synchronize()
        stream.begin_capture()
        body()
        graph = stream.end_capture()
        total = size * (size + 1) / 2
        for _ in range(100):
            graph.launch(stream)
            wrong += (data != total * step).sum() + (small != size - 1 + step).sum()
            wrong += (loose != (total + size) * step).sum()
        comm.all_reduce(data)  # eager again, behind the graph
        assert float(step[0]) == 101 and float(wrong[0]) == 0, (float(step[0]), float(wrong[0]))
        assert float(data[7]) == total * 101 * size


@case
def more_than_two_to_the_31_bytes():
    comm = world.axis("data")
    if QUICK or size > 2 or not EXACT:
        return
    count = 2**31 + 4099
    array = comm.allocate(count, world.device).array(np.uint8, count)
    array.fill(rank + 1)
    array[-1] = 7
    first, last = size * (size + 1) // 2, 7 * size
    for work in (array, array[3:]):  # the second time all ranks hold the same
        comm.all_reduce(work)
        assert bool((work[:-1] == first).all()) and int(work[-1]) == last
        first, last = first * size, last * size
    bounds = [count * r // size for r in range(size + 1)]
    array.fill(rank + 1)
    comm.all_gather(array, bounds)
    for r in range(size):
        assert bool((array[bounds[r] : bounds[r + 1]] == r + 1).all())


@case
def a_stream_made_current_by_use_stays_current():
    comm, array = world.axis("data"), xp.ones(100_000, np.float32)
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.get_current_stream().synchronize()
    before = xp.cuda.get_current_stream()
    stream.use()
    try:
        comm.all_reduce(array)
        comm.start_all_reduce(array).wait()
        assert xp.cuda.get_current_stream() == stream
        assert bool((array == size * size).all())
    finally:
        stream.synchronize()
        before.use()


@case
def buffers_come_and_go():
    if not isinstance(world.comm, CudaIpcCommunicator):
        return
    comm = world.comm
    for attempt in range(3):
        free, held = [], []
        for _ in range(20):
            array = comm.allocate(64 << 20, world.device).array(np.float32, 16 << 20)
            array.fill(1)
            comm.all_reduce(array[:1000])
            assert float(array[5]) == size
            del array
            free.append(xp.cuda.runtime.memGetInfo()[0])
            held.append(comm.device_bytes)
        assert len(comm.family.memory) <= 20
        assert held[-1] <= held[0] + (64 << 20), held  # one buffer may wait for the next allocation
        # Other jobs may take memory meanwhile, for a while even in every round; a leak takes some in every attempt.
        falls = xp.array([float(sum(b < a for a, b in pairwise(free[5:])))])
        comm.all_reduce(falls)
        if float(falls[0]) < 10 * size:
            break
        assert attempt < 2, [f >> 20 for f in free]
        time.sleep(2)
    other = comm.duplicate()
    value = xp.full(3, float(rank))
    other.all_reduce(value)
    assert float(value[0]) == size * (size - 1) / 2
    other.close()


for function in CASES:
    begin = time.perf_counter()
    function()
    xp.cuda.get_current_stream().synchronize()
    if rank == 0:
        print(f"passed {function.__name__} in {time.perf_counter() - begin:.1f} s", flush=True)
print(f"all passed on rank {rank} of {size} over {world.transport}", flush=True)
