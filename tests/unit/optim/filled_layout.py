"""The layout of these tests: the real one, built in index order, with random and padding arrays over it."""

from __future__ import annotations

import numpy as np

from mpdp.parallel import layout


class Layout(layout.Layout):
    def __init__(self, shapes, frozen=()):
        """``shapes``: name -> shape in index order, which is the reverse of registration."""
        super().__init__(dict(reversed(shapes.items())), frozen)

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
