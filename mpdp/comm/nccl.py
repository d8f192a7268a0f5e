"""Collectives between GPUs by NCCL, one GPU a rank, on any number of nodes.

Each lane has an NCCL communicator and a stream of high priority of its own. NCCL may deadlock when ranks launch on
several communicators in different orders, so the calls of both lanes run one after another on the device, in the order
in which the host makes them; an urgent message then waits for the chunk before it, and for no other. The host waits for
nothing, and calls may be captured (warm up first: NCCL connects at the first call). Sums of float16 and
bfloat16 are rounded where NCCL does it, and the order of a sum is NCCL's.

NCCL names no rank that failed and waits for it for ever. So the ring asks for its asynchronous errors, sees how long
the device has been waiting, and breaks the communicators off when a rank has failed.
Host arrays go to the host communicator. Read ``choose_gpu`` for when this transport is taken.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..device import Device, device_of
from ..errors import CommunicationError, DeviceMismatchError, MissingDependencyError, on_all_ranks
from .agreement import agree, together
from .base import LANES, Communicator, Request
from .cuda_gpu import CudaGpu
from .mpi import decode, encode

_TYPES = {
    "float16": "NCCL_FLOAT16",
    "bfloat16": "NCCL_BFLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
    "uint8": "NCCL_UINT8",
    "int32": "NCCL_INT32",
    "int64": "NCCL_INT64",
    "uint64": "NCCL_UINT64",
}
_OPS = {"sum": "NCCL_SUM", "max": "NCCL_MAX"}
_LEAVE = 2.0  # seconds for the last collectives, when all ranks have left


def load() -> Any:
    """Return CuPy's binding of NCCL. **Local.**

    Raises:
        MissingDependencyError: the library is missing.
    """
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise MissingDependencyError(
            f"nccl: expected CuPy with NCCL, got {error}; install it with: pip install nvidia-nccl-cu13 (or -cu12)"
        ) from error
    if not nccl.available:
        raise MissingDependencyError(
            "nccl: expected NCCL's library, found none; install it with: pip install nvidia-nccl-cu13 (or -cu12)"
        )
    return nccl


def refuse_shared_gpus(host: Communicator, identity: bytes) -> None:
    """Raise if two ranks share a GPU: NCCL hangs then.

    **Collective.** Gathers a name a rank: call it when ranks are known to share, or are few.

    Raises:
        CommunicationError: on all ranks, naming ranks, host and GPU.
    """
    mine = f"{socket.gethostname()} {identity.hex()}"
    names = [text.decode() for text in host.all_gather_bytes(mine.encode())]
    for name in names:
        ranks = [rank for rank, other in enumerate(names) if other == name]
        if len(ranks) > 1:
            node, gpu = name.split()
            address = bytes.fromhex(gpu).partition(b"\0")[0].decode(errors="replace")[:12]
            raise on_all_ranks(
                CommunicationError(
                    f"nccl: expected a GPU of its own for each rank, got ranks {', '.join(map(str, ranks))} on GPU "
                    f'{address} of {node}; start one rank a GPU, or use transport="cuda_ipc"'
                )
            )


class _Order:
    """The call before, on whichever lane: what the next one on another lane comes behind."""

    def __init__(self) -> None:
        self.event: Any = None
        self.stream: Any = None


class _Lane:
    def __init__(self, nccl: Any, gpu: Any) -> None:
        self.nccl = nccl
        self.stream = gpu.stream()
        self.event = gpu.event()


class _Started(Request):
    def __init__(self, comm: NcclCommunicator, name: str, event: Any) -> None:
        self._comm, self._name, self._event = comm, name, event

    def wait(self) -> None:
        self._comm.activity.check(self._name)
        self._comm._join(self._event)


class NcclCommunicator(Communicator):
    """Carry GPU arrays by NCCL, and host arrays as ``host`` does.

    **Collective.** Takes the host communicator over. Ranks do not share GPUs.

    Args:
        host: a communicator over the same ranks.
        device: the GPU of this rank.
        nccl: CuPy's binding; the default is :func:`load`.
        gpu: how to use the GPU; the default is CUDA.

    Raises:
        MissingDependencyError: on all ranks, when NCCL is missing on one.
    """

    transport = "nccl"
    capturable = True
    independent = True

    def __init__(
        self,
        host: Communicator,
        device: Device,
        *,
        nccl: Any = None,
        gpu: Any = None,
        _order: _Order | None = None,
        _family: list[NcclCommunicator] | None = None,
    ) -> None:
        super().__init__(host.rank, host.size, host.activity)
        self.host, self.device = host, device
        self._nccl: Any = together(host, lambda: load() if nccl is None else nccl)
        self.gpu: Any = together(host, lambda: CudaGpu(device) if gpu is None else gpu)
        self._order = _order if _order is not None else _Order()
        self._family = _family if _family is not None else []
        self._pending: deque[tuple[Any, str, float]] = deque()
        self._broken = False
        self._lanes = {lane: _Lane(self._connect(), self.gpu) for lane in LANES}
        self._family.append(self)
        self.activity.watched.append(self)

    def _connect(self) -> Any:
        """Return a new NCCL communicator. **Collective.**"""
        # A rank that fails here alone would leave the others in NCCL, which names nobody: agree first.
        mine = together(self.host, lambda: bytes(self._nccl.get_unique_id()) if self.rank == 0 else None)
        identifier = self.host.broadcast_bytes(mine)
        self.activity.enter("NCCL's start")
        error: Exception | None = None
        comm = None
        try:
            comm = self._nccl.NcclCommunicator(self.size, identifier, self.rank)
        except Exception as caught:
            error = CommunicationError(
                f"nccl: expected a communicator of {self.size} ranks, got {caught}; see NCCL_DEBUG=INFO, or use "
                'transport="staged"'
            )
            error.__cause__ = caught
        finally:
            self.activity.leave()
        agree(self.host, error)
        return comm

    def duplicate(self) -> NcclCommunicator:
        return NcclCommunicator(
            self.host.duplicate(),
            self.device,
            nccl=self._nccl,
            gpu=self.gpu,
            _order=self._order,
            _family=self._family,
        )

    def adopt(self, lane: str) -> None:
        self.host.adopt(lane)

    def close(self) -> None:
        """Wait for the last collectives and end NCCL's communicators, last first. **Collective.**

        Graphs that hold collectives of this communicator come to their end before.
        """
        if self._end(seconds=float("inf")):
            self.host.close()

    def release(self) -> None:
        for comm in reversed(list(self._family)):
            comm._end(_LEAVE)
        self.host.release()

    def _end(self, seconds: float) -> bool:
        if self not in self._family:
            return False
        self._family.remove(self)
        deadline = time.monotonic() + seconds
        while not all(self.gpu.done(lane.stream) for lane in self._lanes.values()) and not self._broken:
            if time.monotonic() > deadline:
                self._break_off()
                break
            time.sleep(0.001)
        if self in self.activity.watched:
            self.activity.watched.remove(self)
        if not self._broken:
            self._broken = True
            for lane in reversed(self._lanes.values()):
                lane.nccl.destroy()
        return True

    # -- the ring's part

    def waiting(self) -> tuple[str, float] | None:
        pending = self._pending
        with contextlib.suppress(IndexError):  # the caller's thread has cut it meanwhile
            while pending:
                event, text, since = pending[0]
                if not self.gpu.reached(event):
                    return f"{text} by NCCL on the GPU", since
                pending.popleft()
        return None

    def error(self) -> str | None:
        if self._broken:
            return None
        for name, lane in self._lanes.items():
            try:
                lane.nccl.check_async_error()
            except Exception as error:
                return f"NCCL failed on lane {name} of rank {self.rank}: {error}"
        return None

    def abort(self) -> None:
        if not self._broken:
            threading.Thread(target=self._break_off, name="mpdp NCCL abort", daemon=True).start()

    def _break_off(self) -> None:
        self._broken = True
        for lane in self._lanes.values():
            lane.nccl.abort()

    # -- collectives

    def start_all_reduce(self, array: Any, *, op: str = "sum", lane: str = "bulk") -> Request:
        if self._on_host(array):
            return self.host.start_all_reduce(array, op=op, lane=lane)
        if op == "max":
            return super().start_all_reduce(array, op=op, lane=lane)
        self._check(array, lane, op)
        return self._start("all_reduce", array, lane, self._all_reducing(array, op))

    def start_reduce_scatter(
        self, array: Any, bounds: Sequence[int], *, op: str = "sum", lane: str = "bulk"
    ) -> Request:
        if self._on_host(array):
            return self.host.start_reduce_scatter(array, bounds, op=op, lane=lane)
        if op == "max":
            return super().start_reduce_scatter(array, bounds, op=op, lane=lane)
        self._check(array, lane, op, bounds=bounds)
        return self._start("reduce_scatter", array, lane, self._scattering(array, bounds, op))

    def start_all_gather(self, array: Any, bounds: Sequence[int], *, lane: str = "bulk") -> Request:
        if self._on_host(array):
            return self.host.start_all_gather(array, bounds, lane=lane)
        self._check(array, lane, bounds=bounds)
        return self._start("all_gather", array, lane, self._gathering(array, bounds))

    def _start(self, name: str, array: Any, lane: str, call: Callable[[Any, int], None]) -> Request:
        if array.size == 0:
            return Request()
        self._enter(name, lane)
        try:
            return _Started(self, name, self._launch(name, array, lane, call))
        finally:
            self.activity.leave()

    def _all_reducing(self, array: Any, op: str) -> Callable[[Any, int], None]:
        pointer, kind, number = array.data.ptr, self._type(array), self._op(op)
        return lambda nccl, stream: nccl.allReduce(pointer, pointer, array.size, kind, number, stream)

    def _all_reduce(self, array: Any, op: str, lane: str) -> None:
        if self._on_host(array):
            self.host._all_reduce(array, op, lane)
        else:
            with _reduced(array, op) as wide:
                self._call("all_reduce", wide, lane, self._all_reducing(wide, op))

    def _reduce(self, array: Any, op: str, root: int, lane: str) -> None:
        if self._on_host(array):
            self.host._reduce(array, op, root, lane)
            return
        with _reduced(array, op) as wide:
            pointer, kind, number = wide.data.ptr, self._type(wide), self._op(op)
            self._call(
                "reduce",
                wide,
                lane,
                lambda nccl, stream: nccl.reduce(pointer, pointer, wide.size, kind, number, root, stream),
            )

    def _broadcast(self, array: Any, root: int, lane: str) -> None:
        if self._on_host(array):
            self.host._broadcast(array, root, lane)
            return
        pointer, kind = array.data.ptr, self._type(array)
        self._call(
            "broadcast",
            array,
            lane,
            lambda nccl, stream: nccl.broadcast(pointer, pointer, array.size, kind, root, stream),
        )

    def _reduce_scatter(self, array: Any, bounds: Sequence[int], op: str, lane: str) -> None:
        if self._on_host(array):
            self.host._reduce_scatter(array, bounds, op, lane)
            return
        with _reduced(array, op) as wide:
            self._call("reduce_scatter", wide, lane, self._scattering(wide, bounds, op))

    def _scattering(self, array: Any, bounds: Sequence[int], op: str) -> Callable[[Any, int], None]:
        kind, number = self._type(array), self._op(op)
        equal, own = _parts(array, bounds, self.rank)

        def call(nccl: Any, stream: int) -> None:
            if equal:
                nccl.reduceScatter(array.data.ptr, own, equal, kind, number, stream)
                return
            with self._group():
                for root, (start, stop) in enumerate(pairwise(bounds)):
                    if stop > start:
                        part = array.data.ptr + start * array.itemsize
                        nccl.reduce(part, part, stop - start, kind, number, root, stream)

        return call

    def _all_gather(self, array: Any, bounds: Sequence[int], lane: str) -> None:
        if self._on_host(array):
            self.host._all_gather(array, bounds, lane)
        else:
            self._call("all_gather", array, lane, self._gathering(array, bounds))

    def _gathering(self, array: Any, bounds: Sequence[int]) -> Callable[[Any, int], None]:
        kind = self._type(array)
        equal, own = _parts(array, bounds, self.rank)

        def call(nccl: Any, stream: int) -> None:
            if equal:
                nccl.allGather(own, array.data.ptr, equal, kind, stream)
                return
            with self._group():
                for root, (start, stop) in enumerate(pairwise(bounds)):
                    if stop > start:
                        part = array.data.ptr + start * array.itemsize
                        nccl.broadcast(part, part, stop - start, kind, root, stream)

        return call

    def _exclusive_sum(self, value: int, lane: str) -> int:
        return self.host._exclusive_sum(value, lane)

    def _barrier(self, lane: str) -> None:
        self.host._barrier(lane)

    def _send(self, array: Any, to: int, lane: str) -> None:
        if self._on_host(array):
            self.host._send(array, to, lane)
            return
        pointer, kind = array.data.ptr, self._type(array)
        self._call(
            f"send to rank {to}",
            array,
            lane,
            lambda nccl, stream: nccl.send(pointer, array.size, kind, to, stream),
        )

    def _recv(self, array: Any, source: int, lane: str) -> None:
        if self._on_host(array):
            self.host._recv(array, source, lane)
            return
        pointer, kind = array.data.ptr, self._type(array)
        self._call(
            f"recv from rank {source}",
            array,
            lane,
            lambda nccl, stream: nccl.recv(pointer, array.size, kind, source, stream),
        )

    # -- parts

    def _on_host(self, array: Any) -> bool:
        return type(array) is np.ndarray or device_of(array).kind == "cpu"

    def _type(self, array: Any) -> int:
        return int(getattr(self._nccl, _TYPES[array.dtype.name]))

    def _op(self, op: str) -> int:
        return int(getattr(self._nccl, _OPS[op]))

    @contextlib.contextmanager
    def _group(self) -> Any:
        """Let NCCL launch all calls of the block at once."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def _call(self, name: str, array: Any, lane: str, call: Callable[[Any, int], None]) -> None:
        self._join(self._launch(name, array, lane, call))

    def _launch(self, name: str, array: Any, lane_name: str, call: Callable[[Any, int], None]) -> Any:
        """Launch a call behind what the calling thread has submitted and behind the call before; return its event."""
        self.activity.check(name)
        if device_of(array) != self.device:
            raise DeviceMismatchError(
                f"array: expected memory of {self.device}, this rank's GPU, got {device_of(array)}; move it there"
            )
        gpu, lane, order = self.gpu, self._lanes[lane_name], self._order
        gpu.mark(lane.event, gpu.current())
        gpu.join(lane.stream, lane.event)
        if order.event is not None and order.stream is not lane.stream:
            gpu.join(lane.stream, order.event)
        captured = gpu.capturing(lane.stream)  # an event inside a graph cannot be asked, and has no time
        spans = None if captured else self.spans
        begin = None if spans is None else spans.mark(lane.stream)
        call(lane.nccl, lane.stream.ptr)
        if spans is not None:
            spans.add_on_stream(lane_name, spans.label(array), begin, spans.mark(lane.stream), array.nbytes)
        event = gpu.event()
        gpu.mark(event, lane.stream)
        order.event, order.stream = event, lane.stream
        if not captured:
            self._pending.append((event, f"{name}, lane {lane_name},", time.monotonic()))
            if len(self._pending) > 1024:
                self.waiting()
        return event

    def _join(self, event: Any) -> None:
        self.gpu.join(self.gpu.current(), event)
        if self._order.event is event:  # whatever follows on this stream is behind it anyway
            self._order.event = None


@contextlib.contextmanager
def _reduced(array: Any, op: str) -> Any:
    """Give what NCCL reduces: the array, or for a maximum of floats the integers that keep NaN."""
    wide = encode(array, op) if op == "max" and array.dtype.kind not in "iu" else array
    yield wide
    decode(wide, array, op)


def _parts(array: Any, bounds: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the length of the parts if all are equal (else 0), and the address of this rank's."""
    lengths = {stop - start for start, stop in pairwise(bounds)}
    return (lengths.pop() if len(lengths) == 1 else 0), array.data.ptr + bounds[rank] * array.itemsize
