"""Masters: the float32 weights of a sharded replica under 16 bits, which each rank keeps its own ranges of.

All ranks have the working copies, which forward reads, and that is what travels. A few operations read float32 weights
(norms, a cast): those of parameters with one axis at most are kept whole beside the copies, in one small buffer that
every update fills anew. Frozen parameters are whole on every rank, since nobody updates them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import kernels
from ..comm.base import Communicator
from ..device import Device
from ..optim.held import HeldArray
from .layout import Layout
from .placement import Placement


class Masters:
    """Keep the ranges of the masters that this rank updates.

    **Collective** to construct.

    Args:
        layout: the index space.
        placement: who updates what.
        comm: the ranks.
        device: where the arrays lie.
        dtype: of the masters.

    Attributes:
        held: the ranges of this rank and the frozen zone.
    """

    def __init__(
        self, layout: Layout, placement: Placement, comm: Communicator, device: Device, dtype: Any
    ) -> None:
        assert placement.held is not None
        self._layout, self._placement, self._comm = layout, placement, comm
        self._kernels: Any = kernels.for_device(device)
        ranges = list(placement.held)
        if layout.size > layout.trainable_size:
            ranges.append((layout.trainable_size, layout.size))
        size = sum(stop - start for start, stop in ranges)
        memory = self._kernels.flat_zeros(size + 1, dtype)  # the last one stays 0
        self.held = HeldArray(ranges, memory[:size])
        small = [entry for entry in layout.trainable if len(entry.shape) <= 1]
        self._places: dict[str, int] = {}
        sources = []
        count = 0
        for entry in small:
            self._places[entry.name] = count
            count += entry.stop - entry.start
            sources.append(np.arange(entry.start, entry.stop))
        self._buffer = comm.allocate(count * np.dtype(dtype).itemsize, device)
        self._wide = self._buffer.array(dtype, count)
        self._bits = self._buffer.array(np.int32, count)
        self._memory = memory
        self._index = self._kernels.from_host(self._places_of(sources, size))

    def fill(self, whole: Any) -> None:
        """Take over masters over the whole layout, which have the same values on every rank. **Collective.**"""
        for (start, stop), part in zip(self.held.ranges, self.held.parts()):
            part[...] = whole[start:stop]
        self.share()

    def _places_of(self, sources: list[np.ndarray], absent: int) -> np.ndarray:
        """Return where the elements of the small parameters lie in the memory of this rank."""
        elements = np.concatenate(sources) if sources else np.zeros(0, np.int64)
        found = np.full(len(elements), absent, np.int64)
        place = 0
        for start, stop in self.held.ranges:
            inside = (elements >= start) & (elements < stop)
            found[inside] = elements[inside] - start + place
            place += stop - start
        return found

    @property
    def nbytes(self) -> int:
        """Bytes that this rank takes for masters."""
        return self.held.nbytes + int(self._wide.nbytes)

    def wide(self, name: str) -> Any:
        """Return a small parameter's master, whole on every rank; None for others. **Local.**"""
        place = self._places.get(name)
        if place is None:
            return None
        entry = self._layout[name]
        return self._wide[place : place + entry.stop - entry.start].reshape(entry.shape)

    def share(self) -> None:
        """Give all ranks the small parameters' masters. **Collective.**"""
        if self._wide.size:
            self._kernels.xp.take(self._memory, self._index, out=self._wide)
            # Zeros from all ranks but the owner: as integers, since a sum of floats would turn -0.0 into 0.0.
            self._comm.all_reduce(self._bits)

    def collect(self, flat: HeldArray | None = None) -> np.ndarray | None:
        """Return the masters over the whole layout in host memory on rank 0, None elsewhere. **Collective.**

        Args:
            flat: an array with the same ranges, in place of the masters.
        """
        held = self.held if flat is None else flat
        trained = self._placement.collect(held)
        if trained is None:
            return None
        end = self._layout.trainable_size
        whole = np.zeros(self._layout.size, trained.dtype)
        whole[:end] = trained
        if self._layout.size > end:
            whole[end:] = self._kernels.to_numpy(held[end : self._layout.size])
        return whole
