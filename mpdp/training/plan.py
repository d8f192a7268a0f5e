"""FitPlan: the arguments of one call of ``fit``, checked, and what follows from them by arithmetic alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..data import batches, check_dataset
from ..data.transforms import describe_dataset
from ..nn.metrics import metric_name
from .arguments import plain
from .evaluation import Metric, check_metrics
from .position import Position


@dataclass(frozen=True)
class FitPlan:
    """What ``fit`` was asked to do; see :meth:`mpdp.Trainer.fit` for the fields. **Local.**"""

    dataset: Any
    epochs: int | None
    updates: int | None
    global_batch_size: Any
    shuffle: bool
    drop_last: bool
    validation: Any
    metrics: Sequence[Metric]

    def __post_init__(self) -> None:
        for name in ("epochs", "updates", "global_batch_size"):  # a checkpoint holds them as JSON
            object.__setattr__(self, name, plain(getattr(self, name)))

    def check(self, accumulate: int) -> None:
        """Refuse what cannot be done.

        **Local.**

        Raises:
            TypeError: something that is no data set, number or metric.
            ValueError: a number out of range, or data without samples.
        """
        check_dataset(self.dataset)
        if self.validation is not None:
            _check_validation(self.validation)
        if self.epochs is None and self.updates is None:
            raise ValueError("epochs: expected epochs= or updates=, got neither; say when to stop")
        for name, value in (("epochs", self.epochs), ("updates", self.updates)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ValueError(f"{name}: expected an integer of 0 or more, got {value!r}; pass an int")
        size = self.global_batch_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(
                "global_batch_size: expected an integer of 1 or more (samples per update over all ranks), "
                f"got {size!r}; pass an int"
            )
        if size < accumulate:
            raise ValueError(
                f"global_batch_size: expected at least accumulate={accumulate} samples, got {size}; accumulate less"
            )
        check_metrics(self.metrics, of_training=self.validation is None)
        if self.length == 0:
            raise ValueError(
                "dataset: expected at least one sample, got an empty data set; check where it comes from"
            )
        if self.per_epoch == 0:
            raise ValueError(
                f"global_batch_size: expected at most the {self.length} samples of the data set with "
                f"drop_last, got {size}; lower it or keep the short batch"
            )

    @cached_property
    def length(self) -> int:
        """Samples of the data set when ``fit`` was called; it may grow meanwhile."""
        return len(self.dataset)

    @cached_property
    def per_epoch(self) -> int:
        """Updates in an epoch."""
        return len(batches(self.length, self.global_batch_size, self.drop_last))

    @property
    def total(self) -> int:
        """Updates of the whole run."""
        ends = []
        if self.epochs is not None:
            ends.append(self.epochs * self.per_epoch)
        if self.updates is not None:
            ends.append(self.updates)
        return min(ends)

    def updates_left(self, position: Position, step_count: int) -> int:
        """Return how many updates a run at this position still has to do."""
        ends = []
        if self.epochs is not None:
            ends.append((self.epochs - position.epoch) * self.per_epoch - position.batch)
        if self.updates is not None:
            ends.append(self.updates - step_count)
        return max(0, min(ends))

    def samples(self, batch: int) -> int:
        """Return the number of samples in the global batch ``batch`` of an epoch."""
        return min(self.global_batch_size, self.length - batch * self.global_batch_size)

    def order(self) -> dict[str, Any]:
        """Return what decides which samples stand in which global batch."""
        return {
            "length of the data set": self.length,
            "global_batch_size": self.global_batch_size,
            "shuffle": bool(self.shuffle),
            "drop_last": bool(self.drop_last),
        }

    def describe(self) -> dict[str, Any]:
        """Return what all ranks must have been asked alike."""
        return {
            **self.order(),
            "epochs": self.epochs,
            "updates": self.updates,
            "length of the validation data": None if self.validation is None else len(self.validation),
            "metrics": [metric_name(metric) for metric in self.metrics],
            **describe_dataset(self.dataset),
            **{f"{key} (validation)": value for key, value in describe_dataset(self.validation).items()},
        }


def _check_validation(dataset: Any) -> None:
    try:
        check_dataset(dataset)
    except TypeError as error:
        raise TypeError(str(error).replace("dataset:", "validation:", 1)) from None
