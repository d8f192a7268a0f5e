"""The ways to all-reduce that are compared: on host memory, and on a GPU that is a list of what it was asked."""

from types import SimpleNamespace

import numpy as np
import pytest

from mpdp.bench.reductions import (
    GRAPH_BYTES,
    GRAPH_CALLS,
    MANY,
    GpuMemory,
    HostMemory,
    as_dtype,
    content,
    ways,
)
from mpdp.comm.base import FLOATS, INTEGERS, Buffer
from mpdp.comm.solo import SoloCommunicator
from mpdp.device import CPU


class Doubled(SoloCommunicator):
    """Gives a wrong sum."""

    def _all_reduce(self, array, op, lane):
        array *= 2


@pytest.mark.parametrize("name", FLOATS + INTEGERS)
def test_what_ranks_give_adds_up_exactly(name):
    dtype = as_dtype(name)
    assert dtype.name == name
    total = sum(content(1000, dtype, rank).astype(np.float64) for rank in range(4))
    summed = np.zeros(1000, dtype)
    for rank in range(4):
        summed += content(1000, dtype, rank)
    assert np.array_equal(summed.astype(np.float64), total) and total.max() > total.min()


def test_a_transport_and_its_reducer_and_a_copy_are_compared():
    found = ways({"solo": SoloCommunicator()}, CPU, HostMemory(), 4 << 20, np.dtype(np.float32))
    assert [(way.name, way.reduces) for way in found] == [
        ("solo", True),
        ("solo, reducer", True),
        ("copy", False),
    ]
    for way in found:
        way.fill(zeros=False)
        start, end = way.run(2)
        assert 0 < end - start < 60
        assert way.is_right()


def test_a_wrong_sum_is_seen():
    dtype = np.dtype(np.float32)
    right, wrong = ways({"one": SoloCommunicator(), "two": Doubled()}, CPU, HostMemory(), 10, dtype)
    assert right.is_right() and not wrong.is_right()


class Array(np.ndarray):
    """Memory of the GPU."""

    device = SimpleNamespace(id=0)

    def set(self, host):
        self[...] = host

    def get(self, out):
        out[...] = self


class Gpu:
    """CuPy with one GPU that does everything at once, and notes it; ``kind`` and ``ordinal`` are its device's."""

    kind, ordinal = "cuda", 0

    def __init__(self):
        self.done = []
        self.capturing = None
        stream = SimpleNamespace(
            use=lambda: self.done.append("use"),
            synchronize=lambda: self.done.append("synchronize"),
            begin_capture=self.begin,
            end_capture=self.end,
        )
        self.xp = SimpleNamespace(
            asnumpy=lambda array: np.array(array),
            zeros=lambda count, dtype: np.zeros(count, dtype).view(Array),
            cuda=SimpleNamespace(
                Stream=lambda non_blocking: stream,
                Device=lambda ordinal: SimpleNamespace(synchronize=lambda: None),
                alloc_pinned_memory=bytearray,
            ),
        )

    def begin(self):
        assert self.done[-1] == "synchronize"
        self.capturing = 0

    def end(self):
        number, self.capturing = self.capturing, None
        return SimpleNamespace(launch=lambda stream: self.done.append(f"launch {number}"))

    def call(self):
        if self.capturing is None:
            self.done.append("call")
        else:
            self.capturing += 1


class OnGpu(SoloCommunicator):
    def __init__(self, gpu, transport):
        super().__init__()
        self.gpu, self.transport = gpu, transport

    def _allocate(self, nbytes, device):
        return Buffer(self.gpu.xp.zeros(nbytes, np.uint8), nbytes, device)

    def _all_reduce(self, array, op, lane):
        self.gpu.call()


def on_gpu(count, transport="cuda_ipc"):
    gpu = Gpu()
    memory = GpuMemory(gpu)
    assert gpu.done == ["use"]
    return gpu, ways({transport: OnGpu(gpu, transport)}, gpu, memory, count, np.dtype(np.float32))


def test_a_gpu_is_waited_for_before_and_after_what_is_timed():
    gpu, (eager, graph) = on_gpu(1024)
    assert (eager.name, eager.at_once) == ("cuda_ipc", 1)
    assert (graph.name, graph.at_once) == ("cuda_ipc (graph)", GRAPH_CALLS)
    for way, expected in ((eager, ["call"] * 3), (graph, [f"launch {GRAPH_CALLS}"] * 3)):
        gpu.done.clear()
        way.fill(zeros=True)
        assert gpu.done == ["synchronize"]
        way.run(3)
        assert gpu.done[1:] == [*expected, "synchronize"]
    gpu.done.clear()
    assert graph.is_right()  # of one call, since a sum of sums is something else
    assert gpu.done == ["synchronize", "launch 1", "synchronize"]


def test_a_graph_holds_fewer_large_calls_and_staging_is_not_captured():
    _, (eager, graph) = on_gpu(MANY // 4 + 1)
    assert (eager.at_once, graph.at_once) == (1, GRAPH_CALLS)
    assert on_gpu(GRAPH_BYTES // 20)[1][1].at_once == 5
    assert on_gpu(GRAPH_BYTES // 4 + 1)[1][1].at_once == 1
    assert [way.name for way in on_gpu(1024, "staged(mpi)")[1]] == ["staged(mpi)"]
