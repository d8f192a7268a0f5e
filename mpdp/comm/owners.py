"""Owners: the ranks that hold the same slice on each node, and what they do with it between nodes.

One rank of each node; its rank here is its node. Sums are in the order of nodes, whatever the length or the piece,
because MPI's own all-reduce keeps no order: each node gets its range of the slice from all others, adds, and gives the
sum to them. That moves as many bytes as the best all-reduce does. Messages travel in pieces, see ``mpi``.
Read ``two_level`` for the rest of the nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from .base import LANES
from .blocks import Combiner, slices
from .mpi import MpiCommunicator

_ROOM_BYTES = 16 << 20  # for what comes from all other nodes at once
_SHORTEST = 64 << 10  # bytes of a piece, however many nodes there are
_LINE = 64


class Owners:
    """Reduce and pass on one slice between nodes.

    **Collective** over the owners of the slice. Holds scratch memory for each lane.

    Args:
        mpi: one rank a node, in the order of nodes; it belongs to this object from now on.
        piece_bytes: largest message of one MPI call, in bytes.
    """

    def __init__(self, mpi: MpiCommunicator, piece_bytes: int) -> None:
        self.mpi = mpi
        self.node, self.nodes = mpi.rank, mpi.size
        self._others = [(self.node + i) % self.nodes for i in range(1, self.nodes)]
        self._piece_bytes = min(piece_bytes, max(_SHORTEST, _ROOM_BYTES // self.nodes))
        self._combiners = {lane: Combiner() for lane in LANES}
        self._rooms = {lane: np.empty(0, dtype=np.uint8) for lane in LANES}

    def gather(self, mine: np.ndarray, lane: str) -> np.ndarray:
        """Return each node's copy of a few bytes (uint8, equally many on all), one a row."""
        gathered = np.empty((self.nodes, mine.size), dtype=np.uint8)
        self.mpi.gather_rows(mine, gathered, lane)
        return gathered

    def all_reduce_small(self, part: Any, op: str, lane: str) -> None:
        """Replace the array by the sum or maximum over nodes, in one message: everybody adds everything."""
        rows = self.gather(part.view(np.uint8), lane)
        self._combiners[lane].combine(op, [row.view(part.dtype) for row in rows], [part], 0, part.size)

    def all_reduce(self, part: Any, op: str, lane: str) -> None:
        """Replace the array by the sum or maximum over nodes."""
        bounds = slices(part.size, part.itemsize, self.nodes)
        self.reduce_scatter(part, bounds, op, lane)
        self.all_gather(part, bounds, lane)

    def reduce(self, part: Any, op: str, root: int, lane: str) -> None:
        """Replace the array on node ``root`` by the sum or maximum over nodes."""
        bounds = slices(part.size, part.itemsize, self.nodes)
        self.reduce_scatter(part, bounds, op, lane)
        self._pass_on(part, bounds, [root], lane)

    def reduce_scatter(self, part: Any, bounds: Sequence[int], op: str, lane: str) -> None:
        """Leave ``part[bounds[m]:bounds[m+1]]`` of the sum or maximum on node m; the rest stays what it was."""
        own = part[bounds[self.node] : bounds[self.node + 1]]
        step = self._step(part)
        room = self._room(lane, min(step, own.size) * part.itemsize)
        for i in range(0, _longest(bounds), step):
            mine = own[i : i + step]
            sources = [row[: mine.nbytes].view(part.dtype) for row in room]
            sources[self.node] = mine
            self.mpi.swap(
                [(node, _piece(part, bounds, node, i, step)) for node in self._others],
                [(node, sources[node]) for node in self._others],
                lane,
            )
            self._combiners[lane].combine(op, sources, [mine], 0, mine.size)

    def all_gather(self, part: Any, bounds: Sequence[int], lane: str) -> None:
        """Copy ``part[bounds[m]:bounds[m+1]]`` of each node m to all nodes."""
        self._pass_on(part, bounds, range(self.nodes), lane)

    def broadcast(self, part: Any, root: int, lane: str) -> None:
        """Replace the array on every node by that of node ``root``."""
        self.mpi._broadcast(part, root, lane)

    def _pass_on(self, part: Any, bounds: Sequence[int], to: Sequence[int], lane: str) -> None:
        """Send this node's range to some nodes, which get those of all."""
        step = self._step(part)
        sources = self._others if self.node in to else []
        for i in range(0, _longest(bounds), step):
            mine = _piece(part, bounds, self.node, i, step)
            self.mpi.swap(
                [(node, mine) for node in self._others if node in to],
                [(node, _piece(part, bounds, node, i, step)) for node in sources],
                lane,
            )

    def _step(self, part: Any) -> int:
        return max(1, self._piece_bytes // part.itemsize)

    def _room(self, lane: str, nbytes: int) -> np.ndarray:
        """Return scratch memory of so many bytes a node, one node a row, on cache lines."""
        row = -(-nbytes // _LINE) * _LINE
        if self._rooms[lane].size < row * self.nodes:
            self._rooms[lane] = np.empty(row * self.nodes, dtype=np.uint8)
        return self._rooms[lane][: row * self.nodes].reshape(self.nodes, row)

    def duplicate(self) -> Owners:
        """Return owners of the same slice whose messages never match these. **Collective.**"""
        return Owners(self.mpi.duplicate(), self._piece_bytes)


def _longest(bounds: Sequence[int]) -> int:
    return max(stop - start for start, stop in pairwise(bounds))


def _piece(part: Any, bounds: Sequence[int], node: int, i: int, step: int) -> Any:
    """Return the piece at ``i`` of a node's range; it is empty behind its end."""
    stop = bounds[node + 1]
    return part[min(bounds[node] + i, stop) : min(bounds[node] + i + step, stop)]
