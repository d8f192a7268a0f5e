"""The chunk table: how the gradient buffer is cut for reduction.

It comes from sizes alone, so all ranks make the same one. The first chunk is small, so that communication
starts early, and the last is small, since nothing is left to hide it behind. A parameter may straddle a cut.
"""

from __future__ import annotations

from itertools import pairwise

from .layout import SPAN

CHUNK_BYTES = 4 << 20
_EDGE = 4  # the first and the last chunk are this many times smaller than the others


def chunk_table(elements: int, itemsize: int, chunk_bytes: int | None = None) -> tuple[tuple[int, int], ...]:
    """Cut ``elements`` into (start, stop) ranges on multiples of 4096 elements.

    **Local.**

    Args:
        elements: length of the trainable zone, a multiple of 4096.
        itemsize: bytes an element.
        chunk_bytes: size of a middle chunk in bytes (default 4 MiB), at least one span of 4096 elements.

    Example:
        >>> chunk_table(5 * 4096, 4, 2 * 4096 * 4)
        ((0, 4096), (4096, 12288), (12288, 16384), (16384, 20480))
    """
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES
    if not isinstance(chunk_bytes, int) or chunk_bytes < 1:
        raise ValueError(
            f"chunk_bytes: expected a positive number of bytes, got {chunk_bytes!r}; leave it out for 4 MiB"
        )
    spans = elements // SPAN
    middle = max(1, chunk_bytes // (SPAN * itemsize))
    edge = max(1, middle // _EDGE)
    cuts = [0]
    if spans > middle:
        cuts.append(edge)
        while spans - edge - cuts[-1] > middle:
            cuts.append(cuts[-1] + middle)
        if spans - edge > cuts[-1]:
            cuts.append(spans - edge)
    if spans:
        cuts.append(spans)
    return tuple((a * SPAN, b * SPAN) for a, b in pairwise(cuts))
