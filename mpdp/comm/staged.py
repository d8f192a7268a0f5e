"""GPU buffers over a host communicator: copy out, reduce on the host, copy in, successive pieces overlapping.

No device pointer ever reaches the host transport: an MPI that is not CUDA-aware crashes on one, and those on PyPI
are not. A progress thread does the waiting, so that backward goes on; the copies run on streams of their own between
two pinned buffers. Host arrays (the step record, texts) pass straight through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from ..device import CPU, Device, device_of
from .activity import Activity
from .base import Buffer, Communicator, Request
from .progress import ProgressThread
from .spans import Spans

PIECE_BYTES = 4 << 20  # of a pinned buffer of the bulk lane; there are two
URGENT_BYTES = 64 << 10


class Copies(Protocol):
    """What staging needs of a device. A token stands for a point in the device's work.

    Attributes:
        spans: notes when copies run, while a timeline is taken.
    """

    spans: Spans | None

    def pinned(self, nbytes: int) -> np.ndarray:
        """Return host memory (uint8) that the device copies to and from without waiting."""

    def mark(self) -> Any:
        """Return a token for all work submitted by the calling thread so far."""

    def fetch(self, array: Any, host: np.ndarray, after: Sequence[Any]) -> Any:
        """Start a copy of a flat device array to ``host`` once the tokens are past; return its token."""

    def put(self, host: np.ndarray, array: Any) -> Any:
        """Start a copy of ``host`` to a flat device array; return its token."""

    def wait(self, token: Any) -> None:
        """Block the calling thread until the token is past."""

    def join(self, token: Any) -> None:
        """Let the calling thread's further device work come after the token, without blocking."""

    def use(self) -> None:
        """Bind the calling thread to the device."""


class CudaCopies:
    """Copies of one GPU through CuPy, each direction on a stream of its own.

    Args:
        device: the GPU.
    """

    spans: Spans | None = None

    def __init__(self, device: Device) -> None:
        self._cupy = device.xp
        self._device = self._cupy.cuda.Device(device.ordinal)
        with self._device:
            self._out = self._cupy.cuda.Stream(non_blocking=True)
            self._in = self._cupy.cuda.Stream(non_blocking=True)

    def pinned(self, nbytes: int) -> np.ndarray:
        import cupyx

        return cupyx.empty_pinned(nbytes, dtype=np.uint8)

    def mark(self) -> Any:
        return self._record(self._cupy.cuda.get_current_stream())

    def fetch(self, array: Any, host: np.ndarray, after: Sequence[Any]) -> Any:
        for token in after:
            self._out.wait_event(token)
        self._copy(host.ctypes.data, array.data.ptr, array.nbytes, self._out, "deviceToHost")
        return self._record(self._out)

    def put(self, host: np.ndarray, array: Any) -> Any:
        self._copy(array.data.ptr, host.ctypes.data, array.nbytes, self._in, "hostToDevice")
        return self._record(self._in)

    def wait(self, token: Any) -> None:
        token.synchronize()

    def join(self, token: Any) -> None:
        self._cupy.cuda.get_current_stream().wait_event(token)

    def use(self) -> None:
        self._device.use()

    def _copy(self, target: int, source: int, nbytes: int, stream: Any, kind: str) -> None:
        runtime = self._cupy.cuda.runtime
        direction = {"deviceToHost": runtime.memcpyDeviceToHost, "hostToDevice": runtime.memcpyHostToDevice}[
            kind
        ]
        spans = self.spans
        if spans is None:
            runtime.memcpyAsync(target, source, nbytes, direction, stream.ptr)
            return
        start = spans.mark(stream)
        runtime.memcpyAsync(target, source, nbytes, direction, stream.ptr)
        name = "copy out" if stream is self._out else "copy in"
        spans.add_on_stream(name, name, start, spans.mark(stream), nbytes)

    def _record(self, stream: Any) -> Any:
        event = self._cupy.cuda.Event(block=True, disable_timing=True)  # blocking: the core is free meanwhile
        event.record(stream)
        return event


class _Lane:
    """Two pinned buffers and, for each, the token of the copy that last read it."""

    def __init__(self, copies: Copies, piece_bytes: int) -> None:
        self._copies = copies
        self._piece_bytes = piece_bytes
        self._hosts = [copies.pinned(piece_bytes) for _ in range(2)]
        self._read: list[Any] = [None, None]

    def run(self, array: Any, call: Callable[[np.ndarray], None], ready: Any) -> Any:
        """Move an array through the buffers piece by piece, calling ``call`` on each; return the last token."""
        count = max(1, self._piece_bytes // array.itemsize)
        pieces = [array[i : i + count] for i in range(0, array.size, count)]
        fetched = [self._fetch(0, pieces[0], ready)]
        token = ready
        for i, piece in enumerate(pieces):
            if i + 1 < len(pieces):
                fetched.append(self._fetch((i + 1) % 2, pieces[i + 1], ready))
            host = self._host(i % 2, piece)
            self._copies.wait(fetched[i])
            call(host)
            token = self._read[i % 2] = self._copies.put(host, piece)
        return token

    def _fetch(self, which: int, piece: Any, ready: Any) -> Any:
        after = [ready] if self._read[which] is None else [ready, self._read[which]]
        return self._copies.fetch(piece, self._host(which, piece), after)

    def _host(self, which: int, piece: Any) -> np.ndarray:
        return self._hosts[which][: piece.nbytes].view(piece.dtype)


class StagedRequest(Request):
    """A staged collective: ``wait`` blocks until the host part is done and orders the device behind the copies in."""

    def __init__(
        self, name: str, job: Request, copies: Copies, tokens: list[Any], activity: Activity
    ) -> None:
        self._name, self._activity = name, activity
        self._job, self._copies, self._tokens = job, copies, tokens

    def wait(self) -> None:
        self._activity.enter(self._name)
        try:
            self._job.wait()
        finally:
            self._activity.leave()
        for token in self._tokens:
            self._copies.join(token)


class _All(Request):
    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests

    def wait(self) -> None:
        for request in self._requests:
            request.wait()


class StagedCommunicator(Communicator):
    """Carry GPU arrays through host memory and host arrays directly.

    **Collective.** Takes the inner communicator over: its bulk lane belongs to a progress thread from now on.

    Args:
        inner: a host communicator.
        device: the GPU of this rank.
        piece_bytes: bytes of the bulk lane that are copied and reduced at once.
        copies: how to copy; the default is CUDA's.
    """

    chunk_bytes = PIECE_BYTES  # one pinned buffer a chunk: the copies of two chunks overlap
    chunk_edge = 4
    independent = True

    def __init__(
        self,
        inner: Communicator,
        device: Device,
        *,
        piece_bytes: int = PIECE_BYTES,
        copies: Copies | None = None,
    ) -> None:
        super().__init__(inner.rank, inner.size, inner.activity)
        if piece_bytes < 8:
            raise ValueError(f"piece_bytes: expected 8 or more, got {piece_bytes}")
        self.transport = f"staged({inner.transport})"
        self.inner = inner
        self.device = device
        self.piece_bytes = piece_bytes
        self._copies: Copies = copies if copies is not None else CudaCopies(device)
        self._lanes = {
            "bulk": _Lane(self._copies, piece_bytes),
            "urgent": _Lane(self._copies, min(piece_bytes, URGENT_BYTES)),
        }
        self._thread = ProgressThread(f"mpdp staging rank {self.rank}")
        self._thread.submit(self._bind).wait()

    def _bind(self) -> None:
        self._copies.use()
        self.inner.adopt("bulk")

    def duplicate(self) -> StagedCommunicator:
        return StagedCommunicator(
            self.inner.duplicate(), self.device, piece_bytes=self.piece_bytes, copies=self._copies
        )

    def close(self) -> None:
        """Finish what is queued, end the thread and close the inner communicator. **Collective.**"""
        self._thread.close()
        self.inner.close()

    def _allocate(self, nbytes: int, device: Device) -> Buffer:
        return self.inner.allocate(nbytes, device) if device == CPU else super()._allocate(nbytes, device)

    def start_all_reduce(self, array: Any, *, op: str = "sum", lane: str = "bulk") -> Request:
        if lane != "bulk":
            return super().start_all_reduce(array, op=op, lane=lane)
        self._check(array, lane, op)
        return self._start("all_reduce", array, lambda host: self.inner._all_reduce(host, op, lane))

    def start_reduce_scatter(
        self, array: Any, bounds: Sequence[int], *, op: str = "sum", lane: str = "bulk"
    ) -> Request:
        if lane != "bulk":
            return super().start_reduce_scatter(array, bounds, op=op, lane=lane)
        self._check(array, lane, op, bounds=bounds)
        return _All(
            [
                self._start("reduce_scatter", part, partial(self.inner._reduce, op=op, root=root, lane=lane))
                for root, part in _parts(array, bounds)
            ]
        )

    def start_all_gather(self, array: Any, bounds: Sequence[int], *, lane: str = "bulk") -> Request:
        if lane != "bulk":
            return super().start_all_gather(array, bounds, lane=lane)
        self._check(array, lane, bounds=bounds)
        return _All(
            [
                self._start("all_gather", part, partial(self.inner._broadcast, root=root, lane=lane))
                for root, part in _parts(array, bounds)
            ]
        )

    def _start(self, name: str, array: Any, call: Callable[[Any], None]) -> Request:
        """Have the thread of the bulk lane move an array, and go on. **Collective.**"""
        lane, tokens = "bulk", list[Any]()
        work = self._work(array, lane, call, tokens)
        if self.spans is not None:
            work = _noted(work, self.spans, lane, array)
        return StagedRequest(name, self._thread.submit(work), self._copies, tokens, self.activity)

    def note(self, spans: Spans | None) -> None:
        super().note(spans)
        self._copies.spans = spans

    def _route(self, array: Any, lane: str, call: Callable[[Any], None]) -> None:
        """Run ``call`` on the array's host pieces, in the thread that owns the lane."""
        tokens: list[Any] = []
        work = self._work(array, lane, call, tokens)
        if lane == "bulk":
            self._thread.submit(work).wait()
        else:
            work()
        for token in tokens:
            self._copies.join(token)

    def _work(
        self, array: Any, lane: str, call: Callable[[Any], None], tokens: list[Any]
    ) -> Callable[[], None]:
        if device_of(array) == CPU:
            return lambda: call(array)
        ready = self._copies.mark()  # taken in the caller's thread: everything it has submitted comes first
        return lambda: tokens.append(self._lanes[lane].run(array, call, ready))

    def _all_reduce(self, array: Any, op: str, lane: str) -> None:
        self._route(array, lane, lambda host: self.inner._all_reduce(host, op, lane))

    def _reduce(self, array: Any, op: str, root: int, lane: str) -> None:
        self._route(array, lane, lambda host: self.inner._reduce(host, op, root, lane))

    def _broadcast(self, array: Any, root: int, lane: str) -> None:
        self._route(array, lane, lambda host: self.inner._broadcast(host, root, lane))

    def _reduce_scatter(self, array: Any, bounds: Sequence[int], op: str, lane: str) -> None:
        for root, part in _parts(array, bounds):
            self._reduce(part, op, root, lane)

    def _all_gather(self, array: Any, bounds: Sequence[int], lane: str) -> None:
        for root, part in _parts(array, bounds):
            self._broadcast(part, root, lane)

    def _exclusive_sum(self, value: int, lane: str) -> int:
        result: list[int] = []
        self._run(lane, lambda: result.append(self.inner._exclusive_sum(value, lane)))
        return result[0]

    def _barrier(self, lane: str) -> None:
        self._run(lane, lambda: self.inner._barrier(lane))

    def _run(self, lane: str, call: Callable[[], None]) -> None:
        if lane == "bulk":
            self._thread.submit(call).wait()
        else:
            call()

    def _send(self, array: Any, to: int, lane: str) -> None:
        self._route(array, lane, lambda host: self.inner._send(host, to, lane))

    def _recv(self, array: Any, source: int, lane: str) -> None:
        self._route(array, lane, lambda host: self.inner._recv(host, source, lane))


def _parts(array: Any, bounds: Sequence[int]) -> list[tuple[int, Any]]:
    """Return rank and part of those ranks that have one."""
    return [(rank, array[start:stop]) for rank, (start, stop) in enumerate(pairwise(bounds)) if stop > start]


def _noted(work: Callable[[], None], spans: Spans, lane: str, array: Any) -> Callable[[], None]:
    def call() -> None:
        with spans.message(lane, array):
            work()

    return call
