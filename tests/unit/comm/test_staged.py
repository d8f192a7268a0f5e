"""Staging without a GPU: a fake device whose memory no host transport can read."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpdp.comm.solo import SoloCommunicator
from mpdp.comm.spans import Spans
from mpdp.comm.staged import StagedCommunicator
from mpdp.device import Device


class FakeArray:
    """An array on a device: it has no buffer, no array interface and no DLPack for a transport to take."""

    class flags:
        c_contiguous = True
        writeable = True

    def __init__(self, memory, ordinal=0):
        self._memory = memory
        self.device = Device("cuda", ordinal)
        self.dtype, self.shape, self.ndim = memory.dtype, memory.shape, memory.ndim
        self.size, self.itemsize, self.nbytes = memory.size, memory.itemsize, memory.nbytes
        self.strides = memory.strides

    def __getitem__(self, key):
        return FakeArray(self._memory[key])

    def __array__(self, *_, **__):
        raise AssertionError("device memory was read on the host")


class FakeCopies:
    """Copies that happen late: only when somebody waits for their token, in the order they were started."""

    def __init__(self):
        self.pending = []
        self.threads = set()
        self.lock = threading.RLock()

    def pinned(self, nbytes):
        return np.full(nbytes, 0xAB, dtype=np.uint8)

    def mark(self):
        return self._submit(lambda: None, [])

    def fetch(self, array, host, after):
        self.threads.add(threading.get_ident())
        return self._submit(lambda: host.__setitem__(slice(None), array._memory), after)

    def put(self, host, array):
        return self._submit(lambda: array._memory.__setitem__(slice(None), host), [])

    def wait(self, token):
        with self.lock:
            while self.pending and token in self.pending:
                self._run(self.pending[0])

    join = wait

    def use(self):
        self.threads.add(threading.get_ident())

    def _submit(self, copy, after):
        token = [copy, list(after)]
        with self.lock:
            self.pending.append(token)
        return token

    def _run(self, token):
        for other in token[1]:
            assert other not in self.pending or self.pending.index(other) < self.pending.index(token)
        self.pending.remove(token)
        token[0]()


class Doubler(SoloCommunicator):
    """A host transport that doubles what it reduces, and refuses what is no NumPy array."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def _note(self, array, lane):
        assert type(array) is np.ndarray, "a device pointer was handed to the host transport"
        self.messages.append((array.size, lane, threading.get_ident()))

    def _all_reduce(self, array, op, lane):
        self._note(array, lane)
        array *= array.dtype.type(2)

    def _reduce(self, array, op, root, lane):
        self._note(array, lane)
        array += array.dtype.type(1)

    def _broadcast(self, array, root, lane):
        self._note(array, lane)
        array -= array.dtype.type(1)


def staged(piece_bytes=64):
    inner = Doubler()
    return inner, StagedCommunicator(inner, Device("cuda", 0), piece_bytes=piece_bytes, copies=FakeCopies())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 200),
    st.sampled_from(["float32", "float64", "float16", "int64", "uint8"]),
    st.sampled_from([8, 40, 64, 4096]),
    st.sampled_from(["bulk", "urgent"]),
)
def test_every_element_goes_out_is_reduced_and_comes_back(length, dtype, piece_bytes, lane):
    inner, comm = staged(piece_bytes)
    memory = (np.arange(length) % 50).astype(dtype)
    comm.all_reduce(FakeArray(memory), lane=lane)
    assert np.array_equal(memory, (np.arange(length) % 50).astype(dtype) * 2)
    itemsize = np.dtype(dtype).itemsize
    assert all(size * itemsize <= max(piece_bytes, itemsize) for size, _, _ in inner.messages)
    comm.close()


def test_several_requests_overlap_and_keep_their_order():
    inner, comm = staged()
    memories = [np.full(100, i, dtype=np.float32) for i in range(5)]
    requests = [comm.start_all_reduce(FakeArray(m)) for m in memories]
    for request in requests:
        request.wait()
    assert [m[0] for m in memories] == [0, 2, 4, 6, 8]
    assert all((m == m[0]).all() for m in memories)
    assert {lane for _, lane, _ in inner.messages} == {"bulk"}
    comm.close()


def test_the_lanes_run_in_threads_of_their_own():
    inner, comm = staged()
    comm.all_reduce(FakeArray(np.ones(40, np.float32)))
    bulk = {ident for _, _, ident in inner.messages}
    inner.messages.clear()
    comm.all_reduce(FakeArray(np.ones(40, np.float32)), lane="urgent")
    urgent = {ident for _, _, ident in inner.messages}
    assert threading.get_ident() not in bulk
    assert urgent == {threading.get_ident()}
    comm.close()


def test_host_arrays_pass_straight_through():
    inner, comm = staged()
    host = np.ones(1000, np.float64)
    comm.all_reduce(host)
    comm.all_reduce(host, lane="urgent")
    assert np.all(host == 4)
    assert [size for size, _, _ in inner.messages] == [1000, 1000]
    assert comm.exclusive_sum(3) == 0
    comm.barrier()
    comm.barrier(lane="bulk")
    comm.close()


def test_the_other_collectives():
    _, comm = staged()
    memory = np.arange(30, dtype=np.float32)
    comm.reduce(FakeArray(memory))
    assert np.array_equal(memory, np.arange(30) + 1)
    comm.broadcast(FakeArray(memory))
    assert np.array_equal(memory, np.arange(30))
    comm.reduce_scatter(FakeArray(memory), [0, 30])
    comm.all_gather(FakeArray(memory), [0, 30], lane="urgent")
    assert np.array_equal(memory, np.arange(30))
    assert comm.transport == "staged(solo)"
    other = comm.duplicate()
    assert other.inner is not comm.inner
    other.close()
    comm.close()


def test_an_error_of_the_transport_reaches_the_caller():
    inner, comm = staged()

    def broken(array, op, lane):
        raise OSError("cable")

    inner._all_reduce = broken
    with pytest.raises(OSError, match="cable"):
        comm.all_reduce(FakeArray(np.ones(10, np.float32)))
    assert comm.activity.call is None
    comm.close()


def test_a_piece_holds_an_element():
    with pytest.raises(ValueError, match=r"piece_bytes: expected 8 or more, got 4"):
        StagedCommunicator(SoloCommunicator(), Device("cuda", 0), piece_bytes=4, copies=FakeCopies())


def test_what_another_thread_carries_is_a_row_of_its_own_and_not_waited_for():
    _, comm = staged()
    spans = Spans(1)
    spans.begin_step()
    comm.note(spans)
    array = FakeArray(np.ones(100, np.float32))
    spans.labels = {id(array): "chunk 0"}
    comm.start_all_reduce(array).wait()
    comm.all_reduce(FakeArray(np.ones(4, np.float32)), lane="urgent")
    comm.close()
    first, second = spans.finished()[0]
    assert (first.row, first.name, first.waited) == ("bulk, mpdp staging rank 0", "chunk 0", False)
    assert (second.row, second.waited) == ("urgent", True)
