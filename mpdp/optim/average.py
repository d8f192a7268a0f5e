"""WeightAverage: a moving average of the weights beside them, for evaluation.

It sees weights as a flat array over a layout, or some ranges of one, and knows neither ranks nor who owns which range.
Read next: ``parallel/averaging.py``, which keeps it, and ``kernels/rules.py`` for the arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..kernels.updates import UpdateKernels
from .held import HeldArray

_SWAPPED = 1 << 22  # elements exchanged at once: 16 MiB of float32 beside the arrays


class WeightAverage:
    """Keep an exponential moving average of weights.

    **Local.** With p_0 the weights before the first update, and d = decay::

        e_0 = p_0
        e_t = d e_(t-1) + (1 - d) p_t           after each update that was applied

    An update that is skipped leaves the average as it is. d = 0.999 averages over about 1000 updates.

    Args:
        decay: in (0, 1).

    Attributes:
        decay: as given.
        array: the average of all weights that it was bound to, frozen parameters included, in their dtype; where
            :attr:`swapped`, the weights.
        started: whether it holds an average yet; before, that is the weights.
        swapped: the weights' memory holds the average now.

    Source: Polyak, Juditsky, "Acceleration of stochastic approximation by averaging" (1992), with the exponential
    weights that are usual in deep learning. It starts from the initial weights, without a correction for that.
    """

    def __init__(self, decay: float) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float, np.floating, np.integer)):
            raise TypeError(f"ema: expected a number between 0 and 1, got {decay!r}; 0.999 is usual")
        if not 0.0 < decay < 1.0:
            raise ValueError(f"ema: expected a number between 0 and 1, got {decay}; 0.999 is usual")
        self.decay = float(decay)
        self.array: Any = None
        self.started = self.swapped = self._early = False
        self._weights: list[Any] = []
        self._parts: list[Any] = []
        self._kernels: Any = None
        self._scratch: Any = None

    def bind(self, weights: Any, kernels: UpdateKernels) -> None:
        """Attach it to weights, from which it will :meth:`start`: a flat array, or a HeldArray of some ranges."""
        self._kernels, self._scratch = kernels, kernels.update_scratch(weights.dtype)
        self._weights = weights.parts() if isinstance(weights, HeldArray) else [weights]
        self.array = kernels.flat_zeros(sum(part.size for part in self._weights), weights.dtype)
        self._parts = [self.array]
        if isinstance(weights, HeldArray):
            self.array = HeldArray(weights.ranges, self.array)
            self._parts = self.array.parts()
        self.started = self.swapped = False

    def start(self) -> None:
        """Begin from the weights as they are, unless it has begun; call it before an update."""
        if not self.started:
            for mine, weights in zip(self._parts, self._weights):
                mine[...] = weights
            self.started = True

    def update(self, when: Any = None) -> None:
        """Move towards the weights, once an update.

        Args:
            when: 0-d int64 array on the device, read when the kernel runs: 0 leaves it as it is. None for always.
        """
        assert self.started and not self.swapped
        for mine, weights in zip(self._parts, self._weights):
            self._kernels.average(mine, weights, decay=self.decay, scratch=self._scratch, when=when)

    def swap(self) -> None:
        """Exchange the weights and the average in place; doing so twice gives back the same bits."""
        if not self.swapped:
            self._early = not self.started  # the average of no update is the weights
        self.start()
        for mine, weights in zip(self._parts, self._weights):
            for first in range(0, mine.size, _SWAPPED):
                part = slice(first, min(first + _SWAPPED, mine.size))
                kept = mine[part].copy()
                mine[part] = weights[part]
                weights[part] = kept
        self.swapped = not self.swapped
        self.started = self.swapped or not self._early

    @property
    def scratch_bytes(self) -> int:
        """Working memory of the update."""
        return int(getattr(self._scratch, "nbytes", 0))
