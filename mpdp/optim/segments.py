"""Segments: the fixed pieces of the index space over which a rule's norms of parameters are summed.

A piece is a span of the layout, cut where a parameter begins. Ranks own whole spans, so each piece is summed by one of
them, from the same elements in the same order whoever that is. It knows the layout and no ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Segments:
    """Cut the trainable zone into pieces, each inside one span and one parameter.

    **Local.**

    Args:
        layout: the layout, with its ``trainable`` entries.
        wanted: for each trainable parameter, whether its pieces count; none of them do for the others.

    Attributes:
        count: pieces.
        edges: int64 array (count + 1,), where they begin, and where the last one ends: multiples of the block.
        spans: int64 array (parameters, 2): the first piece of a parameter, and the one behind its last; equal where
            it has none that count.

    Example:
        >>> from mpdp.parallel.layout import Layout
        >>> segments = Segments(Layout({"weight": (5000,), "bias": (10,)}), [True, True])
        >>> segments.edges.tolist(), segments.spans.tolist()
        ([0, 256, 4096, 8192], [[0, 1], [1, 3]])
    """

    def __init__(self, layout: Any, wanted: Sequence[bool]) -> None:
        size: int = layout.trainable_size
        starts = [entry.start for entry in layout.trainable]
        bounds = (
            [0, *starts[1:], size] if starts else [0]
        )  # as in Plan: padding belongs to the parameter before it
        self.edges = np.array(sorted({*range(0, size + 1, layout.SPAN), *bounds}), dtype=np.int64)
        self.count = len(self.edges) - 1
        firsts = np.searchsorted(self.edges, bounds)
        self.spans = np.stack([firsts[:-1], firsts[1:]], axis=1).astype(np.int64)
        self.spans[~np.asarray(wanted, dtype=bool)] = 0

    def rows(self, start: int, stop: int) -> slice:
        """Return the pieces of a range whose ends are edges."""
        first, last = np.searchsorted(self.edges, (start, stop)).tolist()
        assert self.edges[first] == start and self.edges[last] == stop, "sums are of whole pieces"
        return slice(first, last)
