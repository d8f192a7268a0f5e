"""Compositions: schedules made of others, one after another or multiplied.

A part may be any function of the update's index. What a part learns from results goes through: observations and state
are handed on in order. Read next: ``schedules``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from .schedules import Schedule, count_of

Part = Callable[[int], float]


class _Composed(Schedule):
    """A schedule with parts."""

    def __init__(self, name: str, parts: Sequence[Part]) -> None:
        for part in parts:
            if not callable(part):
                raise TypeError(
                    f"{name}: expected schedules or functions of the update's index, got {part!r}; as in "
                    "optim.StepLR(100)"
                )
        self.parts = tuple(parts)

    def observe(self, row: Mapping[str, Any]) -> None:
        for part in self._known():
            part.observe(row)

    def looks_at(self) -> Sequence[str]:
        return [name for part in self._known() for name in part.looks_at()]

    def state(self) -> Any:
        states = [part.state() for part in self._known()]
        return states if any(state is not None for state in states) else None

    def load_state(self, state: Any) -> None:
        known = self._known()
        if state is not None and not (isinstance(state, list) and len(state) == len(known)):
            raise ValueError(
                f"schedule: expected states of {len(known)} parts for {type(self).__name__}, got {state}; start anew"
            )
        before = [part.state() for part in known]
        try:
            for part, own in zip(known, [None] * len(known) if state is None else state):
                part.load_state(own)
        except ValueError:
            for part, own in zip(known, before):
                part.load_state(own)
            raise

    def describe(self) -> dict[str, Any]:
        """Return class, arguments and parts in a form that JSON can hold; ranks compare it."""
        arguments = {name: value for name, value in vars(self).items() if name != "parts"}
        return {"class": type(self).__name__, **arguments, "parts": [_described(part) for part in self.parts]}

    def _known(self) -> list[Schedule]:
        return [part for part in self.parts if isinstance(part, Schedule)]


class Sequential(_Composed):
    """Follow one schedule after another.

    **Local.** With boundaries b_1 < b_2 < ..., update t has the factor of part i at t - b_i, where b_i is the last
    boundary that is not above t (b_0 = 0): each part counts from its own beginning.

    Args:
        schedules: the parts, or functions of the update's index.
        boundaries: the update at which each part but the first begins.

    Example:
        >>> from mpdp.optim import StepLR, constant
        >>> schedule = Sequential([constant(), StepLR(2, gamma=0.5)], boundaries=[3])
        >>> [schedule(t) for t in range(8)]
        [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25]

    PyTorch's ``SequentialLR`` and optax's ``join_schedules``.
    """

    def __init__(self, schedules: Sequence[Part], boundaries: Sequence[int]) -> None:
        super().__init__("schedules", schedules)
        self.boundaries = tuple(count_of("boundaries", boundary, 1) for boundary in boundaries)
        if len(self.boundaries) != len(self.parts) - 1 or any(a >= b for a, b in pairwise(self.boundaries)):
            raise ValueError(
                f"boundaries: expected {max(len(self.parts) - 1, 0)} growing numbers for {len(self.parts)} schedules, "
                f"got {list(boundaries)}; give the update at which each but the first begins"
            )

    def __call__(self, update: int) -> float:
        part = bisect_right(self.boundaries, update)
        start = self.boundaries[part - 1] if part else 0
        return float(self.parts[part](update - start))


class Warmup(_Composed):
    """Rise linearly over some updates, then follow any schedule.

    **Local.** With w = updates, update t has the factor (t + 1) / w times the schedule's first one before w, and the
    schedule's at t - w from w on.

    Args:
        updates: of the rise, 0 for none.
        then: the schedule, or a function of the update's index.

    Example:
        >>> from mpdp.optim import StepLR
        >>> [Warmup(4, StepLR(2, gamma=0.5))(t) for t in range(8)]
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.5, 0.5]

    Source: Goyal et al., "Accurate, large minibatch SGD: training ImageNet in 1 hour" (2017), section 2.2.
    """

    def __init__(self, updates: int, then: Part) -> None:
        super().__init__("then", [then])
        self.updates = count_of("updates", updates, 0)

    def __call__(self, update: int) -> float:
        (then,) = self.parts
        if update < self.updates:
            return (update + 1) / self.updates * float(then(0))
        return float(then(update - self.updates))


class Product(_Composed):
    """Multiply schedules.

    **Local.**

    Args:
        schedules: the factors, or functions of the update's index.

    Example:
        >>> from mpdp.optim import StepLR, WarmupLinear
        >>> [Product(WarmupLinear(2, 6), StepLR(4, gamma=0.5))(t) for t in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.25, 0.125]

    PyTorch's ``ChainedScheduler``.
    """

    def __init__(self, *schedules: Part) -> None:
        super().__init__("schedules", schedules)

    def __call__(self, update: int) -> float:
        return math.prod(float(part(update)) for part in self.parts)


def _described(part: Part) -> Any:
    """Return a part in a form that JSON can hold; a function goes by its name."""
    if isinstance(part, Schedule):
        return part.describe()
    name = getattr(part, "__qualname__", type(part).__qualname__)
    return f"{getattr(part, '__module__', '')}.{name}"
