"""The moving average of a replica's weights, and the time that it spends in their place.

Views never move, so an evaluation by the average exchanges the contents of two flat buffers and exchanges them back:
no second model, no second forward pass, and the weights keep their bits. Read ``optim/average.py`` for the average.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .replica import Replica


@contextmanager
def averaged(replica: Replica) -> Iterator[None]:
    """Run a block with the average in the weights' place. **Local.** Inside such a block it changes nothing.

    Raises:
        ValueError: no average is kept.
    """
    average = replica.average
    if average is None:
        raise ValueError(
            "ema: expected a trainer that keeps an average of weights, got none; pass ema=0.999 to it"
        )
    if average.swapped:
        yield
        return
    average.swap()
    replica.binding.stale = True
    try:
        yield
    finally:
        average.swap()
        replica.binding.stale = True


def refuse_averaged(replica: Replica, call: str) -> None:
    """Refuse a call that would take the average for the weights. **Local.**"""
    if replica.average is not None and replica.average.swapped:
        raise ValueError(
            f"{call}: expected a call outside averaged(), got one inside it, where the average is in the weights' "
            "place; leave the block first"
        )
