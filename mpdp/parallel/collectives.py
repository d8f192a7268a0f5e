"""Collectives inside of operations: what a module of a wrapped model exchanges with the other replicas.

Forward gathers, so that every rank merges the same numbers in the same order; backward adds. Both go over the urgent
lane of an axis and carry a mark of who is asking, since ranks that run different modules would otherwise take each
other's numbers for their own. Nothing here knows statistics; ``autodiff.ops.batch_norm`` does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from .. import kernels
from ..comm.base import Communicator
from ..device import CPU, device_of
from ..errors import DisagreementError, on_all_ranks
from ..nn import Module

_MARK_BITS = 40  # sums of marks are exact in float64 up to 8192 ranks


class AxisPeers:
    """The replicas along an axis of the world, as ``autodiff.ops.batch_norm`` wants them.

    Args:
        comm: the axis.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._marks: dict[str, float] = {}

    def __deepcopy__(self, memo: Any) -> None:
        """A copied model belongs to no axis until it is wrapped."""

    def __reduce__(self) -> Any:
        return (type(None), ())

    def gather(self, numbers: Any, what: str) -> Any:
        """Return the float64 arrays (M,) of all ranks as rows, by rank.

        **Collective.** Every rank gets the same bits. Memory: M numbers a rank.

        Raises:
            DisagreementError: on all ranks, when they ask for different things (found on the CPU).
        """
        xp, size, width = kernels.of(numbers).xp, self._comm.size, len(numbers) + 1
        flat = xp.zeros(size * width, np.float64)
        rows = flat.reshape(size, width)
        rows[self._comm.rank, 0] = self._mark(what)
        rows[self._comm.rank, 1:] = numbers
        self._comm.all_gather(flat, [width * rank for rank in range(size + 1)], lane="urgent")
        if device_of(flat) == CPU and (rows[:, 0] != rows[0, 0]).any():
            others = [str(rank) for rank in range(size) if rows[rank, 0] != self._mark(what)]
            raise on_all_ranks(
                self._differ(what, f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(others)}")
            )
        return rows[:, 1:]

    def add(self, numbers: Any, what: str) -> Any:
        """Return the sum over ranks of float64 arrays (M,). **Collective.**

        Raises:
            DisagreementError: on one rank at least, when they ask for different things (found on the CPU).
        """
        flat = kernels.of(numbers).xp.empty(len(numbers) + 1, np.float64)
        mark = self._mark(what)
        flat[0] = mark
        flat[1:] = numbers
        self._comm.all_reduce(flat, lane="urgent")
        if device_of(flat) == CPU and flat[0] != mark * self._comm.size:
            raise self._differ(what, "another rank")
        return flat[1:]

    def _mark(self, what: str) -> float:
        mark = self._marks.get(what)
        if mark is None:
            digest = hashlib.blake2b(what.encode(), digest_size=_MARK_BITS // 8).digest()
            mark = self._marks[what] = float(int.from_bytes(digest, "little"))
        return mark

    def _differ(self, what: str, others: str) -> DisagreementError:
        return DisagreementError(
            f"{what}: expected all ranks in it, got {others} in another one; ranks that exchange statistics run the "
            "same modules in the same order, so a model whose path depends on its input needs global_stats=False"
        )


def average_buffers(comm: Communicator, buffers: list[Any], weight: float) -> None:
    """Replace buffers by their averages over ranks, weighted by ``weight``, all in one message.

    **Collective.** Every rank gets the same bits; where all weights are 0, buffers stay as they are.
    """
    xp = kernels.of(buffers[0].data).xp
    flats = [buffer.data.reshape(-1).astype(np.float64) for buffer in buffers]
    flat = xp.concatenate([xp.ones(1, np.float64), *flats])
    flat *= weight
    comm.all_reduce(flat, lane="urgent")
    total = flat[0]
    start = 1
    for buffer in buffers:
        part = flat[start : start + buffer.size].reshape(buffer.shape)
        buffer.data[...] = xp.where(total > 0, part / xp.maximum(total, 1), buffer.data)
        start += buffer.size


def average_trained(comm: Communicator, modules: Iterable[Module], weight: float) -> None:
    """Bring buffers together that ranks have changed differently in training. **Collective** where there are any.

    Args:
        comm: the ranks.
        modules: those with ``averaged_buffers``; only those in training mode count.
        weight: of this rank.
    """
    training = [module for module in modules if module.training]
    if training:
        average_buffers(comm, [getattr(m, name) for m in training for name in m.averaged_buffers], weight)
