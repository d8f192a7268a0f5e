"""Flags: counters in shared memory by which ranks wait for one another.

Each rank owns one row a lane, in memory that all ranks of the node can address. It alone writes the counters of its
row; the others read them. They only grow, but for READY, which a rank sets back when it takes back announcements that
no rank has met yet (``Lane.withdraw``). So there is nothing to reset, and no atomic operation is needed: a store to a
row is a release and a load from it an acquire, on machines that keep the order of stores and of loads. x86-64 does;
:func:`unordered` names the machines that do not, and they are refused.

A wait has three stages. It looks at the counters for some microseconds (not where ranks outnumber the cores), then
looks on while it offers its core to others (``sched_yield``), and after about a millisecond sleeps in the kernel
until the other rank wakes it (a futex). Waking takes 60 to 80 us on a virtual machine, so sleeping at once would
double the time of a small message; looking without yielding is what makes a message of an oversubscribed MPI take
milliseconds. A rank that goes to sleep marks itself in the row of the rank it waits for, so that nobody pays for a
call into the kernel when nobody sleeps. The mark may come too late to be seen (it would need a full fence), so a
sleep is bounded: it looks again after a millisecond at first, and also asks whether a rank has failed.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import cores
from .activity import Activity, secondary

READY, DONE, PHASE = 0, 8, 16  # words of a row, a cache line each: collectives entered and done, pieces
SIGNATURES, LOCATIONS = 24, 32  # words: what the last collectives were, and where their arrays lie
NOTES, VALUES = 40, 48  # words: of checked sums, what has to be equal, and each rank's number (float64)
HISTORY = 8  # collectives of which a row holds these
_SLEEPERS = 56  # bytes from this word on: who sleeps until this rank moves on
_MARKS = 64
ROW_BYTES = (_SLEEPERS + 8) * 8

LOOKS = 400  # at a counter, 50 ns each
_YIELDS = 1500  # 0.7 us each where nobody else wants the core
_FUTEX = 202  # x86-64's system call
_WAIT, _WAKE = 0, 1
_FIRST_SLEEP, _LONGEST_SLEEP = 0.001, 0.05  # seconds


def unordered() -> str | None:
    """Return why this machine cannot share counters without fences, or None where it can. **Local.**"""
    machine = platform.machine().lower()
    if machine not in ("x86_64", "amd64") or sys.platform != "linux" or sys.maxsize < 2**32:
        return f"it needs Linux on x86-64, whose stores keep their order, and this is {sys.platform} on {machine}"
    return None


def looks(ranks: int) -> int:
    """Return how often one of so many ranks of a node looks at a counter before it offers its core. **Local.**"""
    return LOOKS if ranks <= cores.on_node() else 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _system_calls() -> tuple[Any, Any]:
    library = ctypes.CDLL(None)  # its calls release the GIL, as a wait must
    call = library.syscall
    word = ctypes.c_long
    call.argtypes = (word, word, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, word, word)
    call.restype = word
    library.sched_yield.argtypes = ()
    return call, library.sched_yield


def _never() -> bool:
    return False


class Flags:
    """The counters of all ranks on one lane.

    **Local** to construct, over rows that are shared already. One thread a rank uses an object.

    Args:
        rank: whose row is this rank's own.
        rows: each rank's row, uint8 arrays of ``ROW_BYTES`` zeros, on a cache line.
        activity: where a failure of another rank shows.
        looks: how often to look at a counter before the core is offered to others.

    Attributes:
        rows: each rank's row as 64-bit words.
        own: this rank's row.
        floats: each rank's row as float64.
    """

    def __init__(self, rank: int, rows: Sequence[np.ndarray], activity: Activity, looks: int = LOOKS) -> None:
        self._memory = [row[:ROW_BYTES].view(np.int64) for row in rows]
        self.rows = [memoryview(words) for words in self._memory]  # type: ignore[arg-type]
        self.own = self.rows[rank]
        self.floats: list[Any] = [memoryview(words.view(np.float64)) for words in self._memory]  # type: ignore[arg-type]
        self.peers = [self.rows[(rank + i) % len(rows)] for i in range(1, len(rows))]
        self._activity = activity
        self._looks = looks
        self._addresses = {id(row): words.ctypes.data for row, words in zip(self.rows, self._memory)}
        self._marks = {
            id(row): words.view(np.uint8)[_SLEEPERS * 8 :] for row, words in zip(self.rows, self._memory)
        }
        self._own_address = self._addresses[id(self.own)]
        self._mark = rank % _MARKS  # ranks that share a mark may miss a call: their sleeps are bounded
        used = -(-min(len(rows), _MARKS) // 8)
        self._sleepers = range(_SLEEPERS, _SLEEPERS + used)
        self._call, self._yield = _system_calls()
        self._timespec = _Timespec()

    def post(self, word: int, value: int) -> None:
        """Set a counter of this rank and wake who sleeps on it. **Local.**"""
        own = self.own
        own[word] = value
        for sleepers in self._sleepers:
            if own[sleepers]:
                self._call(_FUTEX, self._own_address + 8 * word, _WAKE, 0x7FFFFFFF, None, 0, 0)
                return

    def reached(self, word: int, value: int) -> bool:
        """Return whether every other rank's counter has come to ``value``. **Local.**"""
        for row in self.peers:  # noqa: SIM110  all() of a generator takes 0.4 us more, several times a step
            if row[word] < value:
                return False
        return True

    def wait(self, word: int, value: int, unless: Callable[[], bool] = _never) -> bool:
        """Wait until every other rank's counter has come to ``value``.

        Args:
            unless: says that a rank will not come; asked now and then, once a counter has been looked at for long.

        Returns:
            whether all have come; False as soon as ``unless`` says that one will not.

        Raises:
            RankFailedError: this rank or another has failed meanwhile.
        """
        for row in self.peers:
            if row[word] < value:
                for _ in range(self._looks):
                    if row[word] >= value:
                        break
                else:
                    if not self._wait_long(row, word, value, unless):
                        return False
        return True

    def _wait_long(self, row: memoryview, word: int, value: int, unless: Callable[[], bool]) -> bool:
        offer = self._yield
        for i in range(_YIELDS):
            offer()
            if row[word] >= value:
                return True
            # Where others want the core, each yield takes as long as they may keep it: milliseconds.
            if i % 32 == 31 and (self._activity.failure is not None or unless()):
                break
        address, marks, mark = self._addresses[id(row)] + 8 * word, self._marks[id(row)], self._mark
        seconds = _FIRST_SLEEP
        marks[mark] = 1
        try:
            while (seen := row[word]) < value:
                failure = self._activity.failure
                if failure is not None:
                    raise secondary(
                        f"{self._activity.call or 'wait'}: expected all ranks alive, got a failure ({failure}); "
                        "see the first report, this job is ending"
                    )
                if unless():
                    return False
                self._timespec.nanoseconds = int(seconds * 1e9)
                # The kernel compares the counter's low half once more, so that no change is slept through.
                self._call(_FUTEX, address, _WAIT, seen & 0xFFFFFFFF, ctypes.addressof(self._timespec), 0, 0)
                seconds = min(2 * seconds, _LONGEST_SLEEP)
        finally:
            marks[mark] = 0
        return True
