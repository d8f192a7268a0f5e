"""The kernels of cuda_ipc and all that is around them, on an emulated GPU whose ranks are threads."""

import gc
import time

import emulated_gpu
import ml_dtypes
import numpy as np
import pytest
from emulated_gpu import Array, CountedMarks, EmulatedGpu, ThreadRanks, in_all
from hypothesis import given, settings
from hypothesis import strategies as st

from mpdp.comm.cuda_ipc import CudaIpcCommunicator
from mpdp.comm.cuda_lane import ABORT, Sizes
from mpdp.comm.spans import STREAM, Spans
from mpdp.device import CPU, Device
from mpdp.errors import CommunicationError, DeviceError, RankFailedError

GPU = Device("cuda", 0)
BF16 = np.dtype(ml_dtypes.bfloat16)
TINY = {
    "small_bytes": 96,
    "stage_bytes": 64,
    "mail_bytes": 32,
    "share_bytes": 16,
    "most_blocks": {"bulk": 3, "urgent": 2},
}


@pytest.fixture(autouse=True)
def _compiler():
    emulated_gpu.needed()


@pytest.fixture(scope="module")
def worlds():
    """Return communicators of a number of ranks, made once; their stages are tiny, so that all ways are taken."""
    made = {}

    def world(size, **options):
        key = (size, *options)
        if key not in made:
            emulated_gpu.needed()
            gpus = [EmulatedGpu() for _ in range(size)]
            ranks = ThreadRanks.world(size)
            made[key] = in_all(
                ranks, lambda host: CudaIpcCommunicator(host, GPU, gpu=gpus[host.rank], **{**TINY, **options})
            )
        return made[key]

    return world


def private(values):
    """Return values as an array of the emulated GPU that no other rank has mapped."""
    return Array(np.array(values), GPU)


def values_of(rank, length, dtype, seed=0):
    random = np.random.default_rng([seed, rank, length])
    if np.dtype(dtype).kind in "iu":
        return random.integers(0, 100, length).astype(dtype)
    return (random.standard_normal(length) * 10.0 ** random.integers(-3, 4, length)).astype(dtype)


def summed(size, length, dtype, op="sum", seed=0):
    """Return what ranks give, reduced in the order of ranks; sixteen bits are summed in float32."""
    every = [values_of(rank, length, dtype, seed) for rank in range(size)]
    half = np.dtype(dtype).itemsize == 2
    total = every[0].astype(np.float32) if half else every[0].copy()
    for other in every[1:]:
        total = (
            total + other.astype(total.dtype) if op == "sum" else np.maximum(total, other.astype(total.dtype))
        )
    return total.astype(dtype)


def bits(array):
    return array.view(np.uint8)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("lane", ["bulk", "urgent"])
def test_every_collective_of_every_length(worlds, size, mapped, lane):
    def body(comm):
        rank = comm.rank
        for length in (0, 1, 3, 7, 8, 9, 23, 24, 25, 31, 33, 100, 517):
            for op in ("sum", "max"):
                array = take(comm, values_of(rank, length, "float32"), mapped, offset=length % 3)
                comm.all_reduce(array, op=op, lane=lane)
                assert np.array_equal(bits(array.memory), bits(summed(size, length, "float32", op))), (
                    length,
                    op,
                )
            root = length % size
            array = take(comm, values_of(rank, length, "float32"), mapped)
            comm.reduce(array, root=root, lane=lane)
            if rank == root:
                assert np.array_equal(array.memory, summed(size, length, "float32"))
            array = take(comm, values_of(rank, length, "float32"), mapped, offset=1)
            comm.broadcast(array, root=root, lane=lane)
            assert np.array_equal(array.memory, values_of(root, length, "float32"))
            cuts = sorted(np.random.default_rng(length).integers(0, length + 1, size - 1).tolist())
            bounds = [0, *cuts, length]
            array = take(comm, values_of(rank, length, "float32"), mapped)
            comm.reduce_scatter(array, bounds, lane=lane)
            own = slice(bounds[rank], bounds[rank + 1])
            assert np.array_equal(array.memory[own], summed(size, length, "float32")[own])
            array = take(comm, values_of(rank, length, "float32"), mapped)
            comm.start_reduce_scatter(array, bounds, lane=lane).wait()
            assert np.array_equal(array.memory[own], summed(size, length, "float32")[own])
            array = take(comm, values_of(rank, length, "float32"), mapped)
            comm.all_gather(array, bounds, lane=lane)
            array = take(comm, values_of(rank, length, "float32"), mapped)
            comm.start_all_gather(array, bounds, lane=lane).wait()
            expected = np.concatenate(
                [values_of(r, length, "float32")[bounds[r] : bounds[r + 1]] for r in range(size)]
            )
            assert np.array_equal(array.memory, expected)

    in_all(worlds(size), body)


def take(comm, values, mapped, offset=0):
    """Return values on the GPU, ``offset`` elements behind the start of a buffer of the communicator, or outside."""
    if not mapped:
        room = np.zeros(len(values) + offset, values.dtype)
        room[offset:] = values
        return Array(room, GPU)[offset:]
    array = comm.allocate(values.nbytes + 64, GPU).array(values.dtype, len(values), offset * values.itemsize)
    array.memory[...] = values
    return array


@pytest.mark.parametrize("dtype", [np.float64, BF16, np.float16, np.int64, np.uint8], ids=str)
def test_every_dtype_has_the_bits_of_a_sum_in_rank_order(worlds, dtype):
    def body(comm):
        for length in (1, 13, 200):
            for op in ("sum", "max"):
                for mapped in (True, False):
                    array = take(comm, values_of(comm.rank, length, dtype), mapped)
                    comm.all_reduce(array, op=op)
                    expected = summed(comm.size, length, dtype, op)
                    assert np.array_equal(bits(array.memory), bits(expected)), (length, op, mapped)

    in_all(worlds(3), body)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_order_of_calls_and_any_mixture_of_arrays(worlds, data):
    """What one collective leaves in flags and stages never disturbs the next, whichever way each takes."""
    calls = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, 150),
                st.integers(0, 7),
                st.sampled_from(["all_reduce", "broadcast"]),
                st.booleans(),
            ),
            min_size=1,
            max_size=12,
        )
    )

    def body(comm):
        arrays = []
        for i, (length, where, _, _) in enumerate(calls):  # a bit a rank: whether its array is mapped
            arrays.append(take(comm, values_of(comm.rank, length, "float32", i), True, offset=i % 4))
            if not where >> comm.rank & 1:
                arrays[-1] = private(arrays[-1].memory)
        for (length, _, name, urgent), array in zip(calls, arrays):
            lane = "urgent" if urgent else "bulk"
            if name == "all_reduce":
                comm.start_all_reduce(array, lane=lane).wait()
            else:
                comm.broadcast(array, root=length % comm.size, lane=lane)
        for i, ((length, _, name, _), array) in enumerate(zip(calls, arrays)):
            expected = (
                summed(comm.size, length, "float32", seed=i)
                if name == "all_reduce"
                else values_of(length % comm.size, length, "float32", i)
            )
            assert np.array_equal(bits(array.memory), bits(expected))

    in_all(worlds(3), body)


def test_maxima_keep_nan_and_infinities(worlds):
    first = np.array([1, np.inf, -np.inf, -3, 2, 1e-40], np.float32)
    last = np.array([np.nan, 1, -np.inf, -4, np.nan, 0], np.float32)

    def body(comm):
        array = private(last if comm.rank == comm.size - 1 else first)
        comm.all_reduce(array, op="max")
        assert np.array_equal(array.memory, np.maximum(first, last), equal_nan=True)

    in_all(worlds(3), body)


def test_messages_between_two_ranks(worlds):
    def body(comm):
        for length in (1, 31, 32, 33, 500):
            if comm.rank == 0:
                array = private(np.arange(length, dtype=np.uint8))
                comm.send(array, to=2, lane="bulk")
            elif comm.rank == 2:
                array = private(np.zeros(length, np.uint8))
                comm.recv(array, source=0, lane="bulk")
                assert np.array_equal(array.memory, np.arange(length, dtype=np.uint8))
        token = private(np.array([float(comm.rank)]))
        if comm.rank == 1:
            comm.send(token, to=0)
        elif comm.rank == 0:
            comm.recv(token, source=1)
            assert token.memory[0] == 1

    in_all(worlds(3), body)


def test_host_arrays_go_to_the_host_communicator(worlds):
    def body(comm):
        array = np.array([1.0, comm.rank])
        comm.all_reduce(array)
        assert array.tolist() == [comm.size, comm.size * (comm.size - 1) / 2]
        assert comm.exclusive_sum(2) == 2 * comm.rank
        comm.barrier()
        assert comm.allocate(100, CPU).array("uint8", 100).sum() == 0

    in_all(worlds(2), body)


def test_buffers_are_given_back_when_no_rank_uses_them():
    gpus = [EmulatedGpu() for _ in range(2)]
    comms = in_all(
        ThreadRanks.world(2), lambda host: CudaIpcCommunicator(host, GPU, gpu=gpus[host.rank], **TINY)
    )

    def body(comm):
        memory, gpu = comm.family.memory, comm.gpu
        before = len(gpu.held), len(gpu.opened)
        lanes = comm.device_bytes
        first = comm.allocate(1000, GPU).array("float32", 250)
        second = comm.allocate(1000, GPU).array("float32", 250)
        view = second[5:10]
        assert len(memory) == 2 and comm.device_bytes == lanes + 2000
        del first
        if comm.rank == 0:
            del second
        gc.collect()
        comm.allocate(10, GPU)  # no rank holds the first; both hold the second
        assert len(memory) == 2
        assert [kind for kind, _ in gpu.log] == ["synchronize", "close", "free"]
        view.memory[...] = 1
        comm.all_reduce(view)
        assert view.memory.tolist() == [comm.size] * 5
        del view
        if comm.rank == 1:
            del second
        gc.collect()
        last = comm.allocate(10, GPU)
        assert len(memory) == 1 and comm.device_bytes == lanes + 10
        assert (len(gpu.held), len(gpu.opened)) == (before[0] + 1, before[1] + 1)
        other = comm.duplicate()
        assert other.family is comm.family
        array = last.array("uint8", 10)
        other.all_reduce(array)
        other.close()
        other.close()
        comm.release()
        assert gpu.opened == [] and not comm.activity.watched

    in_all(comms, body)


def test_memory_that_one_rank_lacks_is_an_error_on_all():
    gpus = [EmulatedGpu() for _ in range(2)]
    gpus[1].room = 100_000
    comms = in_all(
        ThreadRanks.world(2), lambda host: CudaIpcCommunicator(host, GPU, gpu=gpus[host.rank], **TINY)
    )
    held = [len(gpu.held) for gpu in gpus]

    def body(comm):
        with pytest.raises(
            DeviceError, match=r"expected 200000 bytes for communication, got none \(on rank 1 of 2\)"
        ):
            comm.allocate(200_000, GPU)

    in_all(comms, body)
    assert [len(gpu.held) for gpu in gpus] == held


def test_more_ranks_than_the_tables_hold():
    def body(host):
        with pytest.raises(CommunicationError, match="cuda_ipc: expected at most 16 ranks on a node, got 17"):
            CudaIpcCommunicator(host, GPU, gpu=EmulatedGpu())

    in_all(ThreadRanks.world(17), body)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_world_adds_no_more_than_two_chunks(size):
    """Its communicator and that of the data axis, which is a duplicate, between buffers that are reduced in place."""
    gpus = [EmulatedGpu() for _ in range(size)]
    for gpu in gpus:
        gpu.multiprocessors = 132  # of an H200: the most blocks, and the most memory

    def body(host):
        comm = CudaIpcCommunicator(host, GPU, gpu=gpus[host.rank])
        assert comm.duplicate().device_bytes == comm.device_bytes <= 2 * comm.chunk_bytes

    in_all(ThreadRanks.world(size), body)


def test_blocks_of_all_ranks_on_a_gpu_fit_on_it_at_once():
    gpus = [EmulatedGpu(name) for name in (b"a", b"a", b"b")]
    for gpu in gpus:
        gpu.multiprocessors = 30
    comms = in_all(ThreadRanks.world(3), lambda host: CudaIpcCommunicator(host, GPU, gpu=gpus[host.rank]))
    blocks = {lane: comms[0]._lanes[lane].sizes.blocks for lane in ("bulk", "urgent")}
    assert blocks == {"bulk": 12, "urgent": 3}
    assert all(comm._lanes[lane].sizes.blocks == n for comm in comms for lane, n in blocks.items())
    assert not any(comm.independent for comm in comms)  # their blocks stand behind kernels of the other rank
    apart = [EmulatedGpu(name) for name in (b"a", b"b", b"c")]
    comms = in_all(ThreadRanks.world(3), lambda host: CudaIpcCommunicator(host, GPU, gpu=apart[host.rank]))
    assert all(comm.independent for comm in comms)


def test_a_failure_ends_a_collective_that_waits():
    gpus = [EmulatedGpu() for _ in range(3)]
    comms = in_all(
        ThreadRanks.world(3), lambda host: CudaIpcCommunicator(host, GPU, gpu=gpus[host.rank], **TINY)
    )
    for comm in comms:  # the emulated looks yield the core each: fewer are as long
        comm.all_reduce(private(np.zeros(0, np.float32)))

    def body(comm):
        if comm.rank == 2:
            time.sleep(0.3)
            for other in comms[:2]:  # what each rank's ring does when rank 2 dies
                other.activity.failure = "rank 2 died"
            return
        array = private(np.ones(40, np.float32))
        comm.all_reduce(array)  # comes back, with nothing that may be used
        latch = np.zeros(1, np.uint32)
        comm.gpu.read(comm.halt, latch)
        assert latch[0] == 1
        text, since = comm.family.waiting()
        assert text == "a collective on the GPU, lane bulk, waits for rank 2" and since > 0
        assert comm.activity.waiting()[0] == text
        with pytest.raises(
            RankFailedError, match=r"all_reduce: expected all ranks alive, got .* \(rank 2 died\)"
        ):
            comm.all_reduce(array)

    in_all(comms, body)


def test_different_calls_are_an_error_on_all_ranks():
    gpus = [EmulatedGpu() for _ in range(3)]
    comms = in_all(
        ThreadRanks.world(3), lambda host: CudaIpcCommunicator(host, GPU, gpu=gpus[host.rank], **TINY)
    )

    def body(comm):
        length = 40 if comm.rank == 1 else 400
        comm.all_reduce(private(np.ones(length, np.float32)))
        with pytest.raises(
            CommunicationError,
            match=rf"all_reduce \(sum\) of {length} float32: expected the same collective on all ranks, got another",
        ) as info:
            comm.all_reduce(private(np.ones(10, np.float32)))
        assert info.value.agreed

    in_all(comms, body)
    assert comms[0].family.error() is None  # a call has come and raised it, or will
    comms[0].family._found = (comms[0].family._found[0], time.monotonic() - 5)
    assert "expected the same collective" in comms[0].family.error()


def test_wrong_arrays_are_refused(worlds):
    comm = worlds(1)[0]
    other = private(np.zeros(3, np.float32))
    other.device = Device("cuda", 1)
    with pytest.raises(Exception, match=r"array: expected memory of cuda:0, this rank's GPU, got cuda:1"):
        comm.all_reduce(other)
    odd = private(np.zeros(64, np.uint8))
    odd = odd[1 + -odd.data.ptr % 4 :][:8].view(np.float32)
    with pytest.raises(ValueError, match=r"array: expected an address that is a multiple of 4 bytes"):
        comm.all_reduce(odd)
    with pytest.raises(
        ValueError, match=r"stage_bytes, mail_bytes, share_bytes: expected multiples of 16, got 24, 32 and 16"
    ):
        Sizes(2, 1, 24, 32, 0, 16)


def test_the_words_agree_with_the_kernel():
    from mpdp.comm import cuda_lane, cuda_memory
    from mpdp.comm.cuda_gpu import FOLDER

    text = (FOLDER / "direct.cu").read_text()
    for name in ("ABORT", "STOPPED", "MISMATCH", "OWN_CALL", "WAITS"):
        assert f"#define {name} {getattr(cuda_lane, name)} " in text
    assert f"#define RANKS {cuda_lane.MOST_RANKS} " in text
    assert f"#define PLACE_BITS {cuda_memory.PLACE_BITS} " in text
    assert ABORT == 0


class _LoggedGpu(EmulatedGpu):
    """Streams by name, of which some are being captured; notes the order that is asked of them."""

    def __init__(self):
        super().__init__()
        self.now, self.captured, self.order = "main", set(), []

    def current(self):
        return self.now

    def stream(self):
        return "lane"

    def capturing(self, stream):
        return stream in self.captured

    def mark(self, event, stream):
        event[:] = [stream]

    def join(self, stream, event):
        self.order.append(f"{stream} behind {event[0]}")

    def asked(self):
        order, self.order = self.order, []
        return order


def test_kernels_of_a_lane_come_one_behind_the_other_on_whichever_stream():
    gpu = _LoggedGpu()
    comm = CudaIpcCommunicator(ThreadRanks.world(1)[0], GPU, gpu=gpu, **TINY)
    lane = comm._lanes["bulk"]
    launched = []
    lane.run(launched.append)
    lane.run(launched.append)
    assert gpu.asked() == []  # of one stream, as it is
    event = lane.start(launched.append)
    assert gpu.asked() == ["lane behind main"] and event == ["lane"]
    lane.start(launched.append)
    assert gpu.asked() == ["lane behind main"]
    lane.run(launched.append)
    assert gpu.asked() == ["main behind lane"]
    gpu.now = "other"
    lane.run(launched.append)
    assert gpu.asked() == ["other behind main"]
    gpu.now = "third"
    lane.start(launched.append)
    assert gpu.asked() == ["lane behind third", "lane behind other"]
    assert launched == ["main", "main", "lane", "lane", "main", "other", "lane"]


def test_a_capture_takes_no_order_from_what_ran_before_it():
    gpu = _LoggedGpu()
    comm = CudaIpcCommunicator(ThreadRanks.world(1)[0], GPU, gpu=gpu, **TINY)
    lane = comm._lanes["urgent"]
    lane.start(lambda stream: None)
    gpu.asked()
    gpu.captured = {"main"}
    lane.run(lambda stream: None)
    assert gpu.asked() == []  # CUDA refuses a wait for what is outside of the graph
    gpu.captured = {"main", "lane"}  # it is captured from the first wait on
    lane.start(lambda stream: None)
    assert gpu.asked() == ["lane behind main"]
    lane.run(lambda stream: None)
    assert gpu.asked() == ["main behind lane"]
    gpu.captured, gpu.now = set(), "other"
    lane.run(lambda stream: None)
    assert gpu.asked() == ["other behind main"]


def test_a_kernel_is_noted_on_the_stream_that_it_runs_on():
    gpu = _LoggedGpu()
    comm = CudaIpcCommunicator(ThreadRanks.world(1)[0], GPU, gpu=gpu, **TINY)
    spans = Spans(1, streams=CountedMarks())
    spans.begin_step()
    comm.note(spans)
    chunk, flag = private(np.ones(100, np.float32)), private(np.ones(2))
    spans.labels = {id(chunk): "chunk 0"}
    comm.start_all_reduce(chunk).wait()
    comm.all_reduce(flag, lane="urgent")
    gpu.captured = {"lane", "main"}
    comm.start_all_reduce(chunk).wait()
    comm.all_reduce(flag, lane="urgent")
    gpu.captured = set()
    comm.note(None)
    comm.all_reduce(flag)
    found = [span for span in spans.finished()[0] if span.kind == STREAM]
    assert [span[:6] for span in found] == [
        ("stream bulk", "chunk 0", STREAM, 1, 2, 400),
        ("stream urgent", "message", STREAM, 3, 4, 16),
    ]
    assert spans.streams.marked == ["lane", "lane", "main", "main"]
