"""Clocks of ranks: how far each is from rank 0's, so that what they note stands on one axis.

The method is Cristian's (F. Cristian, Probabilistic clock synchronization, 1989): a rank asks rank 0 for its time,
and takes the answer for the middle between question and answer. It is wrong by half of that time at the most, so of
several exchanges the fastest counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from .base import Communicator

ROUNDS = 16


def clock_offset(
    comm: Communicator, clock: Callable[[], int] = time.perf_counter_ns, rounds: int = ROUNDS
) -> tuple[int, int]:
    """Return what to subtract from this rank's clock to get rank 0's, and how wrong that is at the most.

    **Collective.** Rank 0 answers one rank after another: for measurements, not for a step.

    Args:
        comm: the ranks.
        clock: nanoseconds of this rank.
        rounds: exchanges a rank.
    """
    message = np.zeros(1, dtype=np.int64)
    if comm.rank == 0:
        for rank in range(1, comm.size):
            for _ in range(rounds):
                comm.recv(message, source=rank)
                message[0] = clock()
                comm.send(message, to=rank)
        return 0, 0
    offset = error = 0
    for i in range(rounds):
        asked = clock()
        comm.send(message, to=0)
        comm.recv(message, source=0)
        answered = clock()
        half = (answered - asked + 1) // 2
        if i == 0 or half < error:
            offset, error = asked + half - int(message[0]), half
    return offset, error
