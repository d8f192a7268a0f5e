"""The ways to all-reduce an array that ``mpdp bench all-reduce`` compares, on host memory and on a GPU.

Each is a transport called directly, through the reducer, replayed from a captured graph, or plain MPI. Other systems
take turns with them: read ``torch_peer``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ..comm.base import Communicator
from ..comm.mpi import MpiCommunicator
from ..device import Device
from ..parallel.arena import GradientArena
from ..parallel.layout import SPAN
from ..parallel.reducer import Reducer

REDUCER_BYTES = 1 << 20  # from here on also through the reducer
COPY_BYTES = 16 << 20  # from here on compared with a copy of memory
MANY = 64 << 10  # bytes; up to here one time is that of many calls
GRAPH_CALLS = 100  # most calls in a graph, whose launch costs as much as several small ones
GRAPH_BYTES = 64 << 20  # that a graph of several calls moves at most
CAPTURED = ("cuda_ipc", "nccl")
_NOT_OF_MPI = ("float16", "bfloat16")  # MPI has no portable sum of them


class Way(Protocol):
    """One way to all-reduce one array.

    Attributes:
        name: as in the table.
        at_once: all-reduces that a call makes.
        reduces: it does; else it is what others are compared with.
    """

    name: str
    at_once: int
    reduces: bool

    def fill(self, zeros: bool) -> None:
        """Write this rank's content, or zeros, and wait until it is there. **Local.**"""

    def run(self, number: int) -> tuple[float, float]:
        """Make so many calls; return ``time.perf_counter()`` before and after. **Collective.**"""

    def is_right(self) -> bool:
        """Reduce this rank's content and return whether the sum is right on this rank. **Collective.**"""


def content(count: int, dtype: np.dtype, rank: int) -> np.ndarray:
    """Return what a rank gives: small integers, whose sums are exact in every dtype. **Local.**"""
    return ((np.arange(count) + rank) % 5).astype(dtype)


def as_dtype(name: str) -> np.dtype:
    """Return the dtype of a name, bfloat16 among them. **Local.**"""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


class HostMemory:
    """What the ways need of host memory."""

    def memory(self, count: int, dtype: np.dtype) -> Any:
        """Return an array of this process alone."""
        return np.zeros(count, dtype)

    def write(self, array: Any, data: np.ndarray) -> None:
        array[...] = data

    def read(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def copy(self, target: Any, source: Any) -> None:
        np.copyto(target, source)

    def finish(self) -> None:
        """Wait until all that was asked for is done."""


class GpuMemory:
    """The same on a GPU, all of it on one stream, which is the calling thread's from then on.

    Args:
        device: the GPU.
    """

    def __init__(self, device: Device) -> None:
        self._xp: Any = device.xp
        self.stream = self._xp.cuda.Stream(non_blocking=True)
        self._xp.cuda.Device(device.ordinal).synchronize()
        self.stream.use()

    def memory(self, count: int, dtype: np.dtype) -> Any:
        return self._xp.zeros(count * dtype.itemsize, np.uint8).view(dtype)

    def write(self, array: Any, data: np.ndarray) -> None:
        array.view(np.uint8).set(data.view(np.uint8))

    def read(self, array: Any) -> np.ndarray:
        return self._xp.asnumpy(array.view(np.uint8)).view(array.dtype)

    def copy(self, target: Any, source: Any) -> None:
        target.view(np.uint8)[...] = source.view(np.uint8)

    def finish(self) -> None:
        self.stream.synchronize()

    def pinned(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Return host memory that the GPU copies to and from directly."""
        nbytes = count * dtype.itemsize
        memory = self._xp.cuda.alloc_pinned_memory(nbytes)
        return np.frombuffer(memory, np.uint8, nbytes).view(dtype)

    def fetch(self, array: Any, host: np.ndarray) -> None:
        """Copy an array to pinned memory and wait."""
        array.view(np.uint8).get(out=host.view(np.uint8))
        self.finish()

    def captured(self, call: Callable[[], object], number: int) -> Callable[[], None]:
        """Return what launches a graph of so many calls. **Collective**, if the call is."""
        call()  # what happens at a first call cannot be captured
        self.finish()
        self.stream.begin_capture()
        for _ in range(number):
            call()
        graph = self.stream.end_capture()
        return lambda: graph.launch(self.stream)


class Here:
    """A way of this process."""

    def __init__(
        self,
        name: str,
        on: HostMemory | GpuMemory,
        array: Any,
        call: Callable[[], object],
        given: np.ndarray,
        total: np.ndarray,
        at_once: int = 1,
        reduces: bool = True,
        check: Callable[[], object] | None = None,
    ) -> None:
        self.name, self.at_once, self.reduces = name, at_once, reduces
        self._on, self._array, self._call = on, array, call
        self._given, self._total = given, total
        self._check = call if check is None else check

    def fill(self, zeros: bool) -> None:
        self._on.write(self._array, np.zeros_like(self._given) if zeros else self._given)
        self._on.finish()

    def run(self, number: int) -> tuple[float, float]:
        start = time.perf_counter()
        for _ in range(number):
            self._call()
        self._on.finish()
        return start, time.perf_counter()

    def is_right(self) -> bool:
        self.fill(zeros=False)
        self._check()
        self._on.finish()
        return np.array_equal(self._on.read(self._array), self._total)


def ways(
    communicators: dict[str, Communicator],
    device: Device,
    on: HostMemory | GpuMemory,
    count: int,
    dtype: np.dtype,
) -> list[Way]:
    """Return the ways of this process for one size, over ranks that are those of each communicator. **Collective.**

    Args:
        communicators: by transport; ``mpi4py`` is a plain call of an MPI communicator.
        device: where the arrays lie.
        on: how to use it.
        count: elements.
        dtype: of them.
    """
    nbytes = count * dtype.itemsize
    one = next(iter(communicators.values()))
    given = content(count, dtype, one.rank)
    total = np.zeros(count, dtype=dtype)
    for rank in range(one.size):
        total += content(count, dtype, rank)
    found: list[Way] = []
    for name, comm in communicators.items():
        if name == "mpi4py":
            if dtype.name not in _NOT_OF_MPI:
                assert isinstance(comm, MpiCommunicator)
                found.append(_plain(comm, on, given, total))
            continue
        array = comm.allocate(nbytes, device).array(dtype, count)
        call = partial(comm.all_reduce, array, lane="urgent" if nbytes < SPAN else "bulk")
        found.append(Here(name, on, array, call, given, total))
        if isinstance(on, GpuMemory) and comm.transport in CAPTURED:
            number = max(1, min(GRAPH_CALLS, GRAPH_BYTES // nbytes))
            graph = on.captured(call, number)
            once = graph if number == 1 else on.captured(call, 1)
            found.append(Here(f"{name} (graph)", on, array, graph, given, total, number, check=once))
        if nbytes >= REDUCER_BYTES and count % SPAN == 0 and dtype.name in ("float16", "float32", "float64"):
            arena = GradientArena({"gradient": (count,)}, dtype, device, comm)
            found.append(Here(f"{name}, reducer", on, arena.array, Reducer(arena).finish, given, total))
    if nbytes >= COPY_BYTES:
        source, target = on.memory(count, dtype), on.memory(count, dtype)
        call = partial(on.copy, target, source)
        found.append(Here("copy", on, source, call, given, total, reduces=False))
    return found


def _plain(comm: MpiCommunicator, on: HostMemory | GpuMemory, given: np.ndarray, total: np.ndarray) -> Here:
    """Return a plain call of MPI, on a GPU between a copy out and a copy in."""
    if isinstance(on, HostMemory):
        array = comm.allocate(given.nbytes).array(given.dtype, given.size)
        return Here("mpi4py", on, array, partial(comm.plain_all_reduce, array), given, total)
    gpu, array = on, on.memory(given.size, given.dtype)
    host = gpu.pinned(given.size, given.dtype)

    def call() -> None:
        gpu.fetch(array, host)
        comm.plain_all_reduce(host)
        gpu.write(array, host)
        gpu.finish()  # `host` is written to again

    return Here("mpi4py", on, array, call, given, total)
