"""Preemption: SIGTERM or SIGUSR1 on any rank ends the training on all of them after the same update, saved.

A rank that has got a signal asks all to stop, as ``should_stop`` does, in the record of its next update; behind that
update all ranks learn here that a signal was the reason. Handlers are :mod:`mpdp.notice`'s part, and what the status
means to ``mpdp run`` is that of :mod:`mpdp.cli.restarts`.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import guard
from ..errors import CheckpointError, Preempted
from ..parallel import averaging
from ..parallel.record import Kind, exchange

if TYPE_CHECKING:
    from .trainer import Trainer


def asked() -> bool:
    """Return whether a signal has asked this rank to end. **Local.**"""
    return guard.current.notice.asked


def listen(trainer: Trainer) -> int:
    """Take signals as a request from now on. **Local.** A rank that does not obey within the world's timeout ends."""
    return guard.current.notice.listen(trainer.world.timeout)


def silence(listener: int) -> None:
    """End what :func:`listen` has begun, and returned. **Local.**"""
    guard.current.notice.silence(listener)


def ends_in_order(fit: Callable[..., Any]) -> Callable[..., Any]:
    """Let a call of the trainer take signals as a request from beginning to end, the last save included. **Local.**"""

    @functools.wraps(fit)
    def wrapper(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        listener = listen(self)
        try:
            result = fit(self, *args, **kwargs)
            obey(self)
            return result
        finally:
            silence(listener)

    return wrapper


def note_update(trainer: Trainer) -> None:
    """Tell ``mpdp run`` that the job has come past its first update. **Local.**"""
    guard.current.mark("updated", "", trainer.world.rank)


def note_save(trainer: Trainer, path: Path) -> None:
    """Tell ``mpdp run`` of a checkpoint that is whole. **Local.**"""
    if trainer.world.rank == 0:
        guard.current.mark("saved", str(int(path.name.split("-")[1])), 0)


def obey(trainer: Trainer) -> None:
    """Save and end the program where a signal has asked any rank for it.

    **Collective**, between two updates or behind an evaluation. One small message.

    Raises:
        Preempted: on all ranks, when the checkpoint is whole.
        CheckpointError: on all ranks, when it could not be written.
    """
    comm = trainer.world.axis("data")
    number = guard.current.notice.number
    terminated, user = exchange(
        comm, Kind.SIGNALS, trainer.step_count, sums=(number == signal.SIGTERM, number == signal.SIGUSR1)
    ).sums
    if not terminated + user:
        return
    guard.current.notice.obeyed()
    names = [name for name, count in (("SIGTERM", terminated), ("SIGUSR1", user)) if count]
    text = (
        f"{' and '.join(names)} on {terminated + user:.0f} of {comm.size} ranks: "
        f"stopped after update {trainer.step_count}; {_save(trainer)}"
    )
    trainer.world.log("warning", f"{text}; the exit status is {Preempted.STATUS}")
    raise Preempted(text)


def _save(trainer: Trainer) -> str:
    """Save what is not saved yet, and say what was done. **Collective.**"""
    if trainer.run_dir is None:
        return "nothing is saved without a run_dir"
    try:
        trainer.saves.finish()  # one that a thread is writing
    except (CheckpointError, OSError) as error:
        if trainer.world.size > 1 and not getattr(error, "agreed", False):
            raise
        trainer.world.log("warning", f"{error}; saving once more")
    if trainer.position.saved_step == trainer.step_count:
        return "it was saved already"
    with averaging.outside(trainer.parallel._replica):  # Preempted leaves a block of averaged() then
        return f"saved as {trainer.save()}"
