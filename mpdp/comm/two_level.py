"""The two-level transport: CPU ranks of several nodes, shared memory inside a node and MPI between nodes.

A message is cut into as many slices as the smallest node has ranks. On each node the rank of local index k owns slice
k. An all-reduce adds up each slice over the ranks of the node, where it lies (``shared_memory``); its owners add it up
over nodes (``owners``); and each rank copies the slices of the others. So a node's sums cross the network once, and
all its owners use the network at the same time. Ranks of a larger node that own nothing take part inside it.

Sums are in the order of local ranks, then in the order of nodes, whatever the length and the pieces: the bits
of a result depend on which ranks are on which node, and on nothing else. Sixteen-bit floats are widened before
the first level and rounded once, after the second.

Levels follow one another. To overlap them in pieces would take a thread for MPI, which makes no progress by
itself, and where ranks fill a node's cores that thread would take its core from the sums inside.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import add
from typing import Any

import ml_dtypes
import numpy as np

from ..device import Device
from ..errors import CommunicationError
from .activity import Activity
from .agreement import agree
from .base import Buffer, Communicator
from .blocks import slices
from .flags import unordered
from .lane import PIECE_BYTES as STAGING_BYTES
from .mpi import PIECE_BYTES, MpiCommunicator
from .owners import Owners
from .shared_memory import Log, SharedMemoryCommunicator, silent

SMALL_BYTES = 8 << 10  # every rank adds up all nodes' sums itself; not measured between hosts yet
_HALVES = frozenset((np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)))


class TwoLevelCommunicator(Communicator):
    """Carry host arrays between ranks of several nodes.

    **Collective.** Results are bit-equal run to run and whatever the chunk size.

    Args:
        mpi: the ranks; the communicator is this one's from now on.
        node: of this rank; the nodes are numbered in the order of their lowest ranks.
        activity: what the liveness ring watches.
        small_bytes: messages up to here take one phase on each level (default: by level).
        piece_bytes: largest message of one MPI call.
        staging_bytes: what travels through a node's staging area at once.
        log: writes a level and a line; asked by each node for itself.
        like: the communicator that this one is a duplicate of.

    Attributes:
        inner: over the ranks of this node.
        owners: of this rank's slice, one rank a node; of ranks that own none, what nobody uses.
        way: how memory is mapped, ``"memfd"`` or ``"window"``.

    Raises:
        CommunicationError: on all ranks, when those of some node cannot map each other's memory.
    """

    transport = "two_level"

    def __init__(
        self,
        mpi: MpiCommunicator,
        node: int,
        activity: Activity | None = None,
        *,
        small_bytes: int | None = None,
        piece_bytes: int = PIECE_BYTES,
        staging_bytes: int = STAGING_BYTES,
        log: Log = silent,
        like: TwoLevelCommunicator | None = None,
    ) -> None:
        super().__init__(mpi.rank, mpi.size, activity if activity is not None else mpi.activity)
        self.mpi, self.node = mpi, node
        self._small_bytes = SMALL_BYTES if small_bytes is None else small_bytes
        self._piece_bytes = piece_bytes
        if like is None:
            self._nodes = _of_every_rank(mpi, node)
            here = mpi.split(node)
            self.inner = self._join(here, small_bytes, staging_bytes, log)
        else:
            self._nodes = like._nodes
            self.inner = like.inner.duplicate()
        members = [rank for rank, other in enumerate(self._nodes) if other == node]
        self.inner.names = members
        self._first, self._last = members[0], members[-1]
        smallest = min(Counter(self._nodes).values())
        self._owns = self.inner.rank < smallest
        self._idle = self.inner.size - smallest  # ranks of this node that own no slice
        self._in_order = list(self._nodes) == sorted(self._nodes)
        self._slices = smallest
        self._firsts = [self._nodes.index(other) for other in range(max(self._nodes) + 1)]
        if like is None:
            self.owners = Owners(mpi.split(min(self.inner.rank, smallest)), piece_bytes)
        else:
            self.owners = like.owners.duplicate()
        self.way = self.inner.way

    def _join(
        self, here: MpiCommunicator, small_bytes: int | None, staging_bytes: int, log: Log
    ) -> SharedMemoryCommunicator:
        """Return the communicator of this node, or raise on all ranks if any node has none."""
        error: CommunicationError | None = None
        inner: SharedMemoryCommunicator | None = None
        try:
            reason = unordered()
            if reason is not None:
                raise CommunicationError(f"shared memory: {reason}")
            inner = SharedMemoryCommunicator(
                here, self.activity, small_bytes=small_bytes, piece_bytes=staging_bytes, log=log
            )
        except CommunicationError as caught:
            error = caught
        agree(self.mpi, error)
        assert inner is not None
        return inner

    def duplicate(self) -> TwoLevelCommunicator:
        return TwoLevelCommunicator(
            self.mpi.duplicate(),
            self.node,
            self.activity,
            small_bytes=self._small_bytes,
            piece_bytes=self._piece_bytes,
            like=self,
        )

    def adopt(self, lane: str) -> None:
        super().adopt(lane)
        for level in (self.inner, self.owners.mpi, self.mpi):
            level.adopt(lane)

    def close(self) -> None:
        """Free what MPI holds. **Collective.** The memory goes when its last view does."""
        self.inner.close()
        self.owners.mpi.close()
        self.mpi.close()

    def release(self) -> None:
        self.inner.release()

    def _allocate(self, nbytes: int, device: Device) -> Buffer:
        return self.inner._allocate(nbytes, device)

    # -- sums

    def reduce_numbers(self, maxima: Sequence[int], sums: Sequence[float]) -> tuple[list[int], list[float]]:
        here = self.inner.reduce_numbers(maxima, sums)
        self._enter("all_reduce", "urgent")
        try:
            record = struct.Struct(f"={len(maxima)}q{len(sums)}d")
            rows = np.zeros((len(self._firsts), record.size), dtype=np.uint8)
            if self._owns:
                mine = np.frombuffer(record.pack(*here[0], *here[1]), dtype=np.uint8)
                rows[...] = self.owners.gather(mine, "urgent")
            if self._idle and record.size:
                self.inner._broadcast(rows.reshape(-1), 0, "urgent")
        finally:
            self.activity.leave()
        of_node = [record.unpack(row.tobytes()) for row in rows]
        most: Iterable[int] = of_node[0][: len(maxima)]
        total: Iterable[float] = of_node[0][len(maxima) :]
        for values in of_node[1:]:
            most, total = (
                map(max, most, values[: len(maxima)]),
                map(add, total, values[len(maxima) :]),
            )
        return list(most), list(total)

    def _all_reduce(self, array: Any, op: str, lane: str) -> None:
        if _widens(array, op):
            self._widened(array, lambda wide, _: self._all_reduce(wide, op, lane))
        elif array.nbytes <= self._small_bytes:
            self.inner._all_reduce(array, op, lane)
            if self._owns:
                self.owners.all_reduce_small(array, op, lane)
            if self._idle:
                self.inner._broadcast(array, 0, lane)
        else:
            bounds, own = self._cut(array)
            self.inner._reduce_scatter(array, bounds, op, lane)
            if own.size:
                self.owners.all_reduce(own, op, lane)
            self.inner._all_gather(array, bounds, lane)

    def _reduce(self, array: Any, op: str, root: int, lane: str) -> None:
        if _widens(array, op):
            self._widened(array, lambda wide, _: self._reduce(wide, op, root, lane))
            return
        bounds, own = self._cut(array)
        self.inner._reduce_scatter(array, bounds, op, lane)
        if own.size:
            self.owners.reduce(own, op, self._nodes[root], lane)
        if self.node == self._nodes[root]:
            self.inner._all_gather(array, bounds, lane)

    def _reduce_scatter(self, array: Any, bounds: Sequence[int], op: str, lane: str) -> None:
        if _widens(array, op):

            def reduce_piece(wide: np.ndarray, at: int) -> None:
                self._reduce_scatter(wide, _within(bounds, at, at + wide.size), op, lane)

            self._widened(array, reduce_piece)
            return
        if not self._in_order:  # a node's ranks need ranges that lie apart
            self._all_reduce(array, op, lane)
            return
        cut, own = self._cut(array)
        self.inner._reduce_scatter(array, cut, op, lane)
        if own.size:
            self.owners.reduce_scatter(own, self._of_nodes(bounds, cut), op, lane)
        start, stop = bounds[self._first], bounds[self._last + 1]
        if stop > start:
            self.inner._all_gather(array[start:stop], _within(cut, start, stop), lane)

    # -- copies

    def _broadcast(self, array: Any, root: int, lane: str) -> None:
        here = self.node == self._nodes[root]
        if here:
            self.inner._broadcast(array, local_rank_of(self._nodes, root), lane)
        bounds, own = self._cut(array)
        if own.size:
            self.owners.broadcast(own, self._nodes[root], lane)
        if not here:
            self.inner._all_gather(array, bounds, lane)

    def _all_gather(self, array: Any, bounds: Sequence[int], lane: str) -> None:
        if not self._in_order:
            self.mpi._all_gather(array, bounds, lane)
            return
        start, stop = bounds[self._first], bounds[self._last + 1]
        if stop > start:
            own_bounds = [bound - start for bound in bounds[self._first : self._last + 2]]
            self.inner._all_gather(array[start:stop], own_bounds, lane)
        cut, own = self._cut(array)
        if own.size:
            self.owners.all_gather(own, self._of_nodes(bounds, cut), lane)
        self.inner._all_gather(array, cut, lane)

    def _exclusive_sum(self, value: int, lane: str) -> int:
        return self.mpi._exclusive_sum(value, lane)

    def _barrier(self, lane: str) -> None:
        self.inner._barrier(lane)
        if self.inner.rank == 0:
            self.owners.mpi._barrier(lane)
        self.inner._barrier(lane)

    def _send(self, array: Any, to: int, lane: str) -> None:
        self.mpi._send(array, to, lane)

    def _recv(self, array: Any, source: int, lane: str) -> None:
        self.mpi._recv(array, source, lane)

    # -- ranges

    def _cut(self, array: Any) -> tuple[list[int], Any]:
        """Return what each rank of this node owns of an array, as bounds, and this rank's slice."""
        bounds = [*slices(array.size, array.itemsize, self._slices), *[array.size] * self._idle]
        return bounds, array[bounds[self.inner.rank] : bounds[self.inner.rank + 1]]

    def _of_nodes(self, bounds: Sequence[int], cut: Sequence[int]) -> list[int]:
        """Return what each node has of this rank's slice, where ``bounds`` says what each rank has of the array."""
        of_nodes = [*(bounds[first] for first in self._firsts), bounds[-1]]
        return _within(of_nodes, cut[self.inner.rank], cut[self.inner.rank + 1])

    def _widened(self, array: Any, call: Callable[[np.ndarray, int], None]) -> None:
        """Run a sum on float32 copies of the pieces of an array of 16-bit floats; it is told where each begins."""
        count = max(1, self._piece_bytes // 4)
        for i in range(0, array.size, count):
            piece = array[i : i + count]
            wide = piece.astype(np.float32)
            call(wide, i)
            with np.errstate(all="ignore"):  # too large for the narrow type is infinity, as everywhere
                piece[...] = wide.astype(array.dtype)


def _of_every_rank(mpi: MpiCommunicator, node: int) -> tuple[int, ...]:
    """Return the node of each rank. **Collective.**"""
    nodes = np.zeros(mpi.size, dtype=np.int64)
    nodes[mpi.rank] = node
    mpi.all_gather(nodes, range(mpi.size + 1), lane="urgent")
    return tuple(nodes.tolist())


def local_rank_of(nodes: Sequence[int], rank: int) -> int:
    """Return the local rank of a rank, from the node of each. **Local.**

    Example:
        >>> local_rank_of((0, 1, 0, 1), 2)
        1
    """
    return nodes[:rank].count(nodes[rank])


def _widens(array: Any, op: str) -> bool:
    return op == "sum" and array.dtype in _HALVES


def _within(bounds: Sequence[int], start: int, stop: int) -> list[int]:
    """Return bounds as seen from a range: cut off at its ends, counted from its start."""
    return [min(max(bound, start), stop) - start for bound in bounds]
