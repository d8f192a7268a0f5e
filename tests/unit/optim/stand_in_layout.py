"""A layout for these tests: what optimizers need of the real one in ``parallel/layout.py``."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    trainable: bool


class Layout:
    BLOCK = 256
    SPAN = 4096

    def __init__(self, shapes, frozen=()):
        """``shapes``: name -> shape in layout order; the frozen ones follow in a zone of their own."""
        entries, position = [], 0
        for trainable in (True, False):
            for name, shape in shapes.items():
                if (name not in frozen) is trainable:
                    stop = position + math.prod(shape)
                    entries.append(Entry(name, tuple(shape), position, stop, trainable))
                    position = -(-stop // self.BLOCK) * self.BLOCK
            position = -(-position // self.SPAN) * self.SPAN
            if trainable:
                self.trainable_size = position
        self.size = position
        self.entries = tuple(entries)
        self.trainable = tuple(entry for entry in entries if entry.trainable)

    def view(self, flat, name):
        entry = next(entry for entry in self.entries if entry.name == name)
        return flat[entry.start : entry.stop].reshape(entry.shape)

    def filled(self, rng, dtype, trainable_only=False):
        """Random numbers in every entry, zeros in the padding."""
        flat = np.zeros(self.trainable_size if trainable_only else self.size, dtype)
        for entry in self.trainable if trainable_only else self.entries:
            flat[entry.start : entry.stop] = rng.standard_normal(entry.stop - entry.start)
        return flat

    def padding(self, length):
        """Mask of the elements below ``length`` that belong to no entry."""
        mask = np.ones(length, bool)
        for entry in self.entries:
            mask[entry.start : entry.stop] = False
        return mask
