"""Callbacks: what a program can hook into a training run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .arguments import mode_of

if TYPE_CHECKING:
    from .trainer import Trainer


class Callback:
    """Base of callbacks; override what you need.

    **Collective.** Every method is called on every rank, at the same point of the run, except :meth:`on_exception`.
    So a callback may call collectives (``trainer.evaluate``, ``trainer.save``, ``world.comm.barrier``) as long as every
    rank does. Where one rank calls one alone, all ranks raise a ``DisagreementError`` that says which rank is where.
    What a callback raises carries a note with its name.

    Example:
        >>> class StopAt(Callback):
        ...     def on_step(self, trainer):
        ...         if trainer.step_count >= 100:
        ...             trainer.should_stop = True
    """

    def on_step(self, trainer: Trainer) -> None:
        """Called after each update; ``trainer.loss`` is its global mean loss."""

    def on_epoch(self, trainer: Trainer) -> None:
        """Called after each epoch, when its row stands in the history."""

    def on_validation(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Called after each validation inside ``fit`` with its metrics."""

    def on_checkpoint(self, trainer: Trainer, path: Any) -> None:
        """Called after a checkpoint was written and renamed into place.

        It may save, and is called for that one too; a save there is a ``ValueError`` on all ranks.
        """

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Called where an exception leaves a call of the trainer, on the ranks that raise it. **Local.**

        Unless ``error.agreed``, the job is about to end: collectives raise here, and the first traceback was
        printed already.
        """

    def looks_at(self) -> Sequence[str]:
        """Return the names that it looks up in the rows of the history. **Local.**

        ``fit`` refuses one that no row will have, before it begins.
        """
        return ()

    def state_dict(self) -> Any:
        """Return what a checkpoint is to hold of this callback; None for nothing.

        Dicts with text keys, lists, text, numbers and NumPy arrays, in one another. Called on every rank whenever a
        checkpoint is taken; rank 0's is kept, so what differs between ranks has to be gathered here.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Take up what :meth:`state_dict` returned, on every rank, at the end of ``resume()``; tuples are lists now."""


def check_names(trainer: Trainer, row: Mapping[str, Any]) -> None:
    """Refuse metrics that the trainer, its schedule or its callbacks follow and ``row`` has not.

    **Local.**

    Args:
        trainer: whose ``keep_best``, ``schedule`` and ``callbacks``.
        row: the names that the rows of the history will have.

    Raises:
        ValueError: naming the first one, and what there will be.
    """
    followed = [] if trainer.keep_best is None else [("keep_best", trainer.keep_best, "")]
    for owner in (trainer.schedule, *trainer.callbacks):
        # It need not be derived from our classes.
        names = owner.looks_at() if hasattr(owner, "looks_at") else ()
        followed += [("metric", name, f" for {type(owner).__name__}") for name in names]
    for argument, name, whose in followed:
        if name not in row:
            raise ValueError(
                f"{argument}: expected one of {', '.join(row)} in the history, got {name!r}{whose}; "
                "pass it to fit in metrics=, or validation="
            )


class EarlyStopping(Callback):
    """Stop when a metric has not become better for some epochs.

    **Collective.** It looks at ``trainer.history`` alone, which is the same on every rank and part of a checkpoint, so
    it counts on in a run that was stopped and resumed.

    Args:
        metric: a name in the rows of the history.
        patience: epochs without a better value after which it stops.
        min_delta: how much better a value has to be.
        mode: ``"min"`` or ``"max"``; known for losses and perplexity.

    Attributes:
        best: the best value so far; None before the first.
        best_epoch: the epoch of it, counted from 1.

    Example:
        >>> EarlyStopping("accuracy", patience=5, mode="max").best is None
        True
    """

    def __init__(
        self,
        metric: str = "validation_loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: str | None = None,
    ) -> None:
        mode = mode_of("mode", metric, mode)
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ValueError(
                f"patience: expected an integer of 1 or more, got {patience!r}; it counts epochs"
            )
        if not (0.0 <= min_delta < math.inf):
            raise ValueError(
                f"min_delta: expected a number of 0 or more, got {min_delta!r}; 0 takes any gain"
            )
        self.metric, self.patience, self.min_delta, self.mode = metric, patience, float(min_delta), mode
        self.best: float | None = None
        self.best_epoch = 0

    def describe(self) -> dict[str, Any]:
        """Return what ranks compare. **Local.**"""
        names = ("metric", "patience", "min_delta", "mode")
        return {"class": type(self).__name__} | {name: getattr(self, name) for name in names}

    def looks_at(self) -> Sequence[str]:
        """Return the metric's name. **Local.**"""
        return (self.metric,)

    def on_epoch(self, trainer: Trainer) -> None:
        """Ask to stop if the last ``patience`` epochs brought nothing better."""
        rows = trainer.history
        self.best, self.best_epoch = None, 0
        for row in rows:
            if self.metric not in row:  # an earlier call of fit had other metrics
                continue
            value = float(row[self.metric])
            gain = math.inf if self.best is None else (self.best - value) * (1 if self.mode == "min" else -1)
            if gain > self.min_delta and not math.isnan(value):
                self.best, self.best_epoch = value, int(row["epoch"])
        if rows[-1]["epoch"] - self.best_epoch >= self.patience:
            trainer.should_stop = True
