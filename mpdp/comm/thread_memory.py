"""The threads transport's memory: ranks that are threads of one process, and so address each other's arrays.

The simplest mapping of the direct transport, and what its algorithm is tested with. Waiting releases the GIL.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import defaultdict
from typing import Any

import numpy as np

from ..device import CPU, Device
from .activity import Activity, secondary
from .base import LANES, Buffer, host_memory
from .direct import DirectCommunicator
from .lane import PIECE_BYTES, Lane, lane_bytes
from .lane import small_bytes as default_small_bytes
from .regions import Regions

_LOOK = 0.05  # seconds between two looks for a failure while mail is waited for


class Meeting:
    """Where the threads of one world find each other.

    **Local** to construct, by one thread for all.

    Args:
        size: threads.

    Attributes:
        since: by rank, ``time.monotonic()`` since when it waits in an exchange; None if it does not.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.mail: defaultdict[tuple[int, int, str], queue.SimpleQueue[np.ndarray]] = defaultdict(
            queue.SimpleQueue
        )
        self.since: list[float | None] = [None] * size
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)
        self._duplicates: weakref.WeakSet[Meeting] = weakref.WeakSet()

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return what every rank brought.

        **Collective.**

        Raises:
            RankFailedError: a rank has failed.
        """
        self._values[rank] = value
        self.since[rank] = time.monotonic()
        try:
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise secondary(
                "threads: expected all ranks alive, got a failure; see the first report, this job is ending"
            ) from None
        finally:
            self.since[rank] = None
        return values

    def duplicate(self, rank: int) -> Meeting:
        """Return a meeting of the same threads, the same object on all ranks. **Collective.**"""
        mine = None
        if rank == 0:
            mine = Meeting(self.size)
            self._duplicates.add(mine)
        made: Meeting = self.exchange(rank, mine)[0]
        return made

    def waits(self, rank: int) -> float | None:
        """Return since when a rank waits in an exchange, here or in a duplicate. **Local**, any thread."""
        found = self.since[rank]
        for meeting in tuple(self._duplicates):
            found = found if found is not None else meeting.waits(rank)
        return found

    def abort(self) -> None:
        """Make every exchange that is waited for, or comes, raise; also in duplicates. **Local.**"""
        self._barrier.abort()
        for meeting in tuple(self._duplicates):
            meeting.abort()


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
        self.meeting = meeting
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
        meeting = self.meeting.duplicate(self.rank)
        return ThreadCommunicator(meeting, self.rank, self.activity, regions=self._regions, **self._cuts)

    def _allocate(self, nbytes: int, device: Device) -> Buffer:
        if device != CPU or nbytes == 0:
            return super()._allocate(nbytes, device)
        memory = host_memory(nbytes)
        places = self.meeting.exchange(self.rank, (memory, self._regions.next_number()))
        own = np.frombuffer(memory.data, dtype=np.uint8)  # apart from what the other threads hold
        parts = [own if rank == self.rank else place[0] for rank, place in enumerate(places)]
        self._regions.add(places[0][1], parts)
        return Buffer(own, nbytes, device)

    def _send(self, array: Any, to: int, lane: str) -> None:
        self._lane(lane, array)
        self.meeting.mail[self.rank, to, lane].put(array.copy())

    def _recv(self, array: Any, source: int, lane: str) -> None:
        self._lane(lane, array)
        mail = self.meeting.mail[source, self.rank, lane]
        while True:
            try:
                array[...] = mail.get(timeout=_LOOK)
                return
            except queue.Empty:
                self.activity.check("recv")
