"""Schedules: factors on the learning rate, as functions of the number of finished updates.

A schedule holds no counter, so ranks or accumulation cannot make it run faster: it is asked once for each
update, with that update's index. What one learns from results, as ``ReduceOnPlateau`` does, is state that
checkpoints hold. Read next: ``compositions`` for schedules made of others, ``plateau``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any


class Schedule:
    """Give the factor on ``optimizer.lr`` for one update.

    **Local.** Subclass it, or pass any function of the update's index to the trainer.
    """

    def __call__(self, update: int) -> float:
        """Return the factor for the update with this index, counted from 0 over the whole run."""
        raise NotImplementedError

    def observe(self, row: Mapping[str, Any]) -> None:
        """Look at results; the trainer shows each row of its history, the same on every rank. **Local.**"""

    def looks_at(self) -> Sequence[str]:
        """Return the names that :meth:`observe` looks up; ``fit`` refuses one that no row will have. **Local.**"""
        return ()

    def state(self) -> Any:
        """Return what was learnt from results, in a form that JSON can hold; None where nothing is. **Local.**"""
        return None

    def load_state(self, state: Any) -> None:
        """Take up what :meth:`state` returned; None starts anew.

        **Local.**

        Raises:
            ValueError: it is that of another schedule; nothing has changed then.
        """
        if state is not None:
            raise ValueError(
                f"schedule: expected no state for {type(self).__name__}, got {state}; start anew"
            )

    def describe(self) -> dict[str, Any]:
        """Return class and arguments in a form that JSON can hold; ranks compare it."""
        return {"class": type(self).__name__, **vars(self)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in vars(self).items())})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))


class Constant(Schedule):
    """Keep the learning rate: factor 1. **Local.**"""

    def __call__(self, update: int) -> float:
        return 1.0


def constant() -> Constant:
    """Return the schedule that keeps the learning rate.

    **Local.**

    Example:
        >>> constant()(1000)
        1.0
    """
    return Constant()


class StepLR(Schedule):
    """Multiply the learning rate by ``gamma`` after every ``step_size`` updates.

    **Local.** The factor of update t is gamma^(t // step_size).

    Args:
        step_size: updates between two changes, 1 or more.
        gamma: factor of one change.

    Example:
        >>> [StepLR(2, gamma=0.5)(t) for t in range(5)]
        [1.0, 1.0, 0.5, 0.5, 0.25]

    PyTorch's ``StepLR`` with ``scheduler.step()`` called once an update.
    """

    def __init__(self, step_size: int, gamma: float = 0.1) -> None:
        self.step_size = count_of("step_size", step_size, 1)
        self.gamma = float(gamma)

    def __call__(self, update: int) -> float:
        return float(self.gamma ** (update // self.step_size))


class _Warmup(Schedule):
    def __init__(self, warmup: int, total: int, final: float = 0.0) -> None:
        self.warmup = count_of("warmup", warmup, 0)
        self.total = count_of("total", total, 1)
        self.final = float(final)
        if self.warmup > self.total:
            raise ValueError(
                f"warmup: expected at most total = {total} updates, got {warmup}; shorten the warm-up"
            )

    def __call__(self, update: int) -> float:
        if update < self.warmup:
            return (update + 1) / self.warmup
        progress = min(1.0, (update - self.warmup) / max(1, self.total - self.warmup))
        return self.final + (1.0 - self.final) * self._remaining(progress)

    def _remaining(self, progress: float) -> float:
        raise NotImplementedError


class WarmupCosine(_Warmup):
    """Rise linearly over ``warmup`` updates, then fall along half a cosine to ``final``.

    **Local.** With w = warmup and s = min(1, (t - w) / (total - w)), the factor of update t is
    (t + 1) / w before w, and final + (1 - final) (1 + cos(pi s)) / 2 from w on. The first update
    takes a step (1 / w, not 0); from update ``total`` on the factor is ``final``.

    Args:
        warmup: updates of the rise, 0 for none.
        total: updates of the whole run.
        final: factor at the end.

    Example:
        >>> [round(WarmupCosine(2, 6)(t), 3) for t in range(7)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]

    Source: Loshchilov, Hutter, "SGDR: stochastic gradient descent with warm restarts" (ICLR 2017),
    equation 5, without restarts.
    """

    def _remaining(self, progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * progress))


class WarmupLinear(_Warmup):
    """Rise linearly over ``warmup`` updates, then fall linearly to ``final``.

    **Local.** With w = warmup and s = min(1, (t - w) / (total - w)), the factor of update t is
    (t + 1) / w before w, and final + (1 - final) (1 - s) from w on.

    Args:
        warmup: updates of the rise, 0 for none.
        total: updates of the whole run.
        final: factor at the end.

    Example:
        >>> [WarmupLinear(2, 6)(t) for t in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    def _remaining(self, progress: float) -> float:
        return 1.0 - progress


def count_of(name: str, value: Any, least: int) -> int:
    """Return a number of updates as an int. **Local.**"""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name}: expected a whole number of updates, got {value!r}; schedules count updates"
        ) from None
    if count < least:
        raise ValueError(f"{name}: expected {least} or more updates, got {count}; pass a larger number")
    return count
