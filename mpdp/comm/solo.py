"""A world of one: every collective is the identity. It needs neither a launcher nor an MPI library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .activity import Activity
from .base import Communicator


class SoloCommunicator(Communicator):
    """The communicator of a world of one."""

    transport = "solo"

    def __init__(self, activity: Activity | None = None) -> None:
        super().__init__(0, 1, activity)

    def duplicate(self) -> SoloCommunicator:
        return SoloCommunicator(self.activity)

    def _all_reduce(self, array: Any, op: str, lane: str) -> None:
        pass

    def _reduce(self, array: Any, op: str, root: int, lane: str) -> None:
        pass

    def _broadcast(self, array: Any, root: int, lane: str) -> None:
        pass

    def _reduce_scatter(self, array: Any, bounds: Sequence[int], op: str, lane: str) -> None:
        pass

    def _all_gather(self, array: Any, bounds: Sequence[int], lane: str) -> None:
        pass

    def _exclusive_sum(self, value: int, lane: str) -> int:
        return 0

    def _barrier(self, lane: str) -> None:
        pass

    def _send(self, array: Any, to: int, lane: str) -> None:
        raise ValueError("to: expected another rank, got 0 in a world of one")

    def _recv(self, array: Any, source: int, lane: str) -> None:
        raise ValueError("source: expected another rank, got 0 in a world of one")
