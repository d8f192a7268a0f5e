"""Plan: which ranges of the trainable zone an optimizer updates at once, and with which group's values.

Built once when the optimizer is bound. It knows the layout's blocks and group numbers, not what the
numbers mean. Where all parameters share one group and all are used, the plan of any range is that
range: the work of an update does not grow with the number of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

_CACHED_RANGES = 4096  # a chunk table has tens of ranges; more means the ranges never repeat
_SHORT_SPANS = 16  # a uniform stretch below this joins its mixed neighbours: fewer, larger calls


class Piece(NamedTuple):
    """A range of elements that is updated at once; ``group`` is None where blocks differ."""

    start: int
    stop: int
    group: int | None


class Plan:
    """Cut ranges of the trainable zone where groups or used flags change.

    **Local.** The path that an element takes (one value for the piece, or one for each block) depends on the
    layout and the groups only, never on the range asked for, so all partitions give equal bits.

    Args:
        layout: the layout, with its ``trainable`` entries.
        groups: one group number (0 to 255) for each trainable parameter, in layout order.
    """

    def __init__(self, layout: Any, groups: Sequence[int]) -> None:
        self._block: int = layout.BLOCK
        size: int = layout.trainable_size
        starts = [entry.start for entry in layout.trainable]
        # a parameter's blocks reach to the next one's start; padding behind the last joins the last
        self._bounds = np.array([0, *starts[1:], size] if starts else [0], dtype=np.int64)
        blocks = np.diff(self._bounds) // self._block
        self.group_of_block = np.repeat(np.asarray(groups, dtype=np.uint8), blocks)
        self._blocks = blocks
        self._owners: np.ndarray | None = None
        self._pieces = self._cut(layout.SPAN, size)
        self._used: np.ndarray | None = None
        self._runs: list[tuple[int, int]] = [(0, size)]
        self._cache: dict[tuple[int, int], list[Piece]] = {}

    def parameter_of_block(self) -> np.ndarray:
        """Return the index of the trainable parameter that each block belongs to."""
        if self._owners is None:
            self._owners = np.repeat(np.arange(len(self._blocks), dtype=np.int32), self._blocks)
        return self._owners

    def ranges(self, start: int, stop: int, used: np.ndarray | None) -> list[Piece]:
        """Return the pieces of [start, stop) that are to be updated, in order.

        Args:
            start: first element, a multiple of the block.
            stop: end, a multiple of the block.
            used: boolean array over the trainable parameters, or None for all.
        """
        if used is not self._used and not (
            used is not None and self._used is not None and np.array_equal(used, self._used)
        ):
            self._used = None if used is None else used.copy()
            self._runs = self._used_runs(used)
            self._cache.clear()
        found = self._cache.get((start, stop))
        if found is None:
            if len(self._cache) >= _CACHED_RANGES:
                self._cache.clear()
            found = self._cache[start, stop] = list(self._intersect(start, stop))
        return found

    def _cut(self, span: int, size: int) -> list[Piece]:
        """Return the zone as few pieces: uniform stretches, and mixed ones cut at whole spans."""
        if size == 0:
            return []
        if not self.group_of_block.any():
            return [Piece(0, size, 0)]
        rows = self.group_of_block.reshape(-1, span // self._block)
        mixed = (rows != rows[:, :1]).any(axis=1)
        kinds = np.where(mixed, -1, rows[:, 0].astype(np.int64))
        edges = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
        stretches = [[a, b, int(kinds[a])] for a, b in pairwise(edges)]
        for i, stretch in enumerate(stretches):
            beside = [s[2] for s in stretches[max(i - 1, 0) : i + 2] if s is not stretch]
            if stretch[1] - stretch[0] < _SHORT_SPANS and -1 in beside:
                stretch[2] = -1
        joined: list[list[int]] = []
        for stretch in stretches:
            if joined and joined[-1][2] == stretch[2]:
                joined[-1][1] = stretch[1]
            else:
                joined.append(stretch)
        return [Piece(a * span, b * span, None if kind < 0 else kind) for a, b, kind in joined]

    def _used_runs(self, used: np.ndarray | None) -> list[tuple[int, int]]:
        if used is None:
            return [(0, int(self._bounds[-1]))]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], used, [False])).astype(np.int8)))
        bounds = self._bounds[edges].tolist()
        return [(a, b) for a, b in zip(bounds[::2], bounds[1::2]) if a < b]

    def _intersect(self, start: int, stop: int) -> Iterator[Piece]:
        runs = iter(self._runs)
        run = next(runs, None)
        for piece in self._pieces:
            while run is not None:
                first, last = max(piece.start, run[0], start), min(piece.stop, run[1], stop)
                if first < last:
                    yield Piece(first, last, piece.group)
                if run[1] > piece.stop:
                    break
                run = next(runs, None)
