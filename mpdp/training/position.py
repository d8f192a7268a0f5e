"""Position: where a run stands between two updates, and what its current epoch has summed up so far."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Position:
    """The part of a run's state that is neither weights nor moments. **Local.**

    Attributes:
        epoch: finished epochs.
        batch: finished updates of the epoch under way; equal to all of them until the epoch is closed.
        loss_sum, count: of that epoch so far, over all ranks.
        metrics: (sum, count) of each training metric of that epoch so far, over all ranks.
        history: one row a finished epoch.
        order: what decided the order of samples (see ``FitPlan.order``).
        saved_step: step of the newest checkpoint, or None where an epoch was closed behind it.
        log_rows: rows of the log when the position was saved.
    """

    epoch: int = 0
    batch: int = 0
    loss_sum: float = 0.0
    count: float = 0.0
    metrics: list[list[float]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    order: dict[str, Any] = field(default_factory=dict)
    saved_step: int | None = None
    log_rows: int = 0

    @classmethod
    def of(cls, state: dict[str, Any]) -> Position:
        """Return the position that :meth:`state` has described.

        Raises:
            TypeError, ValueError: something else.
        """
        found = cls(**state)
        for name in ("epoch", "batch", "log_rows"):
            value = getattr(found, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}: expected an integer of 0 or more, got {value!r}")
        if not isinstance(found.order, dict) or not all(isinstance(row, dict) for row in found.history):
            raise TypeError("order, history: expected dicts")
        found.loss_sum, found.count = float(found.loss_sum), float(found.count)
        found.metrics = [[float(total), float(count)] for total, count in found.metrics]
        return found

    def begin(self, order: dict[str, Any], metrics: int) -> ValueError | None:
        """Take over the order of samples of a call of ``fit``; return the error if it may not change now."""
        if self.batch and self.order != order:
            name = next(key for key in order | self.order if self.order.get(key) != order.get(key))
            return ValueError(
                f"{name}: expected {self.order.get(name)!r} as before in this epoch, got {order.get(name)!r}; "
                "it may change between epochs only"
            )
        self.order = order
        if len(self.metrics) != metrics:
            self.metrics = [[0.0, 0.0] for _ in range(metrics)]
        return None

    def add_loss(self, loss_sum: float, count: float) -> None:
        """Add what one update has summed up, which may be known some updates later."""
        self.loss_sum += loss_sum
        self.count += count

    def add_update(self, metrics: list[list[float]]) -> None:
        """Count one update."""
        self.batch += 1
        for mine, more in zip(self.metrics, metrics):
            mine[0] += more[0]
            mine[1] += more[1]

    def is_best(self, metric: str, mode: str) -> bool:
        """Return whether the last epoch has a better value of a metric than all before it."""
        sign = 1.0 if mode == "min" else -1.0
        values = [sign * float(row[metric]) for row in self.history if metric in row]
        return (
            bool(values)
            and all(values[-1] < value for value in values[:-1] if not math.isnan(value))
            and (math.isfinite(values[-1]))
        )

    def mean_loss(self) -> float:
        """Return the mean loss of the epoch under way; NaN where nothing was counted."""
        return self.loss_sum / self.count if self.count else float("nan")

    def close_epoch(self, row: dict[str, Any]) -> None:
        """End the epoch under way with its row. A checkpoint of its last update does not hold that yet."""
        self.history.append(row)
        self.saved_step = None
        self.epoch += 1
        self.batch = 0
        self.loss_sum = self.count = 0.0
        self.metrics = [[0.0, 0.0] for _ in self.metrics]

    def state(self) -> dict[str, Any]:
        """Return the position as JSON-able data."""
        return asdict(self)
