"""Whereabouts: what the other ranks were doing when one of them failed, gathered by the rank that reports it.

Owns no socket: :mod:`.liveness` carries the answers. A failure is no time for a collective, so this is what came in
before the job ended, and says of whom nothing came.
"""

from __future__ import annotations

from collections.abc import Iterable

REACH = 32  # ranks on either side that are asked: a job of thousands has no use for a list of all


class Whereabouts:
    """Collect what ranks say of themselves.

    Args:
        rank: the one that gathers.
        size: ranks in the world.

    Example:
        >>> others = Whereabouts(1, 4)
        >>> others.note(0, "in step 3 (all_reduce)")
        >>> others.note(2, "in step 3 (all_reduce)")
        >>> str(others)
        'ranks 0, 2 in step 3 (all_reduce); no word of rank 3'
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._texts: dict[int, str] = {}
        self.asked = [other for other in range(size) if other != rank and self.near(other, rank)]

    def near(self, a: int, b: int) -> bool:
        """Return whether two ranks are near enough in the ring for one to answer the other. **Local.**"""
        return min((a - b) % self._size, (b - a) % self._size) <= REACH

    def note(self, rank: int, text: str) -> None:
        """Note what a rank says. **Local.** Any thread."""
        self._texts[rank] = text

    def __str__(self) -> str:
        texts = dict(self._texts)  # another thread may still add to it
        groups: dict[str, list[int]] = {}
        for rank in self.asked:
            groups.setdefault(texts.get(rank, ""), []).append(rank)
        silent = groups.pop("", [])
        parts = [f"{_ranks(ranks)} {text}" for text, ranks in groups.items()]
        return "; ".join([*parts, f"no word of {_ranks(silent)}"] if silent else parts)


def _ranks(ranks: Iterable[int]) -> str:
    """Name ranks, runs of them by their ends.

    Example:
        >>> _ranks([3]), _ranks([0, 1]), _ranks([0, 2, 3, 4, 6])
        ('rank 3', 'ranks 0, 1', 'ranks 0, 2-4, 6')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if sum(map(len, runs)) == 1 else "ranks ") + ", ".join(words)
