"""FitPlan: the arguments of one call of ``fit``, checked, and what follows from them by arithmetic alone."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..data import Stream, as_dataset, batches, check_dataset
from ..data.streams import length_of
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
    ema: bool = False

    @property
    def row(self) -> dict[str, None]:
        """The names that an epoch's row of the history will have."""
        names = ["loss", *(["validation_loss"] if self.validation is not None else [])]
        return dict.fromkeys([*names, *map(metric_name, self.metrics)])

    def __post_init__(self) -> None:
        for name in ("epochs", "updates", "global_batch_size"):  # a checkpoint holds them as JSON
            object.__setattr__(self, name, plain(getattr(self, name)))
        for name in ("dataset", "validation"):
            with contextlib.suppress(TypeError):  # check() raises it
                object.__setattr__(self, name, as_dataset(getattr(self, name)))

    def check(self, accumulate: int) -> None:
        """Refuse what cannot be done.

        **Local.**

        Raises:
            TypeError: something that is no data set, number or metric.
            ValueError: a number out of range, or data without samples.
        """
        for name in ("dataset", "validation"):
            _check_data(name, getattr(self, name))
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
        if self.ema and self.validation is None:
            raise ValueError(
                "ema: expected validation= beside it (metrics of training batches are of the weights), got none; "
                "pass validation data or leave it out"
            )
        for name, length in (("dataset", self.length), ("validation", length_of(self.validation))):
            if length == 0:
                raise ValueError(
                    f"{name}: expected at least one sample, got an empty data set; check where it comes from"
                )
        if self.per_epoch == 0:
            raise ValueError(
                f"global_batch_size: expected at most the {self.length} samples of the data set with "
                f"drop_last, got {size}; lower it or keep the short batch"
            )

    @property
    def streamed(self) -> bool:
        """Whether the data are a stream, of no known length."""
        return isinstance(self.dataset, Stream)

    @cached_property
    def length(self) -> int | None:
        """Samples of the data set when ``fit`` was called; it may grow meanwhile. None for a stream."""
        return None if self.streamed else len(self.dataset)

    @cached_property
    def per_epoch(self) -> int | None:
        """Updates in an epoch; None for a stream."""
        return (
            None if self.length is None else len(batches(self.length, self.global_batch_size, self.drop_last))
        )

    @property
    def total(self) -> int | None:
        """Updates of the whole run, where that is known."""
        ends = [] if self.updates is None else [self.updates]
        if self.epochs is not None and self.per_epoch is not None:
            ends.append(self.epochs * self.per_epoch)
        return min(ends, default=None)

    def updates_left(self, position: Position, step_count: int) -> int:
        """Return how many updates a run at this position still has to do; of a stream 1 where there may be some."""
        ends = []
        if self.epochs is not None:
            epochs = self.epochs - position.epoch
            ends.append(
                min(epochs, 1) if self.per_epoch is None else epochs * self.per_epoch - position.batch
            )
        if self.updates is not None:
            ends.append(self.updates - step_count)
        return max(0, min(ends))

    def samples(self, batch: int) -> int:
        """Return the number of samples in the global batch ``batch`` of an epoch. Not for a stream."""
        assert self.length is not None
        return min(self.global_batch_size, self.length - batch * self.global_batch_size)

    def order(self, size: int = 1) -> dict[str, Any]:
        """Return what decides which samples stand in which global batch, on so many ranks."""
        found: dict[str, Any] = {
            "length of the data set": self.length,
            "global_batch_size": self.global_batch_size,
            "shuffle": bool(self.shuffle),
            "drop_last": bool(self.drop_last),
        }
        if self.streamed:
            found["window"] = self.dataset.window
            if self.dataset.sharded:
                found["number of ranks of a sharded stream"] = size
        return found

    def describe(self) -> dict[str, Any]:
        """Return what all ranks must have been asked alike."""
        return {
            **self.order(),
            "epochs": self.epochs,
            "updates": self.updates,
            "length of the validation data": length_of(self.validation),
            "metrics": [metric_name(metric) for metric in self.metrics],
            "ema": bool(self.ema),
            **describe_dataset(self.dataset),
            **{f"{key} (validation)": value for key, value in describe_dataset(self.validation).items()},
        }


def _check_data(name: str, dataset: Any) -> None:
    try:
        if not isinstance(dataset, Stream) and (name == "dataset" or dataset is not None):
            as_dataset(dataset)
            check_dataset(dataset)
    except TypeError as error:
        raise TypeError(str(error).replace("dataset:", f"{name}:", 1)) from None
