"""The control: whether the cores that the workers need are free, measured before and after each repetition.

k threads that share nothing (they hash, which needs neither the GIL nor a lock) must do nearly k times what one does.
Where they do not, others use the cores, and what would be measured is them. So a repetition counts only between two
good controls.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

LEAST = 0.93  # of k times the rate of one thread
_BYTES = 4 << 20
_PIECES = 3


def cores_in_order(reach: Sequence[int] | None = None) -> list[int]:
    """Return the logical cores in reach, one of each physical core first. **Local.**"""
    if reach is None:
        reach = (
            sorted(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else range(os.cpu_count() or 1)
        )
    first: list[int] = []
    second: list[int] = []
    seen: set[str] = set()
    for cpu in reach:
        try:
            path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            siblings = path.read_text().strip()
        except OSError:
            siblings = str(cpu)
        (second if siblings in seen else first).append(cpu)
        seen.add(siblings)
    return first + second


class Control:
    """How much of their cores k threads get.

    **Local.**

    Args:
        cpus: the cores of the workers, see :func:`cores_in_order`.
    """

    def __init__(self, cpus: Sequence[int]) -> None:
        self._cpus = cpus
        self._data = bytes(_BYTES)
        self._alone = max(self._rate(1) for _ in range(5))

    def __call__(self, k: int) -> float:
        """Return the rate of k threads over k times that of one thread alone."""
        rate = self._rate(k)
        if k == 1:
            self._alone = max(self._alone, rate)
        return rate / (k * self._alone)

    def _rate(self, k: int) -> float:
        start = time.perf_counter() + 0.001 * k
        ends = [0.0] * k

        def work(i: int) -> None:
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {self._cpus[i % len(self._cpus)]})
            time.sleep(max(0.0, start - time.perf_counter()))
            while time.perf_counter() < start:
                pass
            for _ in range(_PIECES):
                hashlib.blake2b(self._data)
            ends[i] = time.perf_counter()

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(k)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return k / (max(ends) - start)
