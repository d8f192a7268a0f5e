"""Lane: the shared memory of one lane of a direct communicator, and the order of its collectives.

Each rank has a row of flags, two slots for small messages (used in turn, so that nobody writes what another still
reads) and a staging area in two halves for arrays that are not mapped. Read ``direct`` for what they are used for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from .activity import Activity
from .blocks import Combiner
from .calls import Call, CheckedCall
from .flags import DONE, HISTORY, LOCATIONS, NOTES, PHASE, READY, ROW_BYTES, SIGNATURES, VALUES, Flags

WITHDRAWN = -1  # the number of a call that was taken back
PIECE_BYTES = 256 << 10  # of what travels through the staging area


def small_bytes(size: int) -> int:
    """Return up to which size a message of so many ranks takes one phase: every rank then sums everything. **Local.**

    With two ranks on two cores both ways take the same time at 48 KiB; more ranks read more.
    """
    return min(32 << 10, (128 << 10) // size // 64 * 64)


def lane_bytes(small_bytes: int, piece_bytes: int = PIECE_BYTES) -> int:
    """Return the bytes of shared memory that one lane of one rank needs. **Local.**"""
    return -(-(ROW_BYTES + 2 * small_bytes + 2 * piece_bytes) // 4096) * 4096


class Lane:
    """The shared memory of one lane: flags, slots for small messages, and a staging area in two halves.

    **Local** to construct, over memory that is shared already.

    Args:
        memory: each rank's ``lane_bytes`` of zeros, by rank.
        looks: see :class:`Flags`.
        small_bytes: messages up to here take one phase.
        piece_bytes: what travels through the staging area at once.
    """

    def __init__(
        self,
        rank: int,
        memory: Sequence[np.ndarray],
        activity: Activity,
        *,
        looks: int,
        small_bytes: int,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.flags = Flags(rank, memory, activity, looks)
        self._own_floats = self.flags.floats[rank]
        self.small_bytes, self.piece_bytes = small_bytes, piece_bytes
        self.owner = threading.get_ident()
        self.combiner = Combiner()
        self.number = 0  # of the last collective that was announced
        self.phase = 0  # of the staging area
        self.piece = 0
        self.announced: deque[Call] = deque()  # and not yet carried out
        self._all_done = 0  # every rank is done with the collectives up to this one
        starts = [ROW_BYTES + i * small_bytes for i in (0, 1)]
        self._slots = [[part[start : start + small_bytes] for part in memory] for start in starts]
        self._bytes = [[memoryview(slot) for slot in half] for half in self._slots]  # type: ignore[arg-type]
        starts = [ROW_BYTES + 2 * small_bytes + i * piece_bytes for i in (0, 1)]
        self._pieces = [[part[start : start + piece_bytes] for part in memory] for start in starts]
        self._views: dict[tuple[np.dtype, int], list[np.ndarray]] = {}

    def next_slots(self, dtype: np.dtype) -> list[Any]:
        """Return every rank's slot for the small message that is posted next, as an array of ``dtype``."""
        half = (self.number + 1) & 1
        try:
            return self._views[dtype, half]
        except KeyError:
            views = self._views[dtype, half] = [slot.view(dtype) for slot in self._slots[half]]
            return views

    def next_bytes(self) -> list[memoryview]:
        """Return the slots of :meth:`next_slots` as bytes."""
        return self._bytes[(self.number + 1) & 1]

    def next_pieces(self, dtype: np.dtype) -> list[np.ndarray]:
        """Return every rank's half of the staging area for the next piece."""
        self.piece += 1
        return [piece.view(dtype) for piece in self._pieces[self.piece & 1]]

    def next_phase(self) -> None:
        """Say that this rank's piece is in place, and wait for those of the others."""
        self.phase += 1
        self.flags.post(PHASE, self.phase)
        self.flags.wait(PHASE, self.phase)

    @property
    def too_far_ahead(self) -> bool:
        """Whether one more announcement would overwrite the signature of one that this rank has still to carry out."""
        return bool(self.announced) and self.number - self.announced[0].number >= HISTORY - 2

    def announce(self, call: Call, location: int) -> None:
        """Post a collective that is to be carried out when all ranks have announced it."""
        call.location = location
        call.number = self.post(call.signature, location, call if type(call) is CheckedCall else None)
        self.announced.append(call)

    def withdraw(self, number: int) -> list[Call]:
        """Take back the announcements from ``number`` on, none of which any rank has met, and return the calls."""
        calls = list(self.announced)
        self.announced.clear()
        for call in calls:
            call.number = WITHDRAWN
        self.number = number - 1
        self.flags.post(READY, self.number)
        return calls

    def post(self, signature: int, location: int = 0, checked: CheckedCall | None = None) -> int:
        """Say that this rank is ready for a collective, and return its number; does not wait for the others in it."""
        number = self.number + 1
        if (
            number - self._all_done >= HISTORY
        ):  # others may still read the signature whose place this one takes
            self.flags.wait(DONE, number - HISTORY + 1)
            self._all_done = min((row[DONE] for row in self.flags.peers), default=number)
        self.number = number
        own, place = self.flags.own, number % HISTORY
        own[SIGNATURES + place] = signature
        own[LOCATIONS + place] = location
        if checked is not None:
            own[NOTES + place] = checked.note
            self._own_floats[VALUES + place] = checked.value
        self.flags.post(READY, number)
        return number
