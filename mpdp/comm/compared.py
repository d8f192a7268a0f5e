"""A look at who calls what, before each collective of a communicator that would pair calls by their order alone.

Of ranks that are in different collectives of MPI, some get sums of other things and no error (measured with both MPIs).
The transports over mapped memory compare signatures anyway; ``world.comm``, on which programs call collectives of their
own, does so over MPI too. The reducer's communicators do not: the step record has compared steps and layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import on_all_ranks
from .base import Communicator
from .calls import mismatch, sign

_NOTHING = np.empty(0, dtype=np.uint8)


def compare_calls(comm: Communicator) -> None:
    """Let every collective of a communicator begin with one maximum of its signature: call, dtype, length.

    **Local**, and the same on every rank. Duplicates that are made of it do not compare; ``send`` and ``recv`` are
    compared by nobody, nor are calls on different lanes. A difference is a CommunicationError on all ranks that names
    what each is in.

    Args:
        comm: of host arrays.
    """
    plain: dict[str, Callable[..., Any]] = {
        name: getattr(comm, f"_{name}")
        for name in (
            "all_reduce",
            "reduce",
            "broadcast",
            "reduce_scatter",
            "all_gather",
            "exclusive_sum",
            "barrier",
        )
    }
    inside = False

    def agree(lane: str, signature: int) -> None:
        extremes = np.array([signature, ~signature], dtype=np.int64)
        plain["all_reduce"](extremes, "max", lane)
        if extremes[0] == ~extremes[1]:
            return
        signatures = np.full(comm.size, signature, dtype=np.int64)
        plain["all_gather"](signatures, range(comm.size + 1), lane)
        raise on_all_ranks(mismatch(range(comm.size), signatures.tolist()))

    def call(name: str, lane: str, signature: int, *arguments: Any) -> Any:
        nonlocal inside
        if inside:  # a transport may build one call of others
            return plain[name](*arguments)
        inside = True
        try:
            agree(lane, signature)
            return plain[name](*arguments)
        finally:
            inside = False

    def all_reduce(array: Any, op: str, lane: str) -> None:
        call("all_reduce", lane, sign("all_reduce", op, array), array, op, lane)

    def reduce(array: Any, op: str, root: int, lane: str) -> None:
        call("reduce", lane, sign("reduce", op, array, root), array, op, root, lane)

    def broadcast(array: Any, root: int, lane: str) -> None:
        call("broadcast", lane, sign("broadcast", "sum", array, root), array, root, lane)

    def reduce_scatter(array: Any, bounds: Sequence[int], op: str, lane: str) -> None:
        call("reduce_scatter", lane, sign("reduce_scatter", op, array, bounds), array, bounds, op, lane)

    def all_gather(array: Any, bounds: Sequence[int], lane: str) -> None:
        call("all_gather", lane, sign("all_gather", "sum", array, bounds), array, bounds, lane)

    def exclusive_sum(value: int, lane: str) -> int:
        return int(call("exclusive_sum", lane, sign("exclusive_sum", "sum", _NOTHING), value, lane))

    def barrier(lane: str) -> None:
        call("barrier", lane, sign("barrier", "sum", _NOTHING), lane)

    for function in (all_reduce, reduce, broadcast, reduce_scatter, all_gather, exclusive_sum, barrier):
        setattr(comm, f"_{function.__name__}", function)
