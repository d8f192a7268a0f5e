"""The communicator's interface: buffers, lanes, collectives, and the checks that all transports share.

A transport implements the underscored methods; everything a caller can get wrong is refused here, once,
before a byte moves. Read ``mpi`` next for a transport, ``parallel.reducer`` for the main caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np

from ..device import CPU, Device, device_of
from .activity import Activity
from .spans import Spans

LANES = ("bulk", "urgent")
OPS = ("sum", "max")
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("uint8", "int32", "int64", "uint64")
_DTYPES = frozenset(
    np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in FLOATS + INTEGERS
)
_ALIGNMENT = 64  # bytes: one cache line, and what wide vector loads like


class Buffer:
    """Memory that a communicator allocated; views into it never move.

    Attributes:
        nbytes: size in bytes.
        device: where the memory lies.
    """

    def __init__(self, memory: Any, nbytes: int, device: Device) -> None:
        self._memory = memory
        self.nbytes = nbytes
        self.device = device

    def array(self, dtype: Any, count: int, offset_bytes: int = 0) -> Any:
        """Return ``count`` elements at ``offset_bytes`` as a flat array over the buffer's own memory. **Local.**"""
        itemsize = np.dtype(dtype).itemsize
        stop = offset_bytes + count * itemsize
        if offset_bytes < 0 or offset_bytes % itemsize or stop > self.nbytes:
            raise ValueError(
                f"buffer: expected a range inside 0..{self.nbytes} bytes, aligned to {itemsize}, "
                f"got {offset_bytes}..{stop}"
            )
        return self._memory[offset_bytes:stop].view(dtype)


def host_memory(nbytes: int) -> np.ndarray:
    """Return zeroed, cache-line aligned host memory as a uint8 array. **Local.**"""
    raw = np.zeros(nbytes + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes]


class Request:
    """A collective that was started; :meth:`wait` returns once its result is in the array."""

    def wait(self) -> None:
        """Wait for the result, and raise what went wrong. **Local.**"""


class CheckedRequest(Request):
    """A checked sum that was started.

    Attributes:
        values: after ``wait()`` each rank's number, by rank, if the notes of all ranks were equal; else None.
    """

    @property
    def values(self) -> list[float] | None:
        raise NotImplementedError


class Communicator(ABC):
    """Carry arrays between ``size`` ranks.

    All collectives work in place on flat C-contiguous arrays, and every rank calls them in the same order
    on each lane. Messages of one lane never wait for those of the other.

    Attributes:
        rank: this rank, 0..size-1.
        size: number of ranks.
        transport: how bytes move, such as ``"mpi"``.
        chunk_bytes: size of a middle chunk of a long buffer that is reduced while it is still being written.
        chunk_edge: how many times smaller the first and the last chunk are.
        most_chunks: of a buffer so long that it would make more of them, about this many larger ones are made instead;
            None where the ranks do not wait for one another at each chunk.
        capturable: collectives of GPU arrays can be captured into a graph.
        independent: what was started on GPU arrays ends whatever the threads of the ranks do meanwhile.
        spans: notes when messages travel, while a timeline is taken; else None.
        layouts: by digest, the number of each layout that is reduced over these ranks, counted in the order of their
            reducers, which is that of all ranks.
    """

    transport = "none"
    chunk_bytes = 4 << 20
    chunk_edge = 4
    most_chunks: int | None = None
    capturable = False
    independent = False
    spans: Spans | None = None

    def __init__(self, rank: int, size: int, activity: Activity | None = None) -> None:
        self.rank = rank
        self.size = size
        self.activity = activity if activity is not None else Activity()
        self.layouts: dict[int, int] = {}

    # -- memory

    @property
    def device_bytes(self) -> int:
        """Bytes of this rank's GPU outside of the array module's pool, buffers included, duplicates' too. **Local.**"""
        return 0

    def allocate(self, nbytes: int, device: Device = CPU) -> Buffer:
        """Allocate zeroed memory that this transport can carry without a copy.

        **Collective.** Every rank asks for the same number of bytes.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes: expected 0 or more, got {nbytes}")
        return self._allocate(nbytes, device)

    def _allocate(self, nbytes: int, device: Device) -> Buffer:
        if device.kind == "cpu":
            return Buffer(host_memory(nbytes), nbytes, device)
        with device.xp.cuda.Device(device.ordinal):
            return Buffer(device.xp.zeros(nbytes, dtype="uint8"), nbytes, device)

    # -- collectives

    def all_reduce(self, array: Any, *, op: str = "sum", lane: str = "bulk") -> None:
        """Replace the array on every rank by the sum (or maximum) over ranks.

        **Collective.** Every rank gets the same bits. A maximum of floats is NaN wherever any rank's is.

        Args:
            array: flat, C-contiguous, writable; float16, bfloat16 (both summed in float32), float32,
                float64, uint8, int32, int64 or uint64; the same length and dtype on every rank.
            op: ``"sum"`` or ``"max"``.
            lane: ``"bulk"`` or ``"urgent"``.
        """
        self._check(array, lane, op)
        if array.size:
            self._enter("all_reduce", lane)
            try:
                if self.spans is None:
                    self._all_reduce(array, op, lane)
                else:
                    with self.spans.message(lane, array):
                        self._all_reduce(array, op, lane)
            finally:
                self.activity.leave()

    def reduce_numbers(self, maxima: Sequence[int], sums: Sequence[float]) -> tuple[list[int], list[float]]:
        """Return the maxima over ranks of some integers and the sums of some floats, on the urgent lane.

        **Collective.** What the step record is carried with; one message where a transport can do that, else two.

        Args:
            maxima: integers of 64 bits; as many on every rank.
            sums: added in float64; as many on every rank.
        """
        most, total = np.array(maxima, dtype=np.int64), np.array(sums, dtype=np.float64)
        self.all_reduce(most, op="max", lane="urgent")
        self.all_reduce(total, op="sum", lane="urgent")
        return most.tolist(), total.tolist()

    def start_all_reduce(self, array: Any, *, op: str = "sum", lane: str = "bulk") -> Request:
        """Start :meth:`all_reduce`; the array belongs to the communicator until ``wait()`` returns.

        **Collective.** A transport that needs the calling thread does the work before it returns.
        """
        self.all_reduce(array, op=op, lane=lane)
        return Request()

    def start_checked_all_reduce(
        self, array: Any, note: int, value: float, settle: Callable[[], None]
    ) -> CheckedRequest | None:
        """Start to sum an array on the bulk lane if all ranks do so with the same note, which needs no other message.

        **Collective.** Where notes are equal, as they should be, it does what :meth:`start_all_reduce` does.

        Args:
            array: as for :meth:`all_reduce`.
            note: an integer of 63 bits that says what has to be equal.
            value: a number that all ranks get from this one.
            settle: called, before anything is written to the array, by each rank whose note is not that of all, or
                that finds another rank in a message on the urgent lane which this one has not come to. It exchanges
                messages on the urgent lane until it raises on all ranks, and then nobody has started; or it returns on
                all of them, and the sum goes on.

        Returns:
            None where the transport cannot do that, or not with this array of this rank; then nothing was done here.
            The rank then exchanges what ``settle`` does, and starts a plain sum; others, where they got a request, find
            it on the urgent lane.

        Raises:
            Exception: what ``settle`` raises, here, in ``wait()`` or in another call on the bulk lane.
        """
        return None

    def start_reduce_scatter(
        self, array: Any, bounds: Sequence[int], *, op: str = "sum", lane: str = "bulk"
    ) -> Request:
        """Start :meth:`reduce_scatter`, as :meth:`start_all_reduce` does for its like. **Collective.**"""
        self.reduce_scatter(array, bounds, op=op, lane=lane)
        return Request()

    def start_all_gather(self, array: Any, bounds: Sequence[int], *, lane: str = "bulk") -> Request:
        """Start :meth:`all_gather`, as :meth:`start_all_reduce` does for its like. **Collective.**"""
        self.all_gather(array, bounds, lane=lane)
        return Request()

    def reduce(self, array: Any, *, op: str = "sum", root: int = 0, lane: str = "bulk") -> None:
        """Replace the array on ``root`` by the sum over ranks; elsewhere its content is lost. **Collective.**"""
        self._check(array, lane, op, root)
        if array.size:
            self._carry("reduce", self._reduce, array, op, root, lane)

    def broadcast(self, array: Any, *, root: int = 0, lane: str = "bulk") -> None:
        """Replace the array on every rank by that of ``root``. **Collective.**"""
        self._check(array, lane, root=root)
        if array.size:
            self._carry("broadcast", self._broadcast, array, root, lane)

    def reduce_scatter(
        self, array: Any, bounds: Sequence[int], *, op: str = "sum", lane: str = "bulk"
    ) -> None:
        """Sum over ranks, leaving ``array[bounds[r]:bounds[r+1]]`` right on rank r; the rest is lost.

        **Collective.**

        Args:
            array: as for :meth:`all_reduce`.
            bounds: size + 1 increasing element offsets from 0 to the array's length, equal on all ranks.
        """
        self._check(array, lane, op, bounds=bounds)
        if array.size:
            self._carry("reduce_scatter", self._reduce_scatter, array, bounds, op, lane)

    def all_gather(self, array: Any, bounds: Sequence[int], *, lane: str = "bulk") -> None:
        """Copy ``array[bounds[r]:bounds[r+1]]`` of each rank r to all ranks, in place. **Collective.**"""
        self._check(array, lane, bounds=bounds)
        if array.size:
            self._carry("all_gather", self._all_gather, array, bounds, lane)

    def exclusive_sum(self, value: int, *, lane: str = "urgent") -> int:
        """Return the sum of ``value`` over the ranks below this one; 0 on rank 0. **Collective.**"""
        self._check_lane(lane)
        self._enter("exclusive_sum", lane)
        try:
            return self._exclusive_sum(int(value), lane)
        finally:
            self.activity.leave()

    def barrier(self, *, lane: str = "urgent") -> None:
        """Return once every rank has called it. **Collective.**"""
        self._check_lane(lane)
        self._enter("barrier", lane)
        try:
            self._barrier(lane)
        finally:
            self.activity.leave()

    def _carry(self, name: str, call: Callable[..., None], array: Any, *arguments: Any) -> None:
        """Make a call of the transport, whose last argument is the lane."""
        lane = arguments[-1]
        self._enter(name, lane)
        try:
            if self.spans is None:
                call(array, *arguments)
            else:
                with self.spans.message(lane, array):
                    call(array, *arguments)
        finally:
            self.activity.leave()

    # -- point to point

    def send(self, array: Any, *, to: int, lane: str = "urgent") -> None:
        """Send the array to rank ``to``, which calls :meth:`recv`; may wait for it to do so. **Local.**"""
        self._check(array, lane, root=to)
        self._enter(f"send to rank {to}", lane)
        try:
            self._send(array, to, lane)
        finally:
            self.activity.leave()

    def recv(self, array: Any, *, source: int, lane: str = "urgent") -> None:
        """Fill the array with what rank ``source`` sends; length and dtype must be the same. **Local.**"""
        self._check(array, lane, root=source)
        self._enter(f"recv from rank {source}", lane)
        try:
            self._recv(array, source, lane)
        finally:
            self.activity.leave()

    # -- texts, for start-up and for what follows a failure; never inside a step

    def broadcast_bytes(self, data: bytes | None, *, root: int = 0) -> bytes:
        """Return the bytes that ``root`` passed, on every rank (others pass None). **Collective.**"""
        length = np.array([len(data) if data is not None and self.rank == root else 0], dtype=np.int64)
        self.broadcast(length, root=root, lane="urgent")
        content = np.zeros(int(length[0]), dtype=np.uint8)
        if self.rank == root and data is not None:
            content[:] = np.frombuffer(data, dtype=np.uint8)
        self.broadcast(content, root=root, lane="urgent")
        return content.tobytes()

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank. **Collective.** O(size) memory: not for a step."""
        lengths = np.zeros(self.size, dtype=np.int64)
        lengths[self.rank] = len(data)
        self.all_gather(lengths, range(self.size + 1), lane="urgent")
        bounds = [0, *np.cumsum(lengths).tolist()]
        content = np.zeros(bounds[-1], dtype=np.uint8)
        content[bounds[self.rank] : bounds[self.rank + 1]] = np.frombuffer(data, dtype=np.uint8)
        self.all_gather(content, bounds, lane="urgent")
        return [content[a:b].tobytes() for a, b in pairwise(bounds)]

    # -- life

    def note(self, spans: Spans | None) -> None:
        """Note from now on when messages travel, or stop doing so.

        **Local.** A transport that carries :meth:`start_all_reduce` in a way of its own notes there when it does.
        """
        self.spans = spans

    @abstractmethod
    def duplicate(self) -> Communicator:
        """Return a communicator over the same ranks whose messages never match this one's. **Collective.**

        A thread that communicates gets a duplicate of its own.
        """

    def adopt(self, lane: str) -> None:
        """Make the calling thread the one that uses ``lane`` from now on. **Local.**"""
        self._check_lane(lane)

    def close(self) -> None:  # noqa: B027  most transports hold nothing
        """Release what the communicator holds. **Local.**"""

    def release(self) -> None:  # noqa: B027  most transports hold nothing
        """Let go of what belongs to other ranks, at the end of the process, when all ranks have left. **Local.**

        Enters no collective. Serves the duplicates too, and may be called again.
        """

    # -- for transports

    @abstractmethod
    def _all_reduce(self, array: Any, op: str, lane: str) -> None: ...

    @abstractmethod
    def _reduce(self, array: Any, op: str, root: int, lane: str) -> None: ...

    @abstractmethod
    def _broadcast(self, array: Any, root: int, lane: str) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, array: Any, bounds: Sequence[int], op: str, lane: str) -> None: ...

    @abstractmethod
    def _all_gather(self, array: Any, bounds: Sequence[int], lane: str) -> None: ...

    @abstractmethod
    def _exclusive_sum(self, value: int, lane: str) -> int: ...

    @abstractmethod
    def _barrier(self, lane: str) -> None: ...

    @abstractmethod
    def _send(self, array: Any, to: int, lane: str) -> None: ...

    @abstractmethod
    def _recv(self, array: Any, source: int, lane: str) -> None: ...

    # -- checks

    def _enter(self, call: str, lane: str) -> None:
        self.activity.enter(call if lane == "bulk" else f"{call}, {lane}")

    def _check_lane(self, lane: str) -> None:
        if lane not in LANES:
            raise ValueError(f"lane: expected one of {', '.join(LANES)}, got {lane!r}")

    def _check(
        self,
        array: Any,
        lane: str,
        op: str = "sum",
        root: int = 0,
        bounds: Sequence[int] | None = None,
    ) -> None:
        self._check_lane(lane)
        if op not in OPS:
            raise ValueError(f"op: expected one of {', '.join(OPS)}, got {op!r}")
        if not 0 <= root < self.size:
            raise ValueError(f"root: expected a rank in 0..{self.size - 1}, got {root}")
        flags = getattr(array, "flags", None)
        if flags is None or getattr(array, "ndim", None) is None:
            raise TypeError(f"array: expected a NumPy or CuPy array, got {type(array).__name__}")
        if array.dtype not in _DTYPES:
            if array.dtype.newbyteorder("=") in _DTYPES:
                raise TypeError(
                    "array: expected native byte order, got swapped bytes; use .astype of the native dtype"
                )
            raise TypeError(
                f"array: expected a dtype of {', '.join(FLOATS + INTEGERS)}, got {array.dtype.name}"
            )
        if array.ndim != 1 or not flags.c_contiguous:
            raise ValueError(
                f"array: expected a flat C-contiguous array, got shape {array.shape} and strides {array.strides}; "
                "use .reshape(-1) of a contiguous array"
            )
        if (type(array) is np.ndarray or device_of(array) == CPU) and not flags.writeable:
            raise ValueError("array: expected writable memory, got a read-only array")
        if bounds is not None:
            b = list(bounds)
            if (
                len(b) != self.size + 1
                or b[0] != 0
                or b[-1] != array.size
                or any(x > y for x, y in pairwise(b))
            ):
                raise ValueError(
                    f"bounds: expected {self.size + 1} increasing offsets from 0 to {array.size}, got {b}"
                )
