"""Regions: memory that a communicator allocated and that all ranks have mapped, found again by address.

Keeps no region alive: what a rank no longer holds a view of is unmapped; when each rank has let go, it is gone.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

_OFFSET_BITS = 44  # of a location: 16 TiB a region
_REMEMBERED = 256  # views of one region; a chunk table has as many chunks


class _Region:
    def __init__(self, number: int, start: int, nbytes: int, parts: Sequence[Any]) -> None:
        self.number, self.start, self.stop = number, start, start + nbytes
        self.parts = parts  # every rank's memory; None at this rank's place, whose life belongs to its views
        self.views: dict[tuple[Any, ...], list[Any]] = {}


class Regions:
    """The regions of a family of communicators over the same ranks.

    Args:
        rank: of this process or thread.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._regions: dict[int, _Region] = {}
        self._numbers = itertools.count(1)

    def next_number(self) -> int:
        """Return a number that no region here has; rank 0's is the one to use. **Local.**"""
        return next(self._numbers)

    def add(self, number: int, parts: Sequence[np.ndarray]) -> None:
        """Register memory until the last view of this rank's part is gone. **Local.**

        Args:
            number: of the region, 1 or more, the same on all ranks.
            parts: each rank's memory as uint8 arrays, all mapped here, straight from ``np.frombuffer``: then it is
                the array itself that each of its views keeps alive.
        """
        own = parts[self._rank]
        others = [None if rank == self._rank else part for rank, part in enumerate(parts)]
        self._regions[number] = _Region(number, own.ctypes.data, own.nbytes, others)
        weakref.finalize(own, self._regions.pop, number, None).atexit = False

    def __len__(self) -> int:
        return len(self._regions)

    def locate(self, array: Any) -> int:
        """Return where an array lies, as a number that other ranks understand; 0 if in no region. **Local.**"""
        if not self._regions:
            return 0
        start = array.__array_interface__["data"][0]
        for region in self._regions.copy().values():  # a collection inside of the loop takes regions out
            if region.start <= start and start + array.nbytes <= region.stop:
                return region.number << _OFFSET_BITS | (start - region.start)
        return 0

    def parts(self, array: Any, location: int, locations: Sequence[int]) -> list[Any] | None:
        """Return every rank's array as this rank has it mapped.

        **Local**, with the same outcome on all ranks.

        Args:
            array: this rank's own.
            location: its place.
            locations: each rank's place.

        Returns:
            None where they do not all lie in one region.
        """
        number = location >> _OFFSET_BITS
        for other in locations:
            if other >> _OFFSET_BITS != number or not number:
                return None
        region = self._regions[number]
        key = (array.dtype, array.size, *locations)
        others = region.views.get(key)
        if others is None:
            if len(region.views) >= _REMEMBERED:
                region.views.clear()
            others = region.views[key] = [
                None if part is None else _view(part, at & ((1 << _OFFSET_BITS) - 1), array)
                for part, at in zip(region.parts, locations)
            ]
        parts = list(others)
        parts[self._rank] = array
        return parts


def _view(part: np.ndarray, offset: int, like: Any) -> np.ndarray:
    return part[offset : offset + like.nbytes].view(like.dtype)
