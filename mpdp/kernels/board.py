"""Board: the numbers of a step that change from one step to the next, where kernels read them.

A captured step does the same launches with the same arguments each time. What differs lies in memory: the host writes
it into the *slot* of a launch before it launches, and the launch begins by taking its slot. The step's own numbers
(loss sum, count, whether the update is applied) lie beside them, and each update leaves a *report* that the host reads
later, without waiting for the step under way. A loss or gradient that is not finite *halts* the board: that update and
all later ones are not applied, so the state stays as it was before it.

:class:`Board` is the interface and what devices share, :class:`HostBoard` does it with NumPy; ``cuda_board`` on a GPU.
It knows neither models nor ranks. Read next: ``parallel/graph_step.py``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

# Words of 8 bytes, as in cuda_src/step.cu. The board: what the step itself keeps, then its slot, then the numbers that
# were chosen from the slot, then (on a GPU) where the arrays lie.
LAUNCH, UPDATE, HALTED, APPLY, APPLIED, HALTED_STEP, SCALE, NORM, LOSS, COUNT, MINE, TICKET = range(12)
HEAD = 16
STEP, START, ROWS, KNOWN, POWER, LOSS_SCALE, CLIP, SEED, SKIPS = range(16, 25)
NUMBERS = 32
FULL, STATUS, TOTAL, COUNTED, OWN, LENGTH, FIRST, WHEN = range(
    8
)  # of a report; all together, by XOR, are its number
REPORT = 8


class Status(IntEnum):
    """What became of an update."""

    APPLIED = 0
    SKIPPED = 1  # the gradient is not finite, and the loss scale is to fall
    NOTHING = 2  # nothing was counted
    LOSS_LOST = 3  # the loss sum is not finite: the board has halted, as from here on
    GRADIENT_LOST = 4  # the gradient is not finite
    BROKEN = 5  # a collective was broken off


Loss = tuple[Any, float, Any]  # total, factor and count, as for :meth:`Board.take`
_STATUS = tuple(Status)
_WORDS, _REPORT, _SLOT = struct.Struct("=8q"), struct.Struct("=2q4d2q"), struct.Struct("=4q4dq")


class Report(NamedTuple):
    """What an update tells the host.

    Attributes:
        status: what became of it.
        loss_sum, counted: over all ranks. ``own_sum``: this rank's loss sum.
        norm: of the averaged gradient, before it is clipped; 0.0 where it was not taken.
        bad: the first element of the gradient that is not finite; -1 if there is none.
        step: the update's step, or the one at which the board has halted.
    """

    status: Status
    loss_sum: float
    counted: float
    own_sum: float
    norm: float
    bad: int
    step: int

    @property
    def halted(self) -> bool:
        """Whether neither this update nor any after it was applied."""
        return self.status >= Status.LOSS_LOST

    @property
    def mean_loss(self) -> float:
        """Mean loss over all ranks; 0.0 where nothing was counted."""
        return self.loss_sum / self.counted if self.counted else 0.0


class Board:
    """The numbers of a step in the memory of one device. **Local.**

    Args:
        kernels: of the device.
        slots: launches that may be under way at once.
        numbers: float64 numbers that an optimizer wants of each update; there are two sets, for the case that the
            update before was applied and for the case that it was not.
        sources: arrays that a launch takes at the most.
        reports: updates whose reports are kept.

    Attributes:
        step, start, rows: 0-d int64 arrays: step, position of this share's first sample, and samples of the share.
        apply: 0-d int64 array, whether this update is applied; ``scale``: 0-d float64 array, the gradient's factor.
        seed: 0-d float64 array, the gradient of the loss sum.
        record: float64 array (2,), loss sum and count, for the sum over ranks.
        numbers: float64 array, the set that fits.
        parts: float64 array, what ranks that hold parts of the reduced gradient add up before they decide: the sum of
            squares of each span, and for each rank the place of the first element that is not finite; see
            :meth:`share`.
        launches: slots written so far.
    """

    def __init__(self, kernels: Any, slots: int, numbers: int, sources: int, reports: int) -> None:
        self.kernels = kernels
        self.slots, self.table, self.sources, self.reports = slots, numbers, sources, reports
        self.width = HEAD + 2 * numbers + sources
        self.words = kernels.xp.zeros(NUMBERS + 3 * numbers + sources, np.int64)
        self.launches = 0
        self.parts: Any = None
        self._rank = 0
        self._own: Any = None
        floats = self.words.view(np.float64)
        self.step, self.start, self.rows = (self.words[i : i + 1].reshape(()) for i in (STEP, START, ROWS))
        self.apply = self.words[APPLY : APPLY + 1].reshape(())
        self.scale, self.seed = (floats[i : i + 1].reshape(()) for i in (SCALE, SEED))
        self.record = floats[LOSS : COUNT + 1]
        self.numbers = floats[NUMBERS + 2 * numbers : NUMBERS + 3 * numbers]
        self._ring, self._reports = self._host_memory(slots * self.width), self._host_memory(reports * REPORT)
        # Bytes are several times as fast to write and to look at as arrays.
        slot_words: Any = self._ring.view(np.uint8)
        report_words: Any = self._reports.view(np.uint8)
        self._ring_bytes, self._report_bytes = memoryview(slot_words), memoryview(report_words)
        self._pointers = struct.Struct(f"={sources}q")
        self._signal = self._host_memory(1)
        self._kept: list[Any] = [None] * slots

    def _host_memory(self, words: int) -> np.ndarray:
        """Return zeroed int64 host memory that kernels can reach."""
        return np.zeros(words, np.int64)

    def write(
        self,
        *,
        step: int,
        start: int,
        rows: int,
        applied: int,
        power: float,
        loss_scale: float,
        clip_norm: float | None,
        seed: float,
        skips: bool,
        numbers: bytes,
        sources: Sequence[Any],
    ) -> None:
        """Fill the next slot; the launch that takes it follows.

        Args:
            step: updates finished before.
            start: position of the share's first sample in the global batch.
            rows: samples of the share.
            applied: updates applied in all, as far as reports say; at most one more is under way.
            power: 2^k, by which gradient sums were divided.
            loss_scale: factor on them.
            clip_norm: largest norm of the averaged gradient, or None.
            seed: gradient of the loss sum.
            skips: a gradient that is not finite does not halt the board.
            numbers: the bytes of a float64 array (2, numbers).
            sources: flat C-contiguous arrays on the device, in the order of the targets of :meth:`begin`.
        """
        index = self.launches % self.slots
        at = 8 * index * self.width
        clip = 0.0 if clip_norm is None else clip_norm
        _SLOT.pack_into(
            self._ring_bytes, at, step, start, rows, applied, power, loss_scale, clip, seed, skips
        )  # fmt: skip
        at += 8 * HEAD
        self._ring_bytes[at : at + len(numbers)] = numbers
        self._point(at + len(numbers), sources)
        self._kept[index] = sources  # their memory is read when the launch runs
        self.launches += 1

    def _point(self, at: int, sources: Sequence[Any]) -> None:
        """Note at a byte of the ring where the sources are."""

    def begin(self, targets: Sequence[Any], rows: int) -> None:
        """Take the slot of this launch, and copy its sources.

        Args:
            targets: C-contiguous arrays that take the sources. Rows that a shorter share does not have become zeros.
            rows: what the targets are made for: their leading length is a multiple of it.
        """
        raise NotImplementedError

    def take(self, total: Any, factor: float, count: Any, first: bool) -> None:
        """Add a micro-batch's loss sum, ``total * factor``, and its count to the record.

        Args:
            total: 0-d array.
            factor: a number.
            count: a number, or a 0-d float64 array.
            first: the micro-batch is the first of its update.
        """
        raise NotImplementedError

    def signal(self, count: int) -> None:
        """Tell the host that the first ``count`` chunks of the launch under way are final; after :meth:`take`."""
        raise NotImplementedError

    def signalled(self, count: int) -> bool:
        """Return whether the last launch that was written has come to ``signal(count)``."""
        return bool(self._signal[0] >= _signal(self.launches, count))

    def share(self, own: np.ndarray, rank: int, size: int) -> None:
        """Make ready for a gradient of which each rank has the sums over ranks in some spans only. **Local.**

        Args:
            own: which spans this rank has: an array of bool.
            rank, size: of the communicator that adds up :attr:`parts`.
        """
        self.parts = self.kernels.xp.zeros(len(own) + size, np.float64)
        self._rank, self._own = rank, self.kernels.from_host(own.astype(np.uint8))

    def look(self, gradient: Any, span: int) -> None:
        """Fill :attr:`parts` from the spans of this rank, with zeros for the others; then ranks add them up.

        Args:
            gradient: flat array, right where this rank has the sums.
            span: elements of a partial sum of squares.
        """
        raise NotImplementedError

    def decide(self, gradient: Any, span: int, broken: int = 0, loss: Loss | None = None) -> None:
        """Decide from the reduced record and gradient whether the update is applied, and with which factor.

        After :meth:`share` from the reduced :attr:`parts` in place of the gradient.

        With s = power / count / loss_scale the factor is ``s min(1, clip_norm / (|gradient| s + 1e-6))``.

        Args:
            gradient: flat array of sums over ranks.
            span: elements of a partial sum of squares.
            loss: what :meth:`take` would be called with right before, where the update has one micro-batch.
            broken: address of a 32-bit word in device memory that is set where a sum was broken off; 0 for none.
        """
        raise NotImplementedError

    def prime(self, gradient: Any, span: int) -> None:
        """Call every method once, so that nothing is compiled in a capture, and wait; then start from nothing."""
        xp = self.kernels.xp
        loss = xp.zeros((), np.float64 if gradient.dtype.itemsize == 8 else np.float32)
        self.write(
            step=0, start=0, rows=0, applied=0, power=1.0, loss_scale=1.0, clip_norm=None, seed=1.0, skips=False,
            numbers=bytes(16 * self.table), sources=(loss,),
        )  # fmt: skip
        self.begin((xp.empty_like(loss).reshape(1),), 0)
        self.take(loss, 1.0, 0.0, True)
        self.signal(0)
        if self.parts is not None:
            self.look(gradient, span)
        self.decide(gradient, span)
        self.decide(gradient, span, loss=(loss, 1.0, 0.0))
        self._synchronize()
        self.words.fill(0)
        self._synchronize()
        self._reports[:] = 0
        self._signal[0] = self.launches = 0

    def _synchronize(self) -> None:
        """Wait until the device has done what was asked for."""

    def report(self, update: int) -> Report | None:
        """Return the report of an update of this board, counted from 0; None if it is not there yet."""
        at = 8 * (update % self.reports * REPORT)
        full, a, b, c, d, e, f, g = _WORDS.unpack_from(self._report_bytes, at)
        if full ^ a ^ b ^ c ^ d ^ e ^ f ^ g != update + 1:  # some words are not there yet
            return None
        _, status, *rest = _REPORT.unpack_from(self._report_bytes, at)
        return Report(_STATUS[status], *rest)


def _signal(launch: int, count: int) -> int:
    """Return a number that grows with launches, and within one with its chunks."""
    return (launch << 20) + count


class HostBoard(Board):
    """The board with NumPy, which runs as it is called. **Local.**"""

    def begin(self, targets: Sequence[Any], rows: int) -> None:
        words, launch = self.words, int(self.words[LAUNCH])
        slot = self._ring[launch % self.slots * self.width :][: self.width]
        table = self.table
        words[HEAD : NUMBERS + 2 * table] = slot[: HEAD + 2 * table]
        at = HEAD + table * int(words[APPLIED] - words[KNOWN])
        words[NUMBERS + 2 * table : NUMBERS + 3 * table] = slot[at : at + table]
        for target, source in zip(targets, self._kept[launch % self.slots], strict=True):
            there = len(target) // rows * int(words[ROWS]) if rows else len(target)
            target[:there] = source
            target[there:] = 0

    def take(self, total: Any, factor: float, count: Any, first: bool) -> None:
        floats = self.words.view(np.float64)
        loss, counted = (0.0, 0.0) if first else (floats[MINE], floats[COUNT])
        if float(count):
            loss += float(total) * factor
        floats[LOSS] = floats[MINE] = loss
        floats[COUNT] = counted + float(count)
        self.words[LAUNCH] += 1

    def signal(self, count: int) -> None:
        self._signal[0] = _signal(int(self.words[LAUNCH]), count)

    def look(self, gradient: Any, span: int) -> None:
        spans = len(self._own)
        self.parts[:] = 0
        for i in np.flatnonzero(self._own).tolist():
            part = gradient[i * span : (i + 1) * span]
            self.parts[i] = self.kernels.squared_norm(part, span)
            bad = np.flatnonzero(~np.isfinite(part))
            if len(bad) and not self.parts[spans + self._rank]:
                self.parts[spans + self._rank] = i * span + bad[0] + 1

    def decide(self, gradient: Any, span: int, broken: int = 0, loss: Loss | None = None) -> None:
        if loss is not None:
            self.take(*loss, True)
        words, floats = self.words, self.words.view(np.float64)
        total, count, norm, scale = float(floats[LOSS]), float(floats[COUNT]), 0.0, 0.0
        bad = -1
        if self.parts is not None:
            places = self.parts[len(self._own) :]
            if places.any():
                bad = int(places[places > 0].min()) - 1
        elif not self.kernels.all_finite(gradient):
            bad = int(np.flatnonzero(~np.isfinite(gradient))[0])
        status = Status.APPLIED
        if words[HALTED]:
            status = Status(int(words[HALTED]))
        elif not math.isfinite(total):
            status = Status.LOSS_LOST
        elif not count > 0:
            status = Status.NOTHING
        elif bad >= 0:
            status = Status.SKIPPED if words[SKIPS] else Status.GRADIENT_LOST
        else:
            scale = float(floats[POWER]) / count / float(floats[LOSS_SCALE])
            if floats[CLIP] > 0:
                squares = (
                    self.kernels.squared_norm(gradient, span)
                    if self.parts is None
                    else self.kernels.total(self.parts[: len(self._own)])
                )
                norm = math.sqrt(squares) * scale
                scale *= min(1.0, float(floats[CLIP]) / (norm + 1e-6))
        if not words[HALTED] and status >= Status.LOSS_LOST:
            words[HALTED], words[HALTED_STEP] = status, words[STEP]
        words[APPLY] = status == Status.APPLIED
        words[APPLIED] += status == Status.APPLIED
        floats[SCALE], floats[NORM] = scale, norm
        update = int(words[UPDATE])
        words[UPDATE] += 1
        at = update % self.reports * REPORT
        self._reports.view(np.float64)[at + TOTAL : at + LENGTH + 1] = total, count, floats[MINE], norm
        self._reports[at + STATUS] = status
        self._reports[at + FIRST], self._reports[at + WHEN] = (
            bad,
            words[HALTED_STEP if words[HALTED] else STEP],
        )
        self._reports[at + FULL] = np.bitwise_xor.reduce(self._reports[at + 1 : at + REPORT]) ^ (update + 1)
