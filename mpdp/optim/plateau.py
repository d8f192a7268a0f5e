"""ReduceOnPlateau: a schedule that learns from results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import on_all_ranks
from .groups import non_negative
from .schedules import Schedule


class ReduceOnPlateau(Schedule):
    """Lower the learning rate when a metric has stopped getting better.

    **Local.** The trainer shows it each row of its history: global metrics, which are the same on every rank, so all
    of them decide alike. A value is better than the best so far if it is so by ``threshold`` (of the best, or as it
    is without ``relative``); one that is not finite is never better. When more than ``patience`` rows in a row were
    not better, the factor is multiplied by ``factor``; for the next ``cooldown`` rows none counts as bad. What it has
    learnt is in checkpoints. One object belongs to one trainer. In a loop of your own call :meth:`observe` on every
    rank, with what ``evaluate`` returned.

    Args:
        metric: a name in the rows of the history.
        factor: of one reduction, in (0, 1).
        patience: rows without a better value that are borne.
        threshold: how much better a value has to be, 0 or more.
        relative: ``threshold`` is a fraction of the best value.
        cooldown: rows after a reduction in which none counts as bad.
        smallest: the factor never falls below it.
        mode: ``"min"`` or ``"max"``; known for losses and perplexity.

    Attributes:
        best: the best value so far; None before the first.
        current: the factor on the learning rate.

    Example:
        >>> schedule = ReduceOnPlateau(factor=0.5, patience=1)
        >>> for loss in (1.0, 0.9, 0.9, 0.9, 0.8):
        ...     schedule.observe({"validation_loss": loss})
        >>> schedule(0)
        0.5

    PyTorch's ``ReduceLROnPlateau``, whose ``min_lr`` is ``smallest`` times the learning rate here.
    """

    def __init__(
        self,
        metric: str = "validation_loss",
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        relative: bool = True,
        cooldown: int = 0,
        smallest: float = 0.0,
        mode: str | None = None,
    ) -> None:
        if mode is None and (metric.endswith("loss") or metric == "perplexity"):
            mode = "min"
        if mode not in ("min", "max"):
            raise ValueError(
                f'mode: expected "min" or "max" beside metric {metric!r}, got {mode!r}; say which is better'
            )
        if not 0.0 < factor < 1.0:
            raise ValueError(f"factor: expected a number between 0 and 1, got {factor!r}; 0.1 is usual")
        self.metric, self.mode, self.factor, self.relative = metric, mode, float(factor), bool(relative)
        for name, rows in (("patience", patience), ("cooldown", cooldown)):
            if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
                raise ValueError(f"{name}: expected an integer of 0 or more, got {rows!r}; it counts epochs")
        self.patience, self.cooldown = patience, cooldown
        self.threshold, self.smallest = (
            non_negative("threshold", threshold),
            non_negative("smallest", smallest),
        )
        self.best: float | None = None
        self.current = 1.0
        self._bad = self._cooling = 0

    def __call__(self, update: int) -> float:
        return self.current

    def observe(self, row: Mapping[str, Any]) -> None:
        """Look at the next results.

        Args:
            row: name to value, with the metric's.

        Raises:
            KeyError: the metric is not in it.
        """
        if self.metric not in row:
            known = ", ".join(key for key in row if key not in ("epoch", "step"))
            raise on_all_ranks(
                KeyError(
                    f"metric: expected one of {known} in the results, got {self.metric!r}; "
                    "pass it to fit in metrics=, or validation="
                )
            )
        value = float(row[self.metric])
        if self._is_better(value):
            self.best, self._bad = value, 0
        else:
            self._bad += 1
        if self._cooling:
            self._cooling -= 1
            self._bad = 0
        if self._bad > self.patience:
            self.current = max(self.current * self.factor, min(self.smallest, self.current))
            self._cooling, self._bad = self.cooldown, 0

    def looks_at(self) -> Sequence[str]:
        return (self.metric,)

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):  # nothing would be better than an infinite best one by a fraction of it
            return False
        if self.best is None:
            return True
        sign = 1.0 if self.mode == "min" else -1.0
        return sign * value < sign * self.best - self.threshold * (self.best if self.relative else 1.0)

    def describe(self) -> dict[str, Any]:
        """Return class and arguments in a form that JSON can hold; ranks compare it."""
        names = ("metric", "factor", "patience", "threshold", "relative", "cooldown", "smallest", "mode")
        return {"class": type(self).__name__} | {name: getattr(self, name) for name in names}

    def state(self) -> Any:
        return {"best": self.best, "current": self.current, "bad": self._bad, "cooling": self._cooling}

    def load_state(self, state: Any) -> None:
        state = {"best": None, "current": 1.0, "bad": 0, "cooling": 0} if state is None else state
        if not (isinstance(state, dict) and state.keys() == self.state().keys()):
            raise ValueError(
                f"schedule: expected the state of a {type(self).__name__}, got {state}; start anew"
            )
        self.best, self.current = state["best"], float(state["current"])
        self._bad, self._cooling = int(state["bad"]), int(state["cooling"])
