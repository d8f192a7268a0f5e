"""What is launched: mocks, null kernels, graphs, and calls of CuPy, each with how to do it n times from Python or C.

A target belongs to one worker. :class:`Timing` is what a worker says of n launches.
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import loops as c
from .driver import PTX, Submission, driver

EVERY = 256  # launches between two waits for the stream: far below the depth of its queue, about 1024
WARM_UP = 16  # calls before each start, as in launches.c
_user_lock = threading.Lock()  # the user's own, round each launch: the process has one by nature


CALLS = {
    "event query": "cuEventQuery",
    "stream query": "cuStreamQuery",
    "pointer attribute": "cuPointerGetAttribute",
    "event record": "cuEventRecord",
    "copy pinned": "cuMemcpyHtoDAsync of pinned memory",
    "copy pageable": "cuMemcpyHtoDAsync of pageable memory",
    "allocate": "cuMemAlloc and cuMemFree",
    "allocate async": "cuMemAllocAsync and cuMemFreeAsync",
    "event wait": "a kernel, cuEventRecord, cuEventSynchronize",
    "module load": "cuModuleLoadData and cuModuleUnload",
}


@dataclass(frozen=True)
class Launch:
    """What one worker launches, as plain data that a process can be sent.

    Attributes:
        kind: ``"spin"``, ``"sleep"`` (mocks), ``"kernel"``, ``"graph"``, ``"cupy"``, or a call of ``CALLS``.
        microseconds: of a mock; of the kernel on the GPU.
        locked: a mock holds one lock of the process.
        nodes: of a graph.
        own_context: by ``cuCtxCreate``.
        own_stream: else the context's default one, which waits for all others.
        nbytes: of a copy or an allocation.
        every: launches between two waits for the stream; 0: never, so that its queue gets full.
    """

    kind: str
    microseconds: float = 0.0
    locked: bool = False
    nodes: int = 1
    own_context: bool = False
    own_stream: bool = True
    nbytes: int = 16384
    every: int = EVERY


@dataclass
class Timing:
    """How n launches of one worker went; times are those of CLOCK_MONOTONIC, in nanoseconds.

    Attributes:
        busy: inside of the launches.
        switches: voluntary and involuntary ones meanwhile, of the thread.
        cpu: seconds of a core that the thread used.
        calls: that were made.
    """

    started: int
    ended: int
    busy: int
    latencies: np.ndarray = field(repr=False)
    switches: tuple[int, int] = (0, 0)
    cpu: float = 0.0
    calls: int = 0


def bind(cpu: int) -> None:
    """Bind the calling thread to a core; -1 leaves it as it is. **Local.**"""
    if cpu >= 0 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cpu})


def wait_until(start_at: int) -> None:
    """Return at a moment of ``time.monotonic_ns()``: sleep, then look. **Local.**"""
    while (left := start_at - time.monotonic_ns()) > 0:
        if left > 500_000:
            time.sleep((left - 400_000) / 1e9)


class Target:
    """One worker's launches.

    **Local.** Made, used and closed by whichever threads, one at a time.

    Args:
        launch: what.
        ordinal: of the GPU.
        free: calls of Python release the GIL.
    """

    def __init__(self, launch: Launch, ordinal: int, free: bool = True) -> None:
        self._submission: Submission | None = None
        self.job = c.Job(cpu=-1, every=launch.every or 1 << 62)
        self._stream: Any = None
        if launch.kind == "cupy":
            self._call = self._prepare_cupy(ordinal)
            return
        loops = c.loops()
        if isinstance(loops, str):
            raise RuntimeError(loops)
        self.loops = loops
        if launch.kind in ("spin", "sleep"):
            self.job.kind = c.SPIN if launch.kind == "spin" else c.SLEEP
            self.job.nanoseconds = int(launch.microseconds * 1000)
            self.job.mock_lock = launch.locked
        else:
            self._prepare(launch, ordinal)
        once, job = (loops.free if free else loops.held).once, ctypes.addressof(self.job)

        def call() -> None:
            if once(job):
                raise RuntimeError("a launch failed")

        self._call = call

    def _prepare(self, launch: Launch, ordinal: int) -> None:
        submission = self._submission = Submission(ordinal, launch.own_context, launch.own_stream)
        job, find, kind = self.job, driver().address, launch.kind
        job.context, job.stream, job.bytes = submission.context, submission.stream, launch.nbytes
        job.set_context, job.synchronize = find("cuCtxSetCurrent"), find("cuStreamSynchronize")
        job.event = submission.event
        if kind in ("kernel", "event wait"):
            job.kind, job.call = c.KERNEL, find("cuLaunchKernel")
            job.target = submission.kernel(launch.microseconds)
            job.parameters = ctypes.addressof(submission.parameters)
            if kind == "event wait":
                job.kind, job.second, job.third = c.WAIT, find("cuEventRecord"), find("cuEventSynchronize")
        elif kind == "graph":
            job.kind, job.call = c.GRAPH, find("cuGraphLaunch")
            job.target = submission.graph(launch.nodes)
        elif kind == "event query":
            job.kind, job.call, job.target = c.QUERY, find("cuEventQuery"), submission.event
        elif kind == "stream query":
            job.kind, job.call, job.target = c.QUERY, find("cuStreamQuery"), submission.stream
        elif kind == "pointer attribute":
            job.kind, job.call = c.ATTRIBUTE, find("cuPointerGetAttribute")
            job.memory = submission.memory(launch.nbytes)
        elif kind == "event record":
            job.kind, job.call = c.RECORD, find("cuEventRecord")
        elif kind in ("copy pinned", "copy pageable"):
            job.kind, job.call, job.memory = (
                c.COPY,
                find("cuMemcpyHtoDAsync_v2"),
                submission.memory(launch.nbytes),
            )
            self._host = np.ones(launch.nbytes, np.uint8)
            pinned = kind == "copy pinned"
            job.target = submission.pinned(launch.nbytes) if pinned else self._host.ctypes.data
        elif kind == "allocate":
            job.kind, job.call, job.second = c.ALLOCATE, find("cuMemAlloc_v2"), find("cuMemFree_v2")
        elif kind == "allocate async":
            job.kind, job.call, job.second = c.ALLOCATE_ASYNC, find("cuMemAllocAsync"), find("cuMemFreeAsync")
        elif kind == "module load":
            job.kind, job.call, job.second = c.LOAD, find("cuModuleLoadData"), find("cuModuleUnload")
            self._image = ctypes.create_string_buffer(PTX)
            job.target = ctypes.addressof(self._image)
        else:
            raise ValueError(f"launch: expected a known kind, got {kind!r}")
        submission.synchronize()

    def _prepare_cupy(self, ordinal: int) -> Callable[[], None]:
        import cupy  # type: ignore[import-not-found,unused-ignore]

        self._cupy, self._ordinal = cupy, ordinal
        cupy.cuda.runtime.setDevice(
            ordinal
        )  # also where CuPy thinks that it is; a context of our own may be current
        with cupy.cuda.Device(ordinal):
            kernel = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")
            self._stream = cupy.cuda.Stream(non_blocking=True)
            with self._stream:
                kernel((1,), (32,), ())
        self._stream.synchronize()
        return lambda: kernel((1,), (32,), ())

    def enter(self, cpu: int = -1) -> None:
        """Let the calling thread work on the target, bound to a core. **Local.**"""
        bind(cpu)
        self.job.cpu = cpu
        if self._submission is not None:
            self._submission.use()
        if self._stream is not None:
            self._cupy.cuda.runtime.setDevice(self._ordinal)
            self._stream.use()

    def call(self) -> None:
        """Launch once, from Python. **Local.**"""
        self._call()

    def synchronize(self) -> None:
        """Wait until the GPU is done. **Local.**"""
        if self._submission is not None:
            self._submission.synchronize()
        elif self._stream is not None:
            self._stream.synchronize()

    @property
    def waits(self) -> bool:
        """Whether there is something to wait for."""
        return self._submission is not None or self._stream is not None

    def from_python(self, n: int, start_at: int, mutex: bool) -> Timing:
        """Launch n times, each a call of Python's. **Local.**"""
        latencies = np.empty(n, np.float32)
        call, clock, waits, busy = self._call, time.monotonic_ns, self.waits, 0
        for _ in range(WARM_UP):
            call()
        self.synchronize()
        before_start = _usage()
        wait_until(start_at)
        started = clock()
        for i in range(n):
            before = clock()
            if mutex:
                with _user_lock:
                    call()
            else:
                call()
            spent = clock() - before
            busy += spent
            latencies[i] = spent
            if waits and (i + 1) % EVERY == 0:
                self.synchronize()
        self.synchronize()
        ended = clock()
        switches, cpu = _since(before_start)
        return Timing(started, ended, busy, latencies, switches, cpu, n)

    def jobs(self, n: int, start_at: int, mutex: bool, stop_at: int = 0, keep: bool = True) -> np.ndarray:
        """Set the job of the loops to n launches, and return where their times will be.

        **Local.**

        Args:
            n: launches; fewer, if the job stops before.
            start_at, stop_at: moments of ``time.monotonic_ns()``; 0 for none.
            mutex: the user's lock round each launch.
            keep: the times; else the array is empty.
        """
        latencies = np.zeros(n if keep else 0, np.float32)
        job = self.job
        job.n, job.start_at, job.stop_at, job.user_lock = n, start_at, stop_at, mutex
        job.latencies = latencies.ctypes.data if keep else None
        return latencies

    def from_c(self, n: int, start_at: int, mutex: bool, stop_at: int = 0, keep: bool = True) -> Timing:
        """Launch n times in one call of Python's; see :meth:`jobs`. **Local.**"""
        latencies = self.jobs(n, start_at, mutex, stop_at, keep)
        self.loops.run(self.job)
        return self.timing(latencies)

    def timing(self, latencies: np.ndarray) -> Timing:
        """Return how the job of the loops went. **Local.**"""
        job = self.job
        if job.error:
            raise RuntimeError(f"a launch failed: error {job.error} of CUDA")
        switches = job.voluntary, job.involuntary
        seconds = job.cpu_nanoseconds / 1e9
        return Timing(job.started, job.ended, job.busy, latencies[: job.calls], switches, seconds, job.calls)

    def close(self) -> None:
        """Give back what was made. **Local.**"""
        if self._submission is not None:
            self._submission.close()


def _usage() -> Any:
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF))


def _since(before: Any) -> tuple[tuple[int, int], float]:
    after = _usage()
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (after.ru_nvcsw - before.ru_nvcsw, after.ru_nivcsw - before.ru_nivcsw), seconds
