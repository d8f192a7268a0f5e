"""The threads transport between GPUs: ranks that are threads of one process, and so address each other's GPU memory.

The two-phase algorithm of ``direct``, ordered by events: no kernel ever waits in here. A rank announces a collective
with an event behind what it has submitted. When all have, each lets its lane wait for all events, sums its slice over
the ranks' arrays in the order of ranks and writes it to all of them, or copies what the others give. Its stream then
goes on behind the events of all ranks. So only the hosts meet, twice a collective, and the bits of a sum are those of
rank order. A kernel that spins, as ``cuda_ipc`` has it, would not do: one process has one lock for loading kernels and
freeing memory, which may wait for the device. Read ``thread_memory`` for host arrays.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..device import CPU, Device, device_of
from ..errors import CommunicationError, DeviceMismatchError, on_all_ranks
from ..kernels import cuda_source
from .activity import secondary
from .base import LANES, Communicator, Request
from .calls import describe, sign
from .cuda_gpu import FOLDER, c_name
from .thread_memory import ThreadCommunicator

_LOOK = 0.05  # seconds between two looks for a failure
_THREADS, _MOST_BLOCKS = 256, 264


class Board:
    """What the ranks of one lane tell each other: for each collective, one entry a rank for its start and for its end.

    **Local** to construct, by one thread for all.

    Args:
        size: ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: dict[tuple[int, int], list[Any]] = {}
        self._left: dict[tuple[int, int], int] = {}
        self._changed = threading.Condition()

    def post(self, number: int, phase: int, rank: int, value: Any) -> None:
        """Tell the others something about a collective. **Local.**"""
        with self._changed:
            self._entries.setdefault((number, phase), []).append((rank, value))
            if len(self._entries[number, phase]) == self._size:
                self._changed.notify_all()

    def complete(self, number: int, phase: int) -> bool:
        """Return whether all have told. **Local.**"""
        return len(self._entries.get((number, phase), ())) == self._size

    def read(self, number: int, phase: int, activity: Any) -> list[Any]:
        """Wait until all have told, and return it by rank, once. **Collective.**

        Raises:
            RankFailedError: a rank has failed.
        """
        key = number, phase
        with self._changed:
            while not self.complete(*key):
                if activity.failure is not None:
                    raise secondary(
                        f"{activity.call or 'wait'}: expected all ranks alive, got a failure ({activity.failure}); "
                        "see the first report, this job is ending"
                    )
                self._changed.wait(_LOOK)
            told = [value for _, value in sorted(self._entries[key], key=lambda entry: entry[0])]
            self._left[key] = self._left.get(key, 0) + 1
            if self._left[key] == self._size:
                del self._entries[key], self._left[key]
        return told


class _Call:
    """One collective of one rank."""

    def __init__(self, name: str, array: Any, op: str, bounds: Sequence[int], root: int | None) -> None:
        self.name, self.array, self.op, self.bounds, self.root = name, array, op, bounds, root
        self.number = 0
        details = bounds if root is None else root
        self.signature = sign(name, op, array, details)


class _Started(Request):
    def __init__(self, comm: ThreadGpuCommunicator, lane: str, call: _Call) -> None:
        self._comm, self._lane, self._call = comm, lane, call

    def wait(self) -> None:
        self._comm._finish(self._lane, self._call)


class _Lane:
    def __init__(self, board: Board) -> None:
        self.board = board
        self.stream: Any = None
        self.number = 0
        self.announced: deque[_Call] = deque()  # and not yet carried out


def unreachable(host: ThreadCommunicator, device: Device) -> str | None:
    """Return which GPU cannot address which, or None where all can. **Collective.**"""
    devices = host.meeting.exchange(host.rank, device)
    mine = None
    if device.kind == "cuda":
        runtime = device.xp.cuda.runtime
        for other in devices:
            same = other.kind == "cuda" and other.ordinal == device.ordinal
            if not same and not (
                other.kind == "cuda" and runtime.deviceCanAccessPeer(device.ordinal, other.ordinal)
            ):
                mine = f"{device} cannot address memory of {other}"
    else:
        mine = f"rank {host.rank} is on {device}"
    told: list[str | None] = host.meeting.exchange(host.rank, mine)
    return next((text for text in told if text is not None), None)


class ThreadGpuCommunicator(Communicator):
    """Carry GPU arrays between threads of one process, and host arrays as ``host`` does.

    **Collective**, each rank in its own thread. Takes the host communicator over.

    Args:
        host: a communicator over the same threads.
        device: the GPU of this rank; all can address each other's memory, see :func:`unreachable`.
    """

    transport = "threads"

    def __init__(self, host: ThreadCommunicator, device: Device) -> None:
        super().__init__(host.rank, host.size, host.activity)
        self.host, self.device = host, device
        self._cupy = device.xp
        boards = host.meeting.exchange(
            self.rank, {lane: Board(self.size) for lane in LANES} if not self.rank else None
        )
        self._lanes = {lane: _Lane(boards[0][lane]) for lane in LANES}
        self._functions: dict[Any, Any] = {}
        self._reach(host.meeting.exchange(self.rank, device))

    def _reach(self, devices: Sequence[Device]) -> None:
        runtime = self._cupy.cuda.runtime
        with self._cupy.cuda.Device(self.device.ordinal):
            for other in {each.ordinal for each in devices} - {self.device.ordinal}:
                try:
                    runtime.deviceEnablePeerAccess(other)
                except runtime.CUDARuntimeError as error:
                    if "AlreadyEnabled" not in str(error):
                        raise

    def duplicate(self) -> ThreadGpuCommunicator:
        return ThreadGpuCommunicator(self.host.duplicate(), self.device)

    def adopt(self, lane: str) -> None:
        super().adopt(lane)
        self.host.adopt(lane)

    # -- calls

    def reduce_numbers(self, maxima: Sequence[int], sums: Sequence[float]) -> tuple[list[int], list[float]]:
        return self.host.reduce_numbers(maxima, sums)

    def start_all_reduce(self, array: Any, *, op: str = "sum", lane: str = "bulk") -> Request:
        self._check(array, lane, op)
        if not array.size:
            return Request()
        if self._on_host(array):
            return self.host.start_all_reduce(array, op=op, lane=lane)
        return self._start(lane, _Call("all_reduce", array, op, self._slices(array), None))

    def start_reduce_scatter(
        self, array: Any, bounds: Sequence[int], *, op: str = "sum", lane: str = "bulk"
    ) -> Request:
        self._check(array, lane, op, bounds=bounds)
        if not array.size:
            return Request()
        if self._on_host(array):
            return self.host.start_reduce_scatter(array, bounds, op=op, lane=lane)
        return self._start(lane, _Call("reduce_scatter", array, op, tuple(bounds), None))

    def start_all_gather(self, array: Any, bounds: Sequence[int], *, lane: str = "bulk") -> Request:
        self._check(array, lane, bounds=bounds)
        if not array.size:
            return Request()
        if self._on_host(array):
            return self.host.start_all_gather(array, bounds, lane=lane)
        return self._start(lane, _Call("all_gather", array, "sum", tuple(bounds), None))

    def _start(self, lane: str, call: _Call) -> Request:
        self._enter(call.name, lane)
        try:
            self._announce(lane, call)
            own = self._lanes[lane]
            while own.announced and own.board.complete(own.announced[0].number, 0):
                self._carry_out(own)
        finally:
            self.activity.leave()
        return _Started(self, lane, call)

    def _finish(self, lane: str, call: _Call) -> None:
        self.activity.resume(call.name)
        try:
            self._complete(self._lanes[lane], call)
        finally:
            self.activity.leave()

    def _all_reduce(self, array: Any, op: str, lane: str) -> None:
        if self._on_host(array):
            self.host._all_reduce(array, op, lane)
        else:
            self._run(lane, _Call("all_reduce", array, op, self._slices(array), None))

    def _reduce(self, array: Any, op: str, root: int, lane: str) -> None:
        if self._on_host(array):
            self.host._reduce(array, op, root, lane)
        else:
            self._run(lane, _Call("reduce", array, op, self._slices(array), root))

    def _reduce_scatter(self, array: Any, bounds: Sequence[int], op: str, lane: str) -> None:
        if self._on_host(array):
            self.host._reduce_scatter(array, bounds, op, lane)
        else:
            self._run(lane, _Call("reduce_scatter", array, op, tuple(bounds), None))

    def _broadcast(self, array: Any, root: int, lane: str) -> None:
        if self._on_host(array):
            self.host._broadcast(array, root, lane)
        else:
            bounds = [0] * (root + 1) + [array.size] * (self.size - root)
            self._run(lane, _Call("broadcast", array, "sum", bounds, None))

    def _all_gather(self, array: Any, bounds: Sequence[int], lane: str) -> None:
        if self._on_host(array):
            self.host._all_gather(array, bounds, lane)
        else:
            self._run(lane, _Call("all_gather", array, "sum", tuple(bounds), None))

    def _exclusive_sum(self, value: int, lane: str) -> int:
        return self.host._exclusive_sum(value, lane)

    def _barrier(self, lane: str) -> None:
        self.host._barrier(lane)

    def _send(self, array: Any, to: int, lane: str) -> None:
        copy = array
        if not self._on_host(array):
            copy = self._cupy.asnumpy(array)  # waits for what computes it
        self.host._send(copy, to, lane)

    def _recv(self, array: Any, source: int, lane: str) -> None:
        if self._on_host(array):
            self.host._recv(array, source, lane)
        else:
            copy = np.empty(array.shape, array.dtype)
            self.host._recv(copy, source, lane)
            array.set(copy)

    # -- one collective

    def _on_host(self, array: Any) -> bool:
        return type(array) is np.ndarray or device_of(array) == CPU

    def _slices(self, array: Any) -> list[int]:
        line = max(1, 128 // array.itemsize)
        each = -(-array.size // (self.size * line)) * line
        return [min(rank * each, array.size) for rank in range(self.size + 1)]

    def _run(self, lane: str, call: _Call) -> None:
        self._announce(lane, call)
        self._complete(self._lanes[lane], call)

    def _announce(self, name: str, call: _Call) -> _Call:
        if device_of(call.array) != self.device:
            raise DeviceMismatchError(
                f"array: expected memory of {self.device}, this rank's GPU, got {device_of(call.array)}; move it there"
            )
        lane = self._lanes[name]
        if lane.stream is None:
            lane.stream = self._cupy.cuda.Stream(non_blocking=True)
        lane.number += 1
        call.number = lane.number
        lane.board.post(call.number, 0, self.rank, (call.signature, call.array, self._mark()))
        lane.announced.append(call)
        return call

    def _mark(self, stream: Any = None) -> Any:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream if stream is not None else self._cupy.cuda.get_current_stream())
        return event

    def _complete(self, lane: _Lane, call: _Call) -> None:
        """Carry out what is announced up to a collective, and let the current stream go on behind it."""
        while lane.announced and lane.announced[0].number <= call.number:
            self._carry_out(lane)
        current = self._cupy.cuda.get_current_stream()
        for event in lane.board.read(call.number, 1, self.activity):
            current.wait_event(event)

    def _carry_out(self, lane: _Lane) -> None:
        call = lane.announced.popleft()
        told = lane.board.read(call.number, 0, self.activity)
        signatures = [signature for signature, _, _ in told]
        if len(set(signatures)) > 1:
            lane.board.post(call.number, 1, self.rank, self._mark())
            listed = "; ".join(f"{describe(each)} on rank {rank}" for rank, each in enumerate(signatures))
            raise on_all_ranks(
                CommunicationError(
                    f"{call.name}: expected the same call, dtype and length on all ranks, got {listed}; call it on all "
                    "ranks, in the same order"
                )
            )
        for _, _, ready in told:
            lane.stream.wait_event(ready)
        arrays = [array for _, array, _ in told]
        if call.name in ("broadcast", "all_gather"):
            self._take(lane, call, arrays)
        else:
            self._combine(lane, call, arrays)
        lane.board.post(call.number, 1, self.rank, self._mark(lane.stream))

    def _take(self, lane: _Lane, call: _Call, arrays: Sequence[Any]) -> None:
        """Copy what the other ranks give."""
        for owner, (start, stop) in enumerate(pairwise(call.bounds)):
            if owner != self.rank and stop > start:
                part = call.array[start:stop]
                part.data.copy_from_device_async(arrays[owner][start:stop].data, part.nbytes, lane.stream)

    def _combine(self, lane: _Lane, call: _Call, arrays: Sequence[Any]) -> None:
        """Sum this rank's slice over all arrays and write it to whom it belongs."""
        start, stop = call.bounds[self.rank], call.bounds[self.rank + 1]
        if stop == start:
            return
        pointers = [array.data.ptr for array in arrays]
        if call.name == "reduce_scatter":
            wanted = {self.rank}
        else:
            wanted = set(range(self.size)) if call.root is None else {call.root}
        targets = [pointer if rank in wanted else 0 for rank, pointer in enumerate(pointers)]
        words = np.array([*pointers, *targets], dtype=np.uint64)
        structure = words.view(np.dtype((np.void, words.nbytes)))[0]
        blocks = min(-(-(stop - start) // _THREADS), _MOST_BLOCKS)
        numbers = (np.int64(start), np.int64(stop), np.int64(call.op == "max"))
        current = self._cupy.cuda.get_current_stream()
        lane.stream.use()
        try:
            self._function(call.array.dtype)((blocks,), (_THREADS,), (structure, *numbers))
        finally:  # `with` would forget a stream that was made current by use()
            current.use()

    def _function(self, dtype: Any) -> Any:
        function = self._functions.get(dtype)
        if function is None:
            half = dtype.name in ("float16", "bfloat16")
            stored = c_name(dtype)
            lines = [
                (cuda_source.FOLDER / "types.cuh").read_text(),
                f"#define W {self.size}",
                f"typedef {stored} T;",
                f"typedef {'float' if half else 'u32' if dtype.name == 'uint8' else stored} A;",
                f"#define WIDENED(x) {'wide(x)' if half else '((A)(x))'}",
                f"#define NARROWED(x) {'As<T>::of(x)' if half else '((T)(x))'}",
                (FOLDER / "together.cu").read_text(),
            ]
            module = self._cupy.RawModule(code="\n".join(lines), options=("-std=c++17",))
            function = self._functions[dtype] = module.get_function("combine")
        return function

    def close(self) -> None:
        """Close the host communicator. **Collective.**"""
        self.host.close()
