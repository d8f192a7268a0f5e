"""Traffic: how many bytes a rank sends, by the least that each collective needs; for benchmarks and tests.

What travels on the wire is the transport's business. Here each call counts what a rank has to send in any
implementation that spreads the work evenly (Thakur, Rabenseifner, Gropp, "Optimization of collective communication
operations in MPICH", 2005, sections 4 and 5): of N bytes over n ranks an all-reduce (n-1)/n N twice, a reduce-scatter
all but the own part, an all-gather the own part n-1 times, a reduce N from every rank but the root, a broadcast N from
the root to each of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from ..comm.base import Communicator


class Traffic:
    """While entered, count the bytes that this rank sends.

    **Local.** Every rank enters it, between two steps. Functions of its own stand in the place of the communicator's.
    What a captured step sends is counted while it is captured.

    Args:
        comm: the communicator of the replica (``trainer.parallel.comm``).

    Attributes:
        sent: lane to bytes. ``calls``: lane to number of collectives.

    Example:
        >>> import numpy as np
        >>> from mpdp.comm.solo import SoloCommunicator
        >>> comm = SoloCommunicator()
        >>> with Traffic(comm) as traffic:
        ...     comm.all_reduce(np.ones(3, np.float32))
        >>> traffic.sent["bulk"], traffic.calls["bulk"]
        (0, 1)
    """

    _NAMES = (
        "all_reduce",
        "start_all_reduce",
        "reduce",
        "broadcast",
        "reduce_scatter",
        "start_reduce_scatter",
        "all_gather",
        "start_all_gather",
    )

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._inside = False
        self.sent = {"bulk": 0, "urgent": 0}
        self.calls = {"bulk": 0, "urgent": 0}

    def __enter__(self) -> Traffic:
        for name in self._NAMES:
            call = partial(self._counted, name.removeprefix("start_"), getattr(self._comm, name))
            setattr(self._comm, name, call)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name in self._NAMES:
            delattr(self._comm, name)

    def _counted(
        self, name: str, call: Callable[..., Any], array: Any, *arguments: Any, **options: Any
    ) -> Any:
        if self._inside:  # a call that is made of another
            return call(array, *arguments, **options)
        self._inside = True
        try:
            result = call(array, *arguments, **options)
        finally:
            self._inside = False
        lane = options.get("lane", "bulk")
        self.sent[lane] += _sent(
            name, array, self._comm, arguments[0] if arguments else None, options.get("root", 0)
        )
        self.calls[lane] += 1
        return result


def _sent(name: str, array: Any, comm: Communicator, bounds: Sequence[int] | None, root: int) -> int:
    """Return the bytes that this rank sends in a collective; a share that is not whole is rounded down."""
    size, total = comm.size, int(array.nbytes)
    if bounds is not None:
        own = (bounds[comm.rank + 1] - bounds[comm.rank]) * array.itemsize
        return total - own if name == "reduce_scatter" else own * (size - 1)
    if name == "all_reduce":
        return 2 * total * (size - 1) // size
    if name == "broadcast":
        return total * (size - 1) if comm.rank == root else 0
    return 0 if comm.rank == root else total
