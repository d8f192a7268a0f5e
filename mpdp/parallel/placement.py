"""Placement: which rank updates which elements, and how gradients come to it and weights leave it.

``replicated``: every rank updates everything, from all-reduced gradients. ``root``: rank 0 does, from gradients reduced
to it, and broadcasts the weights. ``sharded``: rank r updates the r-th slice of each chunk, between a reduce-scatter
and an all-gather. It knows chunks and ranks; read ``reducer`` for gradients and ``replica`` for weights and state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from .. import kernels
from ..comm.base import Communicator, Request
from .layout import SPAN

PLACEMENTS = ("replicated", "root", "sharded")


class Placement:
    """Who holds the optimizer's state, for one chunk table.

    **Local.** Equal on all ranks when built from equal arguments. With one rank every placement is ``replicated``.

    Args:
        name: one of ``PLACEMENTS``.
        chunks: (start, stop) element ranges, cut at spans of 4096.
        comm: the ranks.

    Attributes:
        whole: every rank updates everything.
        held: ranges that this rank updates, one a chunk where it has any; None for the whole.

    Raises:
        ValueError: no such placement.

    Example:
        >>> class Three:
        ...     rank, size = 1, 3
        >>> Placement("sharded", [(0, 4 * 4096), (4 * 4096, 5 * 4096)], Three()).held
        ((4096, 8192),)
        >>> Placement("root", [(0, 4096)], Three()).held
        ()
    """

    def __init__(self, name: str, chunks: Sequence[tuple[int, int]], comm: Communicator) -> None:
        check(name)
        self.name = name
        self._comm = comm
        self._chunks = tuple(chunks)
        self._size = self._chunks[-1][1] if chunks else 0
        self.whole = name == "replicated" or comm.size == 1
        self._bounds = [self._cut(start, stop) for start, stop in chunks]
        self._own = [
            (start + bounds[comm.rank], start + bounds[comm.rank + 1])
            for (start, _), bounds in zip(chunks, self._bounds)
        ]
        self.held = None if self.whole else tuple((start, stop) for start, stop in self._own if stop > start)

    def _cut(self, start: int, stop: int) -> tuple[int, ...]:
        """Return who updates a chunk: rank r its elements from bound r to bound r + 1."""
        size, length = self._comm.size, stop - start
        if self.name == "root":
            return (0, *[length] * size)
        return tuple(length // SPAN * rank // size * SPAN for rank in range(size + 1))

    def start_reducing(self, view: Any, chunk: int) -> Request:
        """Start to sum a chunk of the gradients where it is used. **Collective.**"""
        if self.whole:
            return self._comm.start_all_reduce(view)
        if self.name == "sharded":
            return self._comm.start_reduce_scatter(view, self._bounds[chunk])
        self._comm.reduce(view)
        return Request()

    def start_giving(self, view: Any, chunk: int) -> Request:
        """Start to give all ranks a chunk of what its owners have written. **Collective.**"""
        if self.name == "sharded":
            return self._comm.start_all_gather(view, self._bounds[chunk])
        self._comm.broadcast(view)
        return Request()

    def update(self, views: Sequence[Any], apply: Callable[[int, int], None]) -> None:
        """Apply an update where this rank does it, and give all ranks the result chunk by chunk.

        **Collective** unless :attr:`whole`.

        Args:
            views: the chunks of what is written and given away.
            apply: ``apply(start, stop)`` updates a range.
        """
        if self.whole:
            apply(0, self._size)
            return
        requests = []
        for chunk, (start, stop) in enumerate(self._own):
            if stop > start:
                apply(start, stop)
            requests.append(self.start_giving(views[chunk], chunk))
        for request in requests:
            request.wait()

    def give(self, views: Sequence[Any]) -> list[Request]:
        """Start to give all ranks what an update has written, the last chunk first. **Collective.**

        Args:
            views: the chunks of what was written.

        Returns:
            a request for each chunk, in the order of chunks.
        """
        return [self.start_giving(views[chunk], chunk) for chunk in reversed(range(len(views)))][::-1]

    def collect(self, flat: Any) -> np.ndarray | None:
        """Return on rank 0 the whole of an array that ranks hold their ranges of, in host memory; None elsewhere.

        **Collective.** Each byte crosses once. On a CPU it is the array itself where every rank has the whole.

        Args:
            flat: indexed by elements of the trainable zone, as a slot of an optimizer bound to :attr:`held`.
        """
        comm, host = self._comm, kernels.of(flat).to_numpy
        if self.whole:
            return host(flat) if comm.rank == 0 else None
        full = np.zeros(self._size, flat.dtype) if comm.rank == 0 else None
        for rank, start, stop in self._owned():
            if rank == comm.rank:
                part = host(flat[start:stop])
                if full is not None:
                    full[start:stop] = part
                else:
                    comm.send(np.ascontiguousarray(part), to=0)
            elif full is not None:
                comm.recv(full[start:stop], source=rank)
        return full

    def hand_out(self, full: np.ndarray | None, flat: Any) -> None:
        """Undo :meth:`collect`: fill the ranges that each rank holds from what rank 0 has. **Collective.**

        Args:
            full: on rank 0 the whole in host memory, None elsewhere.
            flat: what is filled.
        """
        comm, there = self._comm, kernels.of(flat).from_host
        if self.whole:
            if full is not None:
                flat[...] = there(full)
            comm.broadcast(flat)
            return
        for rank, start, stop in self._owned():
            if comm.rank == 0:
                assert full is not None
                if rank == 0:
                    flat[start:stop][...] = there(full[start:stop])
                else:
                    comm.send(full[start:stop], to=rank)
            elif rank == comm.rank:
                part = np.empty(stop - start, flat.dtype)
                comm.recv(part, source=0)
                flat[start:stop][...] = there(part)

    def _owned(self) -> list[tuple[int, int, int]]:
        """Return (rank, start, stop) of all ranges in order."""
        return [
            (rank, start + a, start + b)
            for (start, _), bounds in zip(self._chunks, self._bounds)
            for rank, (a, b) in enumerate(pairwise(bounds))
            if b > a
        ]


def check(name: Any) -> None:
    """Refuse what is no placement. **Local.**"""
    if name not in PLACEMENTS:
        raise ValueError(
            f"placement: expected one of {', '.join(PLACEMENTS)}, got {name!r}; replicated is the default"
        )
