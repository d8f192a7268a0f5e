"""Recorder: turn what a function launches on a GPU into a graph, which runs again with one call.

Launches are recorded on a stream of their own, and what they allocate comes from a pool of their own: the graph writes
to that memory at each launch, so nothing else may get it. Read ``graph_step`` for what is recorded. The tests have a
recorder that calls the function again, which shows everything but CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ..comm.base import Request
from ..device import Device

_EXTERNAL = 1  # cudaEventWaitExternal: each launch of a graph waits for what was recorded last before it


class Follow(Request):
    """What a graph waits for, each time it runs: see :meth:`CudaRecorder.follow`."""

    def __init__(self, recorder: Any, number: int) -> None:
        self._recorder, self._number = recorder, number

    def wait(self) -> None:
        self._recorder.follow(self._number)


class Graph:
    """What was recorded."""

    def __init__(self, graph: Any, stream: Callable[[], Any]) -> None:
        self._graph, self._stream = graph, stream

    def launch(self) -> None:
        """Run it once, on the calling thread's current stream."""
        self._graph.launch(self._stream())


class CudaRecorder:
    """Record on one GPU. **Local.**

    Args:
        device: the GPU.
    """

    def __init__(self, device: Device) -> None:
        self._cupy: Any = device.xp
        self._ordinal = device.ordinal
        with self._cupy.cuda.Device(self._ordinal):
            self._stream = self._cupy.cuda.Stream(non_blocking=True)
            self._side = self._cupy.cuda.Stream(non_blocking=True)
            self._arrivals = self._cupy.cuda.Stream(non_blocking=True)
            self._pool = self._cupy.cuda.MemoryPool()
        self._events: list[Any] = []

    @property
    def held_bytes(self) -> int:
        """Bytes that the graphs' own pool has taken of the GPU."""
        return int(self._pool.total_bytes())

    def make_room(self) -> None:
        """Give back what steps that ran eagerly have left in CuPy's pool: the graphs take as much again."""
        self._cupy.get_default_memory_pool().free_all_blocks()

    def wait(self) -> None:
        """Wait until everything is done that was launched on the current stream."""
        self._current().synchronize()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Run a block on a stream of its own, beside what the current stream still does."""
        before = self._current()
        self._side.use()
        try:
            yield
        finally:
            before.use()

    def mark(self, number: int, request: Request) -> None:
        """Let the graphs that :meth:`follow` a number wait for a request from now on. **Local.**"""
        event, before = self._event(number), self._current()
        self._arrivals.use()
        try:
            request.wait()
            event.record(self._arrivals)
        finally:
            before.use()

    def follow(self, number: int) -> None:
        """Record that a graph waits, whenever it is launched, for what was marked last by a number. **Local.**"""
        self._cupy.cuda.runtime.streamWaitEvent(self._current().ptr, self._event(number).ptr, _EXTERNAL)

    def _event(self, number: int) -> Any:
        with self._cupy.cuda.Device(self._ordinal):
            while len(self._events) <= number:
                self._events.append(self._cupy.cuda.Event(disable_timing=True))
        return self._events[number]

    def record(self, body: Callable[[], None]) -> Graph:
        """Call a function and return what it launched, which has not run then. **Local.**

        Raises:
            Exception: what the function raises, or CUDA, for a call that a graph cannot hold.
        """
        cuda = self._cupy.cuda
        before = self._current()
        with cuda.using_allocator(self._pool.malloc):
            self._stream.use()
            try:
                self._stream.begin_capture()
                try:
                    body()
                except BaseException:
                    with contextlib.suppress(Exception):  # the first error says more
                        self._stream.end_capture()
                    raise
                graph = self._stream.end_capture()
            finally:
                before.use()
        return Graph(graph, self._current)

    def _current(self) -> Any:
        return self._cupy.cuda.get_current_stream(self._ordinal)


def recorder_of(device: Device) -> CudaRecorder | None:
    """Return a recorder for a device; None where there is nothing to record. **Local.**"""
    return CudaRecorder(device) if device.kind == "cuda" else None
