"""The direct transport: collectives over buffers that every rank can address.

One algorithm, however the buffers are mapped. A large message takes two phases: when all ranks are ready, each sums its
slice over all buffers in the order of ranks, in place, and writes it back to all of them; when all are done, the
result is everywhere. A small one takes one phase: each rank puts it into a slot that the others read, and each
sums all slots. Arrays that do not lie in memory of ``allocate()`` travel through a mapped staging area in pieces.

Collectives are numbered on each lane. A rank announces one by posting READY, with a signature (call, dtype,
length) and the place of its array; so a call that does not match those of the other ranks is an error on all of
them, and all choose the same way. It posts DONE when it no longer touches other ranks' memory.
:meth:`DirectCommunicator.start_all_reduce` and its like announce and go on: the sums are made as soon as the other
ranks have announced too, at the latest in ``wait()``. So a rank that is ahead computes on instead of waiting.

A checked sum is announced with a note, which has to be equal on all ranks, and with a number for all of them. Where
notes differ, or where a rank is in a message on the urgent lane instead, ranks take back what they have announced
behind the sum (in the second case the sum too), exchange messages on the urgent lane, and announce it again if these
raise nothing.

Read ``blocks`` for the arithmetic, ``flags`` for the waiting, ``shared_memory`` for a mapping.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from operator import add
from typing import Any

import numpy as np

from ..device import CPU, device_of
from ..errors import CommunicationError, on_all_ranks
from .activity import Activity
from .base import CheckedRequest, Communicator, Request
from .blocks import slices
from .calls import Call, CheckedCall, is_checked, mismatch, sign, sign_numbers
from .flags import DONE, HISTORY, LOCATIONS, NOTES, READY, SIGNATURES, VALUES, Flags
from .lane import WITHDRAWN, Lane
from .regions import Regions


@lru_cache(maxsize=64)
def _record(integers: int, floats: int) -> struct.Struct:
    return struct.Struct(f"={integers}q{floats}d")


_MOST_KNOWN = 1024  # arrays


class _Known:
    """What was worked out for an array, a view of a chunk: it comes again in each step. Does not keep it alive."""

    __slots__ = ("array", "bounds", "kept", "location", "own", "root", "signature")

    def __init__(self, array: Any, call: Call, location: int) -> None:
        self.array: Callable[[], Any] = weakref.ref(array)
        self.own, self.kept, self.signature, self.location = call.own, call.kept, call.signature, location
        self.bounds, self.root = call.bounds, call.root

    def call(self, array: Any, op: str) -> Call:
        return Call(array, op, self.own, self.kept, self.bounds, self.signature, self.root)

    def checked(self, array: Any, note: int, value: float, settle: Callable[[], None]) -> CheckedCall:
        return CheckedCall(
            array, "sum", self.own, self.kept, None, self.signature, note=note, value=value, settle=settle
        )


class _Started(Request):
    def __init__(self, comm: DirectCommunicator, name: str, lane: str, call: Call) -> None:
        self._comm, self._name, self._lane, self._call = comm, name, lane, call

    def wait(self) -> None:
        self._comm._finish(self._name, self._lane, self._call)


class _StartedChecked(CheckedRequest):
    def __init__(self, comm: DirectCommunicator, call: CheckedCall) -> None:
        self._comm, self._call = comm, call

    def wait(self) -> None:
        self._comm._finish("all_reduce", "bulk", self._call)

    @property
    def values(self) -> list[float] | None:
        return self._call.values


class DirectCommunicator(Communicator):
    """Carry arrays between ranks that can address one another's buffers.

    A transport gives it lanes and regions. A communicator belongs to the thread that made it.

    Args:
        lanes: the shared memory of each lane.
        regions: the memory that ``allocate()`` gave out.

    Attributes:
        names: by which errors call the ranks, where they are some of a larger world; then an error of all
            ranks here is not one of all ranks.
    """

    chunk_bytes = 4 << 20  # far above small_bytes, so that the two waits of a chunk are a small part of it
    chunk_edge = 4
    most_chunks = 16  # 256 MiB on 4 ranks of 2 cores: 14 % less time than in 66 chunks

    def __init__(
        self, rank: int, size: int, activity: Activity | None, lanes: dict[str, Lane], regions: Regions
    ) -> None:
        super().__init__(rank, size, activity)
        self._lanes = lanes
        self._regions = regions
        self.names: Sequence[int] | None = None
        self._known: dict[tuple[Any, ...], _Known] = {}

    def adopt(self, lane: str) -> None:
        super().adopt(lane)
        self._lanes[lane].owner = threading.get_ident()

    # -- calls

    def reduce_numbers(self, maxima: Sequence[int], sums: Sequence[float]) -> tuple[list[int], list[float]]:
        lane = self._lane("urgent")
        count = len(maxima)
        record = _record(count, len(sums))
        if record.size > lane.small_bytes:
            return super().reduce_numbers(maxima, sums)
        self._enter("all_reduce", "urgent")
        try:
            while lane.announced:
                self._carry_out_first(lane)
            slots = lane.next_bytes()
            record.pack_into(slots[self.rank], 0, *maxima, *sums)
            signature = sign_numbers(count, len(sums))
            number = lane.post(signature)
            self._meet(lane, number, signature)
            rows = [record.unpack_from(slot) for slot in slots]
            lane.flags.post(DONE, number)
        finally:
            self.activity.leave()
        # A dozen numbers: Python combines them in the time that NumPy takes to begin.
        first, *others = rows
        most, total = list(first[:count]), list(first[count:])
        for row in others:
            if list(row[:count]) != most:  # equal in nearly every step
                most = list(map(max, most, row))
            total = list(map(add, total, row[count:]))
        return most, total

    def start_all_reduce(self, array: Any, *, op: str = "sum", lane: str = "bulk") -> Request:
        started = self._start("all_reduce", array, op, lane, None)
        return started if started is not None else super().start_all_reduce(array, op=op, lane=lane)

    def start_checked_all_reduce(
        self, array: Any, note: int, value: float, settle: Callable[[], None]
    ) -> CheckedRequest | None:
        key = (id(array), "checked_all_reduce", "sum", "bulk", None)
        known = self._known.get(key)
        if known is None or known.array() is not array:
            known = self._learn(key, array, None)
            if known is None:
                return None
        call = known.checked(array, note, value, settle)
        self._announce("all_reduce", "bulk", call, known.location)
        return _StartedChecked(self, call)

    def start_reduce_scatter(
        self, array: Any, bounds: Sequence[int], *, op: str = "sum", lane: str = "bulk"
    ) -> Request:
        started = self._start("reduce_scatter", array, op, lane, tuple(bounds))
        if started is not None:
            return started
        return super().start_reduce_scatter(array, bounds, op=op, lane=lane)

    def start_all_gather(self, array: Any, bounds: Sequence[int], *, lane: str = "bulk") -> Request:
        started = self._start("all_gather", array, "sum", lane, tuple(bounds))
        return started if started is not None else super().start_all_gather(array, bounds, lane=lane)

    def _start(
        self, name: str, array: Any, op: str, lane: str, bounds: tuple[int, ...] | None
    ) -> Request | None:
        """Announce a collective and go on; None where the array is small or not mapped, and nothing was done."""
        key = (id(array), name, op, lane, bounds)
        known = self._known.get(key)
        if known is None or known.array() is not array:
            known = self._learn(key, array, bounds)
            if known is None:
                return None
        call = known.call(array, op)
        self._announce(name, lane, call, known.location)
        return _Started(self, name, lane, call)

    def _announce(self, name: str, lane: str, call: Call, location: int) -> None:
        self._enter(name, lane)
        try:
            own_lane = self._lane(lane)
            announced = own_lane.announced
            if announced:
                while own_lane.too_far_ahead:
                    self._carry_out_first(own_lane)
            own_lane.announce(call, location)
            while announced and own_lane.flags.reached(READY, announced[0].number):
                self._carry_out_first(own_lane)
        finally:
            self.activity.leave()

    def _learn(self, key: tuple[Any, ...], array: Any, bounds: tuple[int, ...] | None) -> _Known | None:
        """Return what :meth:`_start` asks of an array; None where it is small, or not mapped. **Local.**"""
        _, name, op, lane, _ = key
        self._check(array, lane, op, bounds=bounds)
        if array.nbytes <= self._lanes[lane].small_bytes:
            return None
        location = self._regions.locate(array)
        if not location:
            return None
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        if bounds is None:
            call = self._all_reducing(array, op, name)
        elif name == "reduce_scatter":
            call = self._scattering(array, bounds, op)
        else:
            call = self._gathering(name, array, bounds)
        known = self._known[key] = _Known(array, call, location)
        return known

    def _finish(self, name: str, lane_name: str, call: Call) -> None:
        lane = self._lane(lane_name)
        if call.number == WITHDRAWN:
            raise CommunicationError(
                f"{name}: expected it to be carried out, got ranks that disagreed before; start it again on all ranks"
            )
        if not lane.announced and lane.flags.reached(DONE, call.number):
            return
        self.activity.resume(name)
        try:
            while lane.announced and lane.announced[0].number <= call.number:
                self._carry_out_first(lane)
            lane.flags.wait(DONE, call.number)
        finally:
            self.activity.leave()

    def _all_reduce(self, array: Any, op: str, lane: str) -> None:
        own_lane = self._lane(lane, array)
        if array.nbytes <= own_lane.small_bytes:
            self._all_reduce_small(own_lane, array, op)
        else:
            self._run(own_lane, self._all_reducing(array, op))

    def _all_reducing(self, array: Any, op: str, name: str = "all_reduce") -> Call:
        bounds = slices(array.size, array.itemsize, self.size)
        own = bounds[self.rank], bounds[self.rank + 1]
        return Call(array, op, own, (0, array.size), None, sign(name, op, array))

    def _reduce(self, array: Any, op: str, root: int, lane: str) -> None:
        bounds = slices(array.size, array.itemsize, self.size)
        own = bounds[self.rank], bounds[self.rank + 1]
        kept = (0, array.size if self.rank == root else 0)
        call = Call(array, op, own, kept, None, sign("reduce", op, array, root), root=root)
        self._run(self._lane(lane, array), call)

    def _reduce_scatter(self, array: Any, bounds: Sequence[int], op: str, lane: str) -> None:
        self._run(self._lane(lane, array), self._scattering(array, bounds, op))

    def _scattering(self, array: Any, bounds: Sequence[int], op: str) -> Call:
        own = bounds[self.rank], bounds[self.rank + 1]
        return Call(array, op, own, own, None, sign("reduce_scatter", op, array, bounds), root=self.rank)

    def _broadcast(self, array: Any, root: int, lane: str) -> None:
        self._gather("broadcast", array, [0] * (root + 1) + [array.size] * (self.size - root), lane)

    def _all_gather(self, array: Any, bounds: Sequence[int], lane: str) -> None:
        self._gather("all_gather", array, bounds, lane)

    def _exclusive_sum(self, value: int, lane: str) -> int:
        values = np.zeros(self.size, dtype=np.int64)
        values[self.rank] = value
        self._gather("exclusive_sum", values, range(self.size + 1), lane)
        return int(values[: self.rank].sum())

    def _barrier(self, lane: str) -> None:
        self._gather("barrier", np.empty(0, np.uint8), [0] * (self.size + 1), lane)

    def _gather(self, name: str, array: Any, bounds: Sequence[int], lane: str) -> None:
        self._run(self._lane(lane, array), self._gathering(name, array, bounds))

    def _gathering(self, name: str, array: Any, bounds: Sequence[int]) -> Call:
        own = bounds[self.rank], bounds[self.rank + 1]
        return Call(array, "sum", own, (0, 0), bounds, sign(name, "sum", array, bounds))

    # -- one collective

    def _lane(self, name: str, array: Any = None) -> Lane:
        lane = self._lanes[name]
        if threading.get_ident() != lane.owner:
            raise CommunicationError(
                f"lane {name}: expected calls from the thread that made the communicator, got another; "
                "give each thread comm.duplicate(), made on every rank"
            )
        if type(array) is not np.ndarray and array is not None and device_of(array) != CPU:
            raise CommunicationError(
                f"array: expected host memory for transport {self.transport}, got {device_of(array)}"
            )
        return lane

    def _run(self, lane: Lane, call: Call) -> None:
        """Carry out one collective from its announcement to its end."""
        while lane.announced:
            self._carry_out_first(lane)
        if call.array.nbytes <= lane.small_bytes:
            self._run_small(lane, call)
        else:
            lane.announce(call, self._regions.locate(call.array))
            self._carry_out(lane)
            lane.flags.wait(DONE, call.number)

    def _run_small(self, lane: Lane, call: Call) -> None:
        array = call.array
        slots = lane.next_slots(array.dtype)
        start, stop = (0, array.size) if call.bounds is None else call.own
        if stop > start:
            slots[self.rank][start:stop] = array[start:stop]
        number = lane.post(call.signature)
        self._meet(lane, number, call.signature)
        if call.bounds is None:
            lane.combiner.combine(call.op, slots, [array], *call.kept)
        else:
            self._take(array, call.bounds, slots)
        lane.flags.post(DONE, number)

    def _all_reduce_small(self, lane: Lane, array: Any, op: str) -> None:
        """Do what :meth:`_run` does for a small all-reduce, in half the time: each step waits for two of them."""
        while lane.announced:
            self._carry_out_first(lane)
        count = array.size
        slots = [slot[:count] for slot in lane.next_slots(array.dtype)]
        slots[self.rank][...] = array
        signature = sign("all_reduce", op, array)
        number = lane.post(signature)
        self._meet(lane, number, signature)
        lane.combiner.combine_few(op, slots, array)
        lane.flags.post(DONE, number)

    def _meet(self, lane: Lane, number: int, signature: int) -> None:
        """Wait until all ranks have announced the collective, and check that it is the same one."""
        flags = lane.flags
        flags.wait(READY, number)
        word = SIGNATURES + number % HISTORY
        for row in flags.peers:
            if row[word] != signature:
                signatures = [row[word] for row in flags.rows]
                flags.post(DONE, number)  # a program may catch the error and go on
                error = self._mismatch(signatures)
                raise error if self.names is not None else on_all_ranks(error)

    def _meet_checked(self, lane: Lane, call: CheckedCall) -> None:
        """Do as :meth:`_meet`, and find out whether the notes are equal."""
        flags, number = lane.flags, call.number
        if not flags.wait(READY, number, partial(self._elsewhere, flags, number)):
            later = lane.withdraw(number)
            self._settle(call)
            # Who was elsewhere has exchanged the same there, and sums without a check.
            call.signature = sign("all_reduce", "sum", call.array)
            for each in (call, *later):
                lane.announce(each, each.location)
            lane.announced.popleft()
            self._meet(lane, number, call.signature)
            return
        place = number % HISTORY
        same = True
        for row in flags.peers:
            if row[SIGNATURES + place] != call.signature or row[NOTES + place] != call.note:
                same = False
        if same:
            call.values = [row[VALUES + place] for row in flags.floats]
            return
        if all(is_checked(row[SIGNATURES + place]) for row in flags.rows):
            # Before settling: who has done so may start something else in their place, and look for it here.
            later = lane.withdraw(number + 1)
            try:
                self._settle(call)
            except BaseException:
                flags.post(DONE, number)
                raise
            for each in later:
                lane.announce(each, each.location)
        self._meet(lane, number, call.signature)

    def _elsewhere(self, flags: Flags, number: int) -> bool:
        """Return whether a rank is in an urgent message that this one has not come to, and not in this sum yet."""
        urgent = self._lanes["urgent"]
        posted = urgent.number
        for there, here in zip(urgent.flags.peers, flags.peers):
            # In this order: a rank may come to both meanwhile.
            if there[READY] > posted and here[READY] < number:
                return True
        return False

    def _settle(self, call: CheckedCall) -> None:
        name = self.activity.call
        call.settle()
        if name is not None:
            self.activity.resume(name)

    def _carry_out_first(self, lane: Lane) -> None:
        """Do this rank's part of the first announced collective; its result is complete when all are DONE."""
        if self.spans is None:
            self._carry_out(lane)
        else:
            name = next(name for name, other in self._lanes.items() if other is lane)
            with self.spans.message(name, lane.announced[0].array):
                self._carry_out(lane)

    def _carry_out(self, lane: Lane) -> None:
        call = lane.announced.popleft()
        if type(call) is CheckedCall:
            self._meet_checked(lane, call)
        else:
            self._meet(lane, call.number, call.signature)
        word = LOCATIONS + call.number % HISTORY
        parts = self._regions.parts(call.array, call.location, [row[word] for row in lane.flags.rows])
        if parts is None:
            if call.bounds is None:
                self._sum_in_pieces(lane, call)
            else:
                self._gather_in_pieces(lane, call.array, call.bounds)
        elif call.bounds is None:
            if call.root is None:
                targets = [call.array, *parts[self.rank + 1 :], *parts[: self.rank]]
            else:
                targets = [parts[call.root]]
            lane.combiner.combine(call.op, parts, targets, *call.own)
        else:
            self._take(call.array, call.bounds, parts)
        lane.flags.post(DONE, call.number)

    def _take(self, array: Any, bounds: Sequence[int], sources: Sequence[Any]) -> None:
        """Copy what the other ranks give."""
        for owner, (start, stop) in enumerate(pairwise(bounds)):
            if owner != self.rank and stop > start:
                array[start:stop] = sources[owner][start:stop]

    def _sum_in_pieces(self, lane: Lane, call: Call) -> None:
        array, (keep_from, keep_to) = call.array, call.kept
        step = lane.piece_bytes // array.itemsize
        for i in range(0, array.size, step):
            count = min(step, array.size - i)
            staged = lane.next_pieces(array.dtype)
            own = staged[self.rank]
            own[:count] = array[i : i + count]
            lane.next_phase()
            bounds = slices(count, array.itemsize, self.size)
            lane.combiner.combine(call.op, staged, [own], bounds[self.rank], bounds[self.rank + 1])
            lane.next_phase()
            for owner, (start, stop) in enumerate(pairwise(bounds)):
                first, last = max(start, keep_from - i), min(stop, keep_to - i)
                if last > first:
                    array[i + first : i + last] = staged[owner][first:last]

    def _gather_in_pieces(self, lane: Lane, array: Any, bounds: Sequence[int]) -> None:
        step = lane.piece_bytes // array.itemsize
        for i in range(0, max(stop - start for start, stop in pairwise(bounds)), step):
            parts = [array[start + i : min(start + i + step, stop)] for start, stop in pairwise(bounds)]
            staged = lane.next_pieces(array.dtype)
            staged[self.rank][: parts[self.rank].size] = parts[self.rank]
            lane.next_phase()
            for owner, part in enumerate(parts):
                if owner != self.rank:
                    part[...] = staged[owner][: part.size]

    def _mismatch(self, signatures: Sequence[int]) -> CommunicationError:
        return mismatch(self.names or range(self.size), signatures)
