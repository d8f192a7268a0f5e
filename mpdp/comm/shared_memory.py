"""The shared-memory transport: CPU ranks of one node, whose buffers each other rank has mapped.

Gives the direct transport its memory: one segment a rank and communicator for flags, small messages and staging,
and one a rank and buffer of ``allocate()``. Where a buffer cannot be mapped it is private, and travels
through the staging area; that is said in the log. Messages between two ranks go over MPI.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..device import CPU, Device
from ..errors import CommunicationError
from .activity import Activity
from .base import LANES, Buffer
from .direct import DirectCommunicator
from .flags import looks
from .lane import PIECE_BYTES, Lane, lane_bytes
from .lane import small_bytes as default_small_bytes
from .mapping import share
from .mpi import MpiCommunicator
from .regions import Regions

Log = Callable[[str, str], None]


def silent(level: str, message: str) -> None:
    """Write nothing. **Local.**"""


class SharedMemoryCommunicator(DirectCommunicator):
    """Carry host arrays between ranks of one node through memory that all of them map.

    **Collective.** Results are bit-equal run to run and whatever the chunk size: sums are in the order of ranks.

    Args:
        mpi: the ranks, all on one node; the communicator is this one's from now on.
        activity: what the liveness ring watches.
        regions: the memory of the communicator that this one is a duplicate of.
        small_bytes: messages up to here take one phase (default: by the number of ranks).
        piece_bytes: what travels through the staging area at once.
        chunk_bytes: see :class:`Communicator`.
        log: writes a level and a line, once for the job.

    Attributes:
        way: how the memory is mapped, ``"memfd"`` or ``"window"``.

    Raises:
        CommunicationError: on all ranks, when they cannot map each other's memory.
    """

    transport = "shared_memory"

    def __init__(
        self,
        mpi: MpiCommunicator,
        activity: Activity | None = None,
        *,
        regions: Regions | None = None,
        small_bytes: int | None = None,
        piece_bytes: int = PIECE_BYTES,
        chunk_bytes: int | None = None,
        log: Log = silent,
    ) -> None:
        activity = activity if activity is not None else mpi.activity
        self.mpi, self._log = mpi, log
        small_bytes = small_bytes if small_bytes is not None else default_small_bytes(mpi.size)
        self._small_bytes, self._piece_bytes = small_bytes, piece_bytes
        self.chunk_bytes = chunk_bytes if chunk_bytes is not None else self.chunk_bytes
        each = lane_bytes(small_bytes, piece_bytes)
        self._segment = share(mpi, each * len(LANES))
        self.way = self._segment.way
        lanes = {
            lane: Lane(
                mpi.rank,
                [part[i * each : (i + 1) * each] for part in self._segment.parts],
                activity,
                looks=looks(mpi.size),
                small_bytes=small_bytes,
                piece_bytes=piece_bytes,
            )
            for i, lane in enumerate(LANES)
        }
        super().__init__(
            mpi.rank, mpi.size, activity, lanes, regions if regions is not None else Regions(mpi.rank)
        )

    def duplicate(self) -> SharedMemoryCommunicator:
        return SharedMemoryCommunicator(
            self.mpi.duplicate(),
            self.activity,
            regions=self._regions,
            small_bytes=self._small_bytes,
            piece_bytes=self._piece_bytes,
            chunk_bytes=self.chunk_bytes,
            log=self._log,
        )

    def adopt(self, lane: str) -> None:
        super().adopt(lane)
        self.mpi.adopt(lane)

    def _allocate(self, nbytes: int, device: Device) -> Buffer:
        if device != CPU or nbytes == 0:
            return super()._allocate(nbytes, device)
        try:
            mapped = share(self.mpi, nbytes, self._regions.next_number())
        except CommunicationError as error:
            self._log("warning", f"a buffer of {nbytes} bytes is private and will be copied: {error}")
            return super()._allocate(nbytes, device)
        own = mapped.parts[self.rank]
        self._regions.add(mapped.number, mapped.parts)
        return Buffer(own[:nbytes], nbytes, device)

    def _send(self, array: Any, to: int, lane: str) -> None:
        self.mpi._send(array, to, lane)

    def _recv(self, array: Any, source: int, lane: str) -> None:
        self.mpi._recv(array, source, lane)

    def close(self) -> None:
        """Free what MPI holds. **Collective.** The memory goes when its last view does."""
        self.mpi.close()
