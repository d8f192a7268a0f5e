"""The threads transport's memory: ranks that are threads of one process, and so address each other's arrays.

The simplest mapping of the direct transport, and what its algorithm is tested with. Waiting releases the GIL.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from typing import Any

import numpy as np

from ..device import CPU, Device
from .activity import Activity
from .base import LANES, Buffer, host_memory
from .direct import DirectCommunicator
from .lane import PIECE_BYTES, Lane, lane_bytes
from .lane import small_bytes as default_small_bytes
from .regions import Regions


class Meeting:
    """Where the threads of one world find each other.

    **Local** to construct, by one thread for all.

    Args:
        size: threads.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.mail: defaultdict[tuple[int, int, str], queue.SimpleQueue[np.ndarray]] = defaultdict(
            queue.SimpleQueue
        )
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return what every rank brought. **Collective.**"""
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values

    def abort(self) -> None:
        """Make every exchange that is waited for, or comes, raise. **Local.**"""
        self._barrier.abort()


class ThreadCommunicator(DirectCommunicator):
    """Carry arrays between threads of one process.

    **Collective**, each rank in its own thread.

    Args:
        meeting: the same object on all ranks.
        rank: this thread's.
        activity: what a watchdog of the thread looks at.
    """

    transport = "threads"

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        activity: Activity | None = None,
        *,
        regions: Regions | None = None,
        small_bytes: int | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        activity = activity if activity is not None else Activity()
        self._meeting = meeting
        small_bytes = small_bytes if small_bytes is not None else default_small_bytes(meeting.size)
        self._cuts = {"small_bytes": small_bytes, "piece_bytes": piece_bytes}
        lanes = {}
        for lane in LANES:
            memory = meeting.exchange(rank, host_memory(lane_bytes(small_bytes, piece_bytes)))
            lanes[lane] = Lane(rank, memory, activity, looks=1, **self._cuts)  # looking longer holds the GIL
        super().__init__(
            rank, meeting.size, activity, lanes, regions if regions is not None else Regions(rank)
        )

    def duplicate(self) -> ThreadCommunicator:
        meeting = self._meeting.exchange(self.rank, Meeting(self.size) if self.rank == 0 else None)[0]
        return ThreadCommunicator(meeting, self.rank, self.activity, regions=self._regions, **self._cuts)

    def _allocate(self, nbytes: int, device: Device) -> Buffer:
        if device != CPU or nbytes == 0:
            return super()._allocate(nbytes, device)
        memory = host_memory(nbytes)
        places = self._meeting.exchange(self.rank, (memory, self._regions.next_number()))
        own = np.frombuffer(memory.data, dtype=np.uint8)  # apart from what the other threads hold
        parts = [own if rank == self.rank else place[0] for rank, place in enumerate(places)]
        self._regions.add(places[0][1], parts)
        return Buffer(own, nbytes, device)

    def _send(self, array: Any, to: int, lane: str) -> None:
        self._lane(lane, array)
        self._meeting.mail[self.rank, to, lane].put(array.copy())

    def _recv(self, array: Any, source: int, lane: str) -> None:
        self._lane(lane, array)
        array[...] = self._meeting.mail[source, self.rank, lane].get()
