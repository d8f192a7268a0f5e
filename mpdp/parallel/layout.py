"""Layout: the one index space that weights, gradients and moments share.

Parameters lie in reverse order of registration, since backward finishes the last layers first; frozen ones follow in a
zone that is not reduced. Every range starts on a block of 256 elements, so a byte a block can name its
group; the trainable zone is padded to a span of 4096 elements, the unit of norms, chunk cuts and owners' slices.
This module knows names and numbers, no arrays' contents and no ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

BLOCK = 256
SPAN = 4096


@dataclass(frozen=True)
class Entry:
    """One parameter's place: elements ``start`` to ``stop`` of the index space."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    trainable: bool


class Layout:
    """Map parameter names to ranges of elements.

    **Local.** Equal on all ranks when built from equal arguments; ``digest`` is what they compare.

    Args:
        shapes: name to shape, in registration order.
        frozen: names that are not trained.
        generation: number of this layout in the run; freezing and thawing make a new one.

    Attributes:
        entries: all ranges, in index order: trainable ones first.
        trainable: the trainable entries.
        trainable_size: elements of the trainable zone, a multiple of 4096.
        size: elements in all.
        digest: 63-bit hash of names, shapes and ranges, and of the number that :meth:`count` has given.

    Example:
        >>> layout = Layout({"weight": (10, 30), "bias": (10,)})
        >>> [(e.name, e.start, e.stop) for e in layout.entries]
        [('bias', 0, 10), ('weight', 256, 556)]
        >>> layout.trainable_size
        4096
    """

    BLOCK = BLOCK
    SPAN = SPAN

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], frozen: Collection[str] = (), generation: int = 0
    ) -> None:
        unknown = [name for name in frozen if name not in shapes]
        if unknown:
            raise ValueError(
                f"frozen: expected names of parameters, got {unknown[0]!r}; take those of shapes"
            )
        self.generation = generation
        entries: list[Entry] = []
        offset = 0
        for trainable in (True, False):
            for name in reversed(list(shapes)):
                if (name in frozen) == trainable:
                    continue
                shape = tuple(int(length) for length in shapes[name])
                stop = offset + math.prod(shape)
                entries.append(Entry(name, shape, offset, stop, trainable))
                offset = -(-stop // BLOCK) * BLOCK
            offset = -(-offset // SPAN) * SPAN
            if trainable:
                self.trainable_size = offset
        self.size = offset
        self.entries = tuple(entries)
        self.trainable = tuple(entry for entry in entries if entry.trainable)
        self._by_name = {entry.name: entry for entry in entries}
        self._text = json.dumps([BLOCK, SPAN, [[e.name, e.shape, e.start, e.trainable] for e in entries]])
        self.digest = self._hash(0)

    def _hash(self, number: int) -> int:
        text = f"{number} {self._text}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    def count(self, layouts: dict[int, int]) -> None:
        """Tell this layout from others of equal models: take the next number, and note it by the digest. **Local.**

        Args:
            layouts: of a communicator, equal on all ranks.

        Example:
            >>> numbers = {}
            >>> one, other = Layout({"weight": (10,)}), Layout({"weight": (10,)})
            >>> one.count(numbers), other.count(numbers)
            (None, None)
            >>> numbers == {one.digest: 1, other.digest: 2}
            True
        """
        number = len(layouts) + 1
        self.digest = self._hash(number)
        layouts[self.digest] = number

    def __getitem__(self, name: str) -> Entry:
        try:
            return self._by_name[name]
        except KeyError:
            raise KeyError(
                f"name: expected one of {len(self.entries)} parameters "
                f"such as {next(iter(self._by_name), '(none)')!r}, "
                f"got {name!r}; take a full name"
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def view(self, flat: Any, name: str) -> Any:
        """Return the parameter's part of a flat array over this index space, in its shape. **Local.**"""
        entry = self[name]
        return flat[entry.start : entry.stop].reshape(entry.shape)
