"""What a communicator between GPUs and its duplicates share, and what the ring sees of it.

Kernels report into host memory; nothing here asks the GPU, so that the ring's thread may look at any moment.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from .activity import Activity
from .cuda_lane import ABORT, GpuLane
from .cuda_memory import GpuMemory

_LEAVE = 2.0  # seconds for the last collectives, when all ranks have left
_SEEN = 1.5  # seconds in which a rank's next call raises a mismatch itself


class Family:
    """What a communicator and its duplicates share: memory, lanes, and the watch over them.

    Implements :class:`~mpdp.comm.activity.Watched`.
    """

    def __init__(self, memory: GpuMemory, activity: Activity) -> None:
        self.memory = memory
        self.lanes: list[GpuLane] = []
        self._activity = activity
        self._found: tuple[str, float] | None = None
        self._released = False
        activity.watched.append(self)

    def waiting(self) -> tuple[str, float] | None:
        for lane in tuple(self.lanes):
            found = lane.waiting()
            if found is not None:
                return found
        return None

    def mismatch(self) -> str | None:
        """Return what a collective on the device has found different between ranks. **Local.**"""
        for lane in self.lanes:
            text = lane.mismatch()
            if text is not None:
                return text
        return None

    def error(self) -> str | None:
        """Return a mismatch that no call has come to raise: its results may be in use already."""
        if self._found is None:
            text = self.mismatch()
            self._found = None if text is None else (text, time.monotonic())
        if self._found is not None and time.monotonic() - self._found[1] > _SEEN:
            return self._found[0]
        return None

    def abort(self) -> None:
        for lane in tuple(self.lanes):
            lane.host[ABORT] = 1

    def forget(self, lanes: Sequence[GpuLane]) -> None:
        """Stop watching some lanes. **Local.**"""
        self.lanes = [lane for lane in self.lanes if lane not in lanes]
        if not self.lanes and self in self._activity.watched:
            self._activity.watched.remove(self)

    def settle(self, lanes: Sequence[GpuLane], seconds: float = _LEAVE) -> bool:
        """Return whether lanes come to rest within some seconds. **Local.**"""
        deadline = time.monotonic() + seconds
        while not all(lane.idle() for lane in lanes):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def release(self) -> None:
        """Let go of what other ranks gave. **Local.** Once, when every rank has left."""
        if self._released:
            return
        self._released = True
        if not self.settle(self.lanes):
            self.abort()
            self.settle(self.lanes)
        self.forget(list(self.lanes))
        self.memory.release()
