"""Turns: several sides run block by block, one after another, so that what else the machine does hits them alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

TURN_WARM_UP = 10  # steps at most before each block, for clocks and caches
_WARM_UP_SHARE = 0.3  # of a block's seconds, if ten steps would take longer

Block = Callable[[int, int], float]


def steps_of(seconds: float, once: float) -> tuple[int, int]:
    """Return the steps of a block's warm-up, and of the block. **Local.**

    Args:
        seconds: of a block.
        once: seconds of one step.

    Example:
        >>> steps_of(2.0, 0.001), steps_of(0.3, 0.04), steps_of(0.3, 5.0)
        ((10, 2000), (2, 7), (1, 1))
    """
    warm_up = min(TURN_WARM_UP, int(_WARM_UP_SHARE * seconds / once))
    return max(1, warm_up), max(1, int(seconds / once))


def alternate(blocks: Sequence[Block], turns: int, steps: Sequence[tuple[int, int]]) -> list[list[float]]:
    """Run one block of each side in each turn; return each side's seconds a step, by turn. **Collective.**

    Example:
        >>> alternate([lambda w, n: 1.0 * n, lambda w, n: 2.0 * n], 2, [(0, 1), (0, 3)])
        [[1.0, 1.0], [6.0, 6.0]]
    """
    seconds: list[list[float]] = [[] for _ in blocks]
    for _ in range(turns):
        for side, (block, (warm_up, count)) in enumerate(zip(blocks, steps, strict=True)):
            seconds[side].append(block(warm_up, count))
    return seconds


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Return the median of their time over ours, of blocks of the same turn: above 1 where we are faster. **Local.**

    Example:
        >>> ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])
        2.0
    """
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile, both of them values; NaN of none. **Local.**

    Example:
        >>> quartiles([5.0, 1.0, 2.0, 3.0, 4.0])
        (2.0, 4.0)
    """
    if not values:
        return math.nan, math.nan
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[round(last / 4)], ordered[last - round(last / 4)]
