"""HeldArray: an array over an index space of which this rank keeps some ranges only.

Rules index it as they index a whole array, by the elements of the layout; who holds which ranges is decided elsewhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

Ranges = Sequence[tuple[int, int]]


class HeldArray:
    """Give views of the ranges that are held, by their place in the whole index space.

    **Local.**

    Args:
        ranges: (start, stop) elements, apart and in order.
        array: flat, with the ranges one behind the other.

    Attributes:
        ranges, array: as given.

    Example:
        >>> import numpy as np
        >>> held = HeldArray([(0, 2), (6, 9)], np.arange(5))
        >>> held[7:9]
        array([3, 4])
        >>> [part.tolist() for part in held.parts()]
        [[0, 1], [2, 3, 4]]
    """

    def __init__(self, ranges: Ranges, array: Any) -> None:
        self.ranges = tuple(ranges)
        self.array = array
        lengths = [stop - start for start, stop in self.ranges]
        if array.shape != (sum(lengths),):
            raise ValueError(
                f"array: expected shape ({sum(lengths)},) for the ranges, got {array.shape}; allocate the sum of them"
            )
        self._starts = [start for start, _ in self.ranges]
        self._places = [0, *accumulate(lengths)]

    @property
    def dtype(self) -> Any:
        """Of the elements."""
        return self.array.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of what is held."""
        return int(self.array.nbytes)

    @property
    def device(self) -> Any:
        """Where the array lies."""
        return getattr(self.array, "device", None)

    def __getitem__(self, where: slice) -> Any:
        """Return the view of elements ``where.start`` to ``where.stop``, which lie in one range."""
        start, stop = where.start, where.stop
        at = bisect_right(self._starts, start) - 1
        if at < 0 or stop > self.ranges[at][1]:
            raise ValueError(
                f"elements: expected a range inside one of {list(self.ranges)}, got {start}..{stop}; "
                "another rank holds it"
            )
        place = self._places[at] - self.ranges[at][0]
        return self.array[place + start : place + stop]

    def parts(self) -> list[Any]:
        """Return the views of all ranges, in order."""
        return [self.array[a:b] for a, b in zip(self._places, self._places[1:])]
