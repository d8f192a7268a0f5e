"""Plans that all ranks compute by: measured on rank 0, given to all.

Ranks that took plans of their own would give results whose last bits depend on who computed what. See
``kernels.plan_book`` for what a plan is.
"""

from __future__ import annotations

import json

from ..comm.agreement import on_root
from ..comm.base import Communicator
from ..kernels.plan_book import PlanBook


def share_plans(book: PlanBook, comm: Communicator) -> int:
    """Measure on rank 0 what is missing in its book, and give all its plans to all ranks; return how many are new.

    **Collective.** Between two steps. Afterwards the book is no longer timed: what a later step asks for first is
    computed by the library's suggestion, on every rank and after every restart alike.

    Raises:
        MpdpError or another: what a measurement raised, on all ranks.
    """
    known = len(book)

    def measure() -> bytes:
        book.measure()
        return json.dumps(book.plans()).encode()

    text = on_root(comm, measure)
    book.load(json.loads(comm.broadcast_bytes(text)))
    book.timed = False
    book.forget_missing()
    return len(book) - known
