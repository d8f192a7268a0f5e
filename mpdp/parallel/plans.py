"""What the tapes of an update imply: which chunks start after which operation, and which parameters nobody wrote.

A plan is made once for each combination of tape signatures, so a step with a graph that was seen before looks one up.
Read ``data_parallel`` for the use.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..autodiff import Tape
from .reducer import FlushPlan
from .replica import Replica

_MOST = 256  # remembered plans; a program with more different graphs makes them again


@dataclass(frozen=True)
class Plan:
    """What a set of tapes implies for one update.

    Attributes:
        after: what to call after which position of backward. ``chunks_after``: how many chunks are final there.
        unused_views: gradients that no tape of this rank writes.
        used: which of the trainable parameters any tape of this rank uses.
        used_hash: 62 bits of ``used``.
    """

    after: FlushPlan
    chunks_after: dict[int, int]
    unused_views: tuple[Any, ...]
    used: np.ndarray
    used_hash: int


class Plans:
    """The plans of one replica, until its layout changes. **Local.**"""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.forget()

    def __len__(self) -> int:
        return len(self._plans)

    def forget(self) -> None:
        """Forget all: the layout is another, or there are too many."""
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._leaves: dict[int, frozenset[str]] = {}  # tape signature -> parameters it uses

    def know(self, tape: Tape, signature: int) -> None:
        """Look at the tape of a micro-batch that is not an update's last.

        Raises:
            DisagreementError: it uses parameters that the replica does not hold.
        """
        if signature not in self._leaves:
            self._replica.check_leaves(tape.leaves)
            self._leaves[signature] = frozenset(self._replica.names_of(tape.last_write))

    def of(self, signatures: tuple[int, ...], tape: Tape | None) -> Plan:
        """Return the plan of an update.

        Args:
            signatures: of its tapes on this rank, in order.
            tape: the last of them; None where the last share is empty.

        Raises:
            DisagreementError: the tape uses parameters that the replica does not hold.
        """
        # A rank whose last share is empty has no tape, although its signatures may equal another update's.
        key = (*signatures, 0 if tape is None else 1)
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        replica = self._replica
        if tape is not None:
            replica.check_leaves(tape.leaves)
        trainable = replica.layout.trainable
        last_write = {} if tape is None else replica.names_of(tape.last_write)
        used_names = last_write.keys() | {name for s in signatures for name in self._leaves.get(s, ())}
        used = np.zeros(len(trainable), dtype=bool)
        used[[replica.index[name] for name in used_names]] = True
        unused_views = tuple(replica.arena[e.name] for e in trainable if e.name not in used_names)
        digest = hashlib.blake2b(used.tobytes(), digest_size=8).digest()
        number = int.from_bytes(digest, "little") >> 2
        reducer = replica.reducer
        plan = Plan(reducer.plan(last_write), reducer.chunks_after(last_write), unused_views, used, number)
        if len(self._plans) >= _MOST:
            self.forget()
        self._plans[key] = plan
        return plan
