"""Callbacks: what a program can hook into a training run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trainer import Trainer


class Callback:
    """Base of callbacks; override what you need.

    **Collective.** Every method is called on every rank, at the same point of the run, except :meth:`on_exception`.
    So a callback may call collectives of the trainer (``evaluate``, ``save``) as long as every rank does.

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
        """Called after a checkpoint was written and renamed into place."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Called where an exception leaves a call of the trainer, on the ranks that raise it. **Local.**

        Unless ``error.agreed``, the job is about to end: collectives raise here, and the first traceback was
        printed already.
        """
