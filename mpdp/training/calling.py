"""Calling back: what the trainer does around the methods of a program's callbacks.

Every rank calls them at the same point, but what they do is the program's. An error is told with the callback it comes
from. A collective that one rank calls alone would wait for ranks that went on, so the messages of a callback are
announced by a step record first: where the other ranks are somewhere else, that is an error on all of them, at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ..comm.base import Communicator
from ..parallel.record import Kind, exchange
from .preemption import note_save

if TYPE_CHECKING:
    from .trainer import Trainer


def call_back(trainer: Trainer, method: str, *arguments: Any) -> None:
    """Call one method of every callback, in order.

    **Collective.**

    Args:
        trainer: whose callbacks; it is their first argument.
        method: a method of :class:`mpdp.Callback`.
        arguments: the others.

    Raises:
        Exception: what a callback raises, with a note that names it.
        DisagreementError: on all ranks, where one calls a collective alone.
    """
    if method == "on_checkpoint":
        note_save(trainer, *arguments)
    for callback in trainer.callbacks:
        with told(callback, method, trainer), _announced(trainer):
            getattr(callback, method)(trainer, *arguments)


def agree_to_stop(trainer: Trainer, asked: bool) -> bool:
    """Return whether a rank has asked to stop in a callback; all ranks leave their callbacks here. **Collective.**"""
    if not trainer.callbacks:
        return False
    return exchange(trainer.world.axis("data"), Kind.CALLBACKS, trainer.step_count, stop=asked).stop


@contextmanager
def told(callback: Any, method: str, trainer: Trainer) -> Iterator[None]:
    """Note on an error that passes through which callback it comes from. **Local.**"""
    try:
        yield
    except BaseException as error:
        error.add_note(
            f"in the callback {type(callback).__name__}.{method}, called on rank {trainer.world.rank} after "
            f"{trainer.step_count} updates"
        )
        raise


@contextmanager
def _announced(trainer: Trainer) -> Iterator[None]:
    """Let the messages of the block be announced, but for those of the trainer's own calls, which say who they are."""
    data = trainer.world.axis("data")
    depth, busy = trainer.depth, False
    if data.size == 1:
        yield
        return

    def enter(own: Any, call: str, lane: str) -> None:
        nonlocal busy
        if not busy and trainer.depth == depth and not call.startswith(("send", "recv")):
            busy = True
            try:
                exchange(data, Kind.IN_CALLBACK, trainer.step_count)
            finally:
                busy = False
        own(call, lane)

    comms: list[Communicator] = [data, trainer.world.comm]
    before = [comm.__dict__.get("_enter") for comm in comms]  # a save in a callback has callbacks of its own
    for comm in comms:
        comm._enter = partial(enter, comm._enter)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for comm, shadow in zip(comms, before):
            if shadow is None:
                del comm._enter
            else:
                comm._enter = shadow  # type: ignore[method-assign]
