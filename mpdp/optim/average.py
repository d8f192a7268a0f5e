"""WeightAverage: a moving average of the weights beside them, for evaluation.

It sees weights as a flat array over a layout, range by range, and knows neither ranks nor who owns which range. Read
next: ``parallel/replica.py``, which holds it, and ``kernels/rules.py`` for the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..kernels.updates import UpdateKernels

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
        array: the average over the whole layout, frozen parameters included, in the weights' dtype; where
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
        self.started = self.swapped = False
        self._weights: Any = None
        self._kernels: Any = None
        self._scratch: Any = None

    def bind(self, weights: Any, kernels: UpdateKernels) -> None:
        """Attach it to flat weights, from which it will :meth:`start`."""
        self._weights, self._kernels = weights, kernels
        self.array = kernels.flat_zeros(weights.size, weights.dtype)
        self._scratch = kernels.update_scratch(weights.dtype)
        self.started = self.swapped = False

    def start(self) -> None:
        """Begin from the weights as they are, unless it has begun; call it before an update."""
        if not self.started:
            self.array[...] = self._weights
            self.started = True

    def load(self, values: Mapping[str, Any], views: Mapping[str, Any]) -> None:
        """Take up values by parameter, and the weights themselves where there are none.

        Args:
            values: name to array on the device.
            views: name to the parameter's view of :attr:`array`.
        """
        self.array[...] = self._weights
        for name, view in views.items():
            if name in values:
                view[...] = values[name]
        self.started = True

    def update(self, start: int = 0, stop: int | None = None, when: Any = None) -> None:
        """Move a range towards the weights, once an update; in any cut and order, with the same bits.

        Args:
            start, stop: elements; the whole layout unless given.
            when: 0-d int64 array on the device, read when the kernel runs: 0 leaves it as it is. None for always.
        """
        assert self.started and not self.swapped
        stop = self.array.size if stop is None else stop
        self._kernels.average(
            self.array[start:stop],
            self._weights[start:stop],
            decay=self.decay,
            scratch=self._scratch,
            when=when,
        )

    def swap(self) -> None:
        """Exchange the weights and the average in place; doing so twice gives back the same bits."""
        if not self.started:
            self.start()
        for first in range(0, self.array.size, _SWAPPED):
            part = slice(first, min(first + _SWAPPED, self.array.size))
            held = self.array[part].copy()
            self.array[part] = self._weights[part]
            self._weights[part] = held
        self.swapped = not self.swapped

    @property
    def scratch_bytes(self) -> int:
        """Working memory of the update."""
        return int(getattr(self._scratch, "nbytes", 0))
