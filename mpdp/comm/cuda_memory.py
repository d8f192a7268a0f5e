"""Device memory that several processes have mapped: shared once, found again by address, given back in order.

One object serves a communicator and its duplicates. Memory lies outside of CuPy's pool, since a handle of CUDA covers a
whole allocation. What a rank no longer holds a view of is remembered, and given back in the next collective
allocation in which all ranks say so: freeing memory that another process has open is not defined.
Knows ranks and addresses; what the memory is for is told by ``cuda_ipc``.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from .agreement import together
from .base import Buffer, Communicator
from .cuda_gpu import CudaGpu

PLACE_BITS = 44  # of an offset in a region, as in direct.cu
MOST_REGIONS = 256


def share(host: Communicator, gpu: CudaGpu, nbytes: int) -> list[int]:
    """Map ``nbytes`` of every rank's GPU into every rank, and return the addresses by rank.

    **Collective.** The memory is zeroed on all ranks when it returns.

    Raises:
        DeviceError: on all ranks, when one has not enough memory or cannot map another's.
    """
    own: list[int] = []
    opened: dict[int, int] = {}

    def allocate() -> bytes:
        own.append(gpu.allocate(nbytes))
        return gpu.export(own[0])

    def open_all() -> None:
        for rank, handle in enumerate(handles):
            if rank != host.rank:
                opened[rank] = gpu.open(handle)

    try:
        handles = host.all_gather_bytes(together(host, allocate))
        together(host, open_all)
    except Exception:
        for pointer in opened.values():
            gpu.close(pointer)
        for pointer in own:
            gpu.free(pointer)
        raise
    return [opened.get(rank, own[0]) for rank in range(host.size)]


class _Hold:
    """What the views of a region keep alive."""


class _Region:
    def __init__(self, pointers: list[int], rank: int, nbytes: int) -> None:
        self.pointers = pointers
        self.start, self.stop = pointers[rank], pointers[rank] + nbytes


class GpuMemory:
    """The memory of a family of communicators over the same ranks.

    **Local** to construct.

    Attributes:
        halt: address of the halt latch: a word in device memory, 1 once a collective was broken off.
        regions: address of the table that kernels look regions up in.
        version: changes when a region comes or goes.
    """

    def __init__(self, rank: int, size: int, gpu: CudaGpu) -> None:
        self.rank, self.size, self.gpu = rank, size, gpu
        self._lock = threading.Lock()
        self._table = np.zeros((MOST_REGIONS, size), dtype=np.uint64)
        self._regions: dict[int, _Region] = {}
        self._numbers = set(range(1, MOST_REGIONS))  # that no region has; rank 0's are the ones to use
        self._unused: set[int] = set()  # regions without a view on this rank
        self._opened: list[int] = []  # other ranks' memory, in the order in which it was opened
        self._own: dict[int, int] = {}  # address of this rank's memory -> bytes
        self.version = 0
        self.regions = gpu.allocate(self._table.nbytes + 16)
        self.halt = self.regions + self._table.nbytes

    def share(self, host: Communicator, nbytes: int) -> list[int]:
        """Do what :func:`share` does, and remember to give it back. **Collective.**"""
        pointers = share(host, self.gpu, nbytes)
        with self._lock:
            self._own[pointers[self.rank]] = nbytes
            self._opened += [pointer for rank, pointer in enumerate(pointers) if rank != self.rank]
        return pointers

    def allocate(self, host: Communicator, nbytes: int) -> Buffer:
        """Return memory of this rank that all ranks have mapped. **Collective.**

        Raises:
            DeviceError: on all ranks, when there is not enough.
            ValueError: on all ranks, when they hold too many buffers.
        """
        number = self._agree(host)
        pointers = self.share(host, nbytes)
        hold = _Hold()
        with self._lock:
            self._regions[number] = _Region(pointers, self.rank, nbytes)
            self._table[number] = pointers
            self.version += 1
            table = self._table.copy()
        self.gpu.write(self.regions, table)
        weakref.finalize(hold, self._unused.add, number).atexit = False
        own = pointers[self.rank]
        return Buffer(self.gpu.array(own, nbytes, hold), nbytes, self.gpu.device)

    def _agree(self, host: Communicator) -> int:
        """Give back the regions that no rank uses any more, and return a number for the next one."""
        with self._lock:
            unused = sorted(self._unused)
            number = min(self._numbers, default=0)
            self._numbers.discard(number)
        texts = host.all_gather_bytes(json.dumps([unused, number]).encode())
        said = [json.loads(text) for text in texts]
        released = set.intersection(*(set(numbers) for numbers, _ in said))
        if released:
            self._give_back(host, released)
        with self._lock:
            self._numbers.add(number)
            chosen = said[0][1] or min(self._numbers, default=0)
            self._numbers.discard(chosen)

        def check() -> int:
            if not chosen:
                raise ValueError(
                    f"buffers: expected at most {MOST_REGIONS - 1} on a GPU at once, got one more; free some"
                )
            return chosen

        return together(host, check)

    def _give_back(self, host: Communicator, numbers: set[int]) -> None:
        self.gpu.synchronize()  # a kernel may still be on its way
        with self._lock:
            regions = [self._regions.pop(number) for number in sorted(numbers)]
            self._unused -= numbers
            self.version += 1
        for region in regions:
            self._close([pointer for rank, pointer in enumerate(region.pointers) if rank != self.rank])
        host.barrier()  # nobody has it open any more
        with self._lock:
            for region in regions:
                del self._own[region.start]
            self._numbers |= numbers
        for region in regions:
            self.gpu.free(region.start)

    @property
    def held_bytes(self) -> int:
        """Bytes of this rank's GPU that it has taken, in lanes and in buffers that are not given back yet."""
        with self._lock:
            return self._table.nbytes + 16 + sum(self._own.values())

    def place(self, array: Any) -> int:
        """Return where an array lies, as kernels of all ranks understand it; 0 if in no region. **Local.**"""
        start = array.data.ptr
        stop = start + array.nbytes
        for number, region in tuple(self._regions.items()):
            if region.start <= start and stop <= region.stop:
                return number << PLACE_BITS | (start - region.start)
        return 0

    def close(self, pointers: list[int], wait: Callable[[], None]) -> None:
        """Unmap the other ranks' parts of shared memory, and free this rank's when all have done so.

        **Collective** if ``wait`` is a barrier.

        Args:
            pointers: what :meth:`share` gave.
            wait: returns once every rank has unmapped them.
        """
        self._close([pointer for rank, pointer in enumerate(pointers) if rank != self.rank])
        wait()
        with self._lock:
            del self._own[pointers[self.rank]]
        self.gpu.free(pointers[self.rank])

    def _close(self, pointers: list[int]) -> None:
        for pointer in reversed(pointers):
            with self._lock:
                if pointer not in self._opened:
                    continue
                self._opened.remove(pointer)
            self.gpu.close(pointer)

    def release(self) -> None:
        """Unmap what other ranks gave, last first. **Local.** What is this rank's goes with the process."""
        self._close(list(self._opened))

    def __len__(self) -> int:
        return len(self._regions)
