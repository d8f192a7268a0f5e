"""The moving average of a replica's weights: when it moves, where it lies, and the time that it spends in their place.

Views never move, so an evaluation by the average exchanges the contents of flat buffers and exchanges them back: no
second model, no second forward pass, and the weights keep their bits. Read ``optim/average.py`` for the average.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ..optim import WeightAverage
from .update import show

if TYPE_CHECKING:
    from .layout import Layout
    from .replica import Replica


def keep(replica: Replica, average: WeightAverage) -> None:
    """Keep a moving average of the weights from the next update on. **Local.**"""
    average.bind(replica.weights, replica.kernels)
    replica.average = average


def start(replica: Replica) -> None:
    """Let the average begin, where there is one, before an update. **Local.**"""
    refuse(replica, "step")
    if replica.average is not None:
        replica.average.start()


def move(replica: Replica, when: Any = None) -> None:
    """Move the average, where there is one, towards the updated weights; see ``WeightAverage``. **Local.**"""
    if replica.average is not None:
        replica.average.update(when)


def collect(replica: Replica) -> np.ndarray | None:
    """Return the average over the layout in host memory on rank 0; None elsewhere, and where there is none yet.

    **Collective.**
    """
    average = replica.average
    if average is None or not average.started:
        return None
    if replica.masters is not None:
        return replica.masters.collect(average.array)
    return replica.kernels.to_numpy(average.array) if replica.comm.rank == 0 else None


def load(replica: Replica, whole: np.ndarray | None) -> None:
    """Take over what :func:`collect` gave on rank 0. **Collective.**"""
    average, end, size = replica.average, replica.layout.trainable_size, replica.layout.size
    assert average is not None
    array = average.array
    if replica.masters is not None:
        replica.placement.hand_out(None if whole is None else whole[:end], array)
        array = array[end:size] if size > end else None
        whole = None if whole is None else whole[end:]
    if array is not None:
        if whole is not None:
            array[...] = replica.kernels.from_host(whole)
        replica.comm.broadcast(array)
    average.started = True


def lay_out(replica: Replica, old_layout: Layout, old: np.ndarray | None) -> None:
    """Attach the average to the replica's new layout, with what :func:`collect` gave before. **Collective.**"""
    average = replica.average
    assert average is not None
    started = average.started
    keep(replica, average)
    if started:
        new = None
        if old is not None:
            new = np.zeros(replica.layout.size, old.dtype)
            for name in replica.parameters:
                replica.layout.view(new, name)[...] = old_layout.view(old, name)
        load(replica, new)


@contextmanager
def averaged(replica: Replica) -> Iterator[None]:
    """Run a block with the average in the weights' place.

    **Collective** where ranks hold parts of the weights, else **Local.** Inside such a block it changes nothing.

    Raises:
        ValueError: no average is kept. An error that leaves the block on one rank alone, and is caught there, is
            followed by one of the next forward pass where ranks hold parts: see ``Replica.refresh``.
    """
    average = require(replica)
    if average.swapped:
        yield
        return
    average.swap()
    show(replica)
    try:
        yield
    except BaseException as error:
        average.swap()
        replica.binding.stale = True
        if getattr(error, "agreed", False):
            show(replica)
        else:  # this rank is alone here, and the job is about to end, unless the program goes on
            replica.binding.averaged = replica.masters is not None
        raise
    average.swap()
    show(replica)


@contextmanager
def outside(replica: Replica) -> Iterator[None]:
    """Run a block with the weights in their own place, also inside of :func:`averaged`, which is left by an error then.

    **Collective** where ranks hold parts of the weights, else **Local.**
    """
    average = replica.average
    if average is None or not average.swapped:
        yield
        return
    average.swap()
    show(replica)
    try:
        yield
    finally:
        average.swap()
        replica.binding.stale = True


def require(replica: Replica) -> WeightAverage:
    """Return the average that is kept. **Local.**

    Raises:
        ValueError: none is.
    """
    if replica.average is None:
        raise ValueError(
            "ema: expected a trainer that keeps an average of weights, got none; pass ema=0.999 to it"
        )
    return replica.average


def refuse(replica: Replica, call: str) -> None:
    """Refuse a call that would take the average for the weights. **Local.**"""
    if replica.average is not None and replica.average.swapped:
        raise ValueError(
            f"{call}: expected a call outside averaged(), got one inside it, where the average is in the weights' "
            "place; leave the block first"
        )
