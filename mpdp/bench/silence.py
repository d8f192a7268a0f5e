"""A step without its collectives, to say what they cost: for measurements alone, since replicas drift apart."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from ..comm.base import Communicator, Request


class WithoutCollectives:
    """While entered, this rank's collectives do nothing; the step record reads as if all ranks were as this one.

    **Local.** Every rank enters it, between two steps. Functions of its own stand in the place of the communicator's,
    as those of a timeline do; checks and bookkeeping of the step stay. What a captured step holds is decided while it
    is captured.

    Args:
        comm: the communicator of the replica (``trainer.parallel.comm``).

    Example:
        >>> import numpy as np
        >>> from mpdp.comm.solo import SoloCommunicator
        >>> comm = SoloCommunicator()
        >>> with WithoutCollectives(comm):
        ...     comm.start_all_reduce(np.ones(3, np.float32)).wait()
        >>> "start_all_reduce" in vars(comm)
        False
    """

    _CALLS = (
        "all_reduce",
        "start_all_reduce",
        "start_reduce_scatter",
        "start_all_gather",
        "reduce",
        "broadcast",
        "reduce_scatter",
        "all_gather",
        "exclusive_sum",
        "barrier",
        "reduce_numbers",
    )

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __enter__(self) -> None:
        for name in self._CALLS:
            default = self._start if name.startswith("start_") else self._nothing
            setattr(self._comm, name, getattr(self, f"_{name}", default))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name in self._CALLS:
            delattr(self._comm, name)

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    def _start(self, *_: Any, **__: Any) -> Request:
        return Request()

    def _exclusive_sum(self, value: int, *, lane: str = "urgent") -> int:
        return self._comm.rank * int(value)

    def _reduce_numbers(self, maxima: Sequence[int], sums: Sequence[float]) -> tuple[list[int], list[float]]:
        return [int(value) for value in maxima], [self._comm.size * float(value) for value in sums]
