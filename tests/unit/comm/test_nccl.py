"""What is asked of NCCL, in which order, by a stand-in for CuPy's binding; NCCL itself needs a GPU a rank."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
from emulated_gpu import Array, CountedMarks, EmulatedGpu, ThreadRanks, in_all

from mpdp.comm import nccl as nccl_module
from mpdp.comm.nccl import NcclCommunicator, refuse_shared_gpus
from mpdp.comm.spans import STREAM, Spans
from mpdp.device import CPU, Device
from mpdp.errors import CommunicationError, MissingDependencyError, RankFailedError

GPU = Device("cuda", 0)


class Stream(str):
    """A stream that has a name, and an address."""

    ptr = 7


class Gpu(EmulatedGpu):
    """Notes what orders streams."""

    def __init__(self, log):
        super().__init__()
        self.log = log
        self.made = 0
        self.unreached = set()
        self.captured = False

    def stream(self):
        self.made += 1
        return Stream(f"lane{self.made}")

    def mark(self, event, stream):
        event[:] = [stream]

    def join(self, stream, event):
        self.log.append(f"{stream} behind {event[0]}")

    def capturing(self, stream):
        return self.captured

    def reached(self, event):
        return id(event) not in self.unreached

    def done(self, stream):
        return not self.unreached


def binding(log):
    """Return what CuPy's module offers, which writes down what it is asked."""

    class NcclError(RuntimeError):
        pass

    class Comm:
        made = 0

        def __init__(self, size, identifier, rank):
            assert isinstance(identifier, bytes) and len(identifier) == 128
            Comm.made += 1
            self.name = f"comm{Comm.made}"
            self.failed = False
            log.append(f"{self.name} init {rank}/{size} id {identifier[0]}")

        def __getattr__(self, name):
            def call(*arguments):
                log.append(f"{self.name} {name}")
                calls.append((name, *arguments))

            return call

        def check_async_error(self):
            if self.failed:
                raise NcclError("NCCL_ERROR_SYSTEM_ERROR: remote process exited")

    calls = []
    identifiers = iter(range(1, 100))
    constants = {name: i for i, name in enumerate([*nccl_module._TYPES.values(), *nccl_module._OPS.values()])}
    return SimpleNamespace(
        available=True,
        get_unique_id=lambda: bytes([next(identifiers)]) * 128,
        NcclCommunicator=Comm,
        NcclError=NcclError,
        groupStart=lambda: log.append("group"),
        groupEnd=lambda: log.append("end"),
        calls=calls,
        **constants,
    )


@pytest.fixture
def one():
    log = []
    nccl = binding(log)
    comm = NcclCommunicator(ThreadRanks.world(1)[0], GPU, nccl=nccl, gpu=Gpu(log))
    assert log == ["comm1 init 0/1 id 1", "comm2 init 0/1 id 2"]
    log.clear()
    return comm, nccl, log


def array(count, dtype=np.float32):
    return Array(np.zeros(count, dtype), GPU)


def test_a_call_comes_between_what_was_and_what_will_be_submitted(one):
    comm, nccl, log = one
    values = array(10)
    comm.all_reduce(values)
    assert log == ["lane1 behind current", "comm1 allReduce", "current behind lane1"]
    pointer = values.data.ptr
    assert nccl.calls == [("allReduce", pointer, pointer, 10, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, 7)]
    comm.all_reduce(array(0))
    assert len(nccl.calls) == 1


def test_the_lanes_run_in_the_order_of_the_calls(one):
    comm, _, log = one
    request = comm.start_all_reduce(array(10))
    comm.broadcast(array(3), lane="urgent")
    request.wait()
    assert log == [
        "lane1 behind current",
        "comm1 allReduce",
        "lane2 behind current",
        "lane2 behind lane1",
        "comm2 broadcast",
        "current behind lane2",
        "current behind lane1",
    ]
    log.clear()
    comm.all_reduce(
        array(3)
    )  # all before has been waited for: a graph that begins here depends on nothing old
    assert log == ["lane1 behind current", "comm1 allReduce", "current behind lane1"]


def test_parts_of_chunks_are_started_beside_what_is_submitted(one):
    comm, nccl, log = one
    values = array(10)
    requests = [comm.start_reduce_scatter(values, [0, 10]), comm.start_all_gather(values, [0, 10])]
    assert log == [
        "lane1 behind current",
        "comm1 reduceScatter",
        "lane1 behind current",
        "comm1 allGather",
    ]
    for request in requests:
        request.wait()
    assert log[4:] == ["current behind lane1"] * 2
    pointer = values.data.ptr
    assert nccl.calls[0] == ("reduceScatter", pointer, pointer, 10, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, 7)
    assert nccl.calls[1] == ("allGather", pointer, pointer, 10, nccl.NCCL_FLOAT32, 7)
    comm.start_reduce_scatter(array(0), [0, 0]).wait()
    assert len(nccl.calls) == 2


@pytest.mark.parametrize("dtype", list(nccl_module._TYPES))
def test_each_dtype_travels_as_itself(one, dtype):
    import ml_dtypes

    comm, nccl, _ = one
    comm.all_reduce(array(4, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
    assert nccl.calls[0][4] == getattr(nccl, nccl_module._TYPES[dtype])


def test_the_other_collectives():
    log = []
    nccl = binding(log)
    comms = in_all(
        ThreadRanks.world(2),
        lambda host: NcclCommunicator(host, GPU, nccl=nccl, gpu=Gpu(log)),
    )
    comm = comms[1]
    nccl.calls.clear(), log.clear()
    values = array(8, np.int64)
    at, kind, total = values.data.ptr, nccl.NCCL_INT64, nccl.NCCL_SUM
    comm.reduce(values, root=1)
    comm.reduce_scatter(values, [0, 4, 8])
    comm.all_gather(values, [0, 4, 8])
    comm.reduce(values, op="max")
    comm.send(values, to=0)
    comm.recv(values, source=0)
    assert nccl.calls == [
        ("reduce", at, at, 8, kind, total, 1, 7),
        ("reduceScatter", at, at + 32, 4, kind, total, 7),
        ("allGather", at + 32, at, 4, kind, 7),
        ("reduce", at, at, 8, kind, nccl.NCCL_MAX, 0, 7),
        ("send", at, 8, kind, 0, 7),
        ("recv", at, 8, kind, 0, 7),
    ]
    nccl.calls.clear(), log.clear()
    comm.reduce_scatter(values, [0, 3, 8])
    comm.all_gather(values, [0, 8, 8])
    assert nccl.calls == [
        ("reduce", at, at, 3, kind, total, 0, 7),
        ("reduce", at + 24, at + 24, 5, kind, total, 1, 7),
        ("broadcast", at, at, 8, kind, 0, 7),
    ]
    assert [word for word in log if word in ("group", "end")] == ["group", "end", "group", "end"]


def test_host_arrays_go_to_the_host_communicator(one):
    comm, nccl, _ = one
    values = np.arange(3.0)
    comm.all_reduce(values)
    comm.start_all_reduce(values).wait()
    comm.barrier()
    assert comm.exclusive_sum(4) == 0 and comm.allocate(5, CPU).nbytes == 5
    assert nccl.calls == []


def test_communicators_end_in_order(one):
    comm, _, log = one
    other = comm.duplicate()
    assert log == ["comm3 init 0/1 id 3", "comm4 init 0/1 id 4"]
    log.clear()
    comm.release()
    comm.release()
    comm.close()
    other.close()
    assert log == ["comm4 destroy", "comm3 destroy", "comm2 destroy", "comm1 destroy"]
    assert comm.activity.watched == []


def test_what_the_device_waits_for_shows_and_a_failure_breaks_it_off(one):
    comm, _, log = one
    request = comm.start_all_reduce(array(10))
    comm.gpu.unreached.add(id(request._event))
    text, since = comm.activity.waiting()
    assert text == "all_reduce, lane bulk, by NCCL on the GPU" and since > 0
    log.clear()
    comm.activity.failure = "rank 1 died"
    deadline = time.monotonic() + 5
    while len(log) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert log == ["comm1 abort", "comm2 abort"]
    with pytest.raises(RankFailedError, match="rank 1 died"):
        request.wait()
    with pytest.raises(RankFailedError, match="rank 1 died"):
        comm.all_reduce(array(10))
    comm.close()
    assert "comm1 destroy" not in log and comm.error() is None


def test_what_never_ends_is_broken_off_at_the_end(one, monkeypatch):
    comm, _, log = one
    monkeypatch.setattr(nccl_module, "_LEAVE", 0.05)
    comm.gpu.unreached.add(0)
    comm.release()
    assert log == ["comm1 abort", "comm2 abort"]


def test_an_asynchronous_error_is_found(one):
    comm, _, _ = one
    assert comm.error() is None
    comm._lanes["urgent"].nccl.failed = True
    assert comm.error() == (
        "NCCL failed on lane urgent of rank 0: NCCL_ERROR_SYSTEM_ERROR: remote process exited"
    )


def test_an_event_inside_a_graph_is_not_asked(one):
    comm, _, _ = one
    comm.gpu.captured = True
    comm.gpu.unreached.add(id(comm.start_all_reduce(array(3))._event))
    assert comm.waiting() is None


def test_a_call_is_noted_on_the_stream_of_its_lane(one):
    comm, _, _ = one
    spans = Spans(1, streams=CountedMarks())
    spans.begin_step()
    comm.note(spans)
    chunk = array(100)
    spans.labels = {id(chunk): "chunk 0"}
    comm.start_all_reduce(chunk).wait()
    comm.broadcast(array(3), lane="urgent")
    comm.gpu.captured = True
    comm.start_all_reduce(chunk).wait()
    found = [span for span in spans.finished()[0] if span.kind == STREAM]
    assert [span[:6] for span in found] == [
        ("stream bulk", "chunk 0", STREAM, 1, 2, 400),
        ("stream urgent", "message", STREAM, 3, 4, 12),
    ]
    assert spans.streams.marked == ["lane1", "lane1", "lane2", "lane2"]


def test_nccl_that_one_rank_lacks_is_an_error_on_all(monkeypatch):
    def load():
        raise MissingDependencyError("nccl: expected NCCL's library, found none; install it")

    monkeypatch.setattr(nccl_module, "load", load)

    def body(host):
        with pytest.raises(MissingDependencyError, match=r"found none; install it \(on rank 1 of 2\)"):
            NcclCommunicator(host, GPU, nccl=None if host.rank else binding([]), gpu=Gpu([]))

    in_all(ThreadRanks.world(2), body)


def test_a_communicator_that_does_not_start_is_an_error_on_all():
    def body(host):
        nccl = binding([])
        if host.rank == 1:
            nccl.NcclCommunicator = lambda *_: (_ for _ in ()).throw(RuntimeError("unhandled cuda error"))
        with pytest.raises(
            CommunicationError,
            match=r"nccl: expected a communicator of 2 ranks, got unhandled .* \(on rank 1 of 2\)",
        ):
            NcclCommunicator(host, GPU, nccl=nccl, gpu=Gpu([]))

    in_all(ThreadRanks.world(2), body)


def test_ranks_that_share_a_gpu_are_named():
    def body(host):
        name = b"0000:05:00.0" if host.rank else b"0000:06:00.0"
        with pytest.raises(
            CommunicationError,
            match=r"nccl: expected a GPU .* got ranks 1, 2 on GPU 0000:05:00.0 of \S+; start one",
        ):
            refuse_shared_gpus(host, name.ljust(64, b"\0"))

    in_all(ThreadRanks.world(3), body)
    in_all(ThreadRanks.world(3), lambda host: refuse_shared_gpus(host, bytes([host.rank + 1] * 64)))
