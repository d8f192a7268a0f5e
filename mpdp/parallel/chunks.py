"""The chunk table: how the gradient buffer is cut for reduction.

It comes from sizes alone, so all ranks make the same one. The first chunk is small, so that communication
starts early, and the last is small, since nothing is left to hide it behind. A parameter may straddle a cut. How
large a middle chunk is and how small the ends are, the transport says (``Communicator.chunk_bytes``, ``chunk_edge``).
"""

from __future__ import annotations

from itertools import pairwise

from .layout import SPAN


def chunk_table(elements: int, itemsize: int, chunk_bytes: int, edge: int = 4) -> tuple[tuple[int, int], ...]:
    """Cut ``elements`` into (start, stop) ranges on multiples of 4096 elements.

    **Local.**

    Args:
        elements: length of the trainable zone, a multiple of 4096.
        itemsize: bytes an element.
        chunk_bytes: size of a middle chunk in bytes; a chunk is at least one span of 4096 elements.
        edge: how many times smaller the first and the last chunk are.

    Example:
        >>> chunk_table(5 * 4096, 4, 2 * 4096 * 4)
        ((0, 4096), (4096, 12288), (12288, 16384), (16384, 20480))
    """
    if not isinstance(chunk_bytes, int) or chunk_bytes < 1:
        raise ValueError(
            f"chunk_bytes: expected a positive number of bytes, got {chunk_bytes!r}; leave it out"
        )
    spans = elements // SPAN
    middle = max(1, chunk_bytes // (SPAN * itemsize))
    ends = max(1, middle // edge)
    cuts = [0]
    if spans > middle:
        cuts.append(ends)
        while spans - ends - cuts[-1] > middle:
            cuts.append(cuts[-1] + middle)
        if spans - ends > cuts[-1]:
            cuts.append(spans - ends)
    if spans:
        cuts.append(spans)
    return tuple((a * SPAN, b * SPAN) for a, b in pairwise(cuts))
