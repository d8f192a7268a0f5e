"""The control: whether the cores that the workers need are free, measured before and after each repetition.

k threads of C that share nothing spin for set times, as mocks of launches do, and must do nearly k times what one does.
Where they do not, others use the cores, and what would be measured is them. So a repetition counts only between two
good controls. Spinning tells how long the cores were there, not how fast they were: clocks and caches meet threads and
processes alike. Without a C compiler threads of Python hash instead, which needs neither the GIL nor a lock.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from . import loops as c

LEAST = 0.93  # of k times the rate of one thread
TRIES = 5  # looks at the cores before a repetition, until they are free
_SPINS, _SPIN = 2400, 2500  # of each thread; nanoseconds
_BYTES, _PIECES = 4 << 20, 3  # hashed by each thread
_SIBLINGS = 0.8  # of the rate of two cores: below that the two are one


def cores_in_order(reach: Sequence[int] | None = None) -> list[int]:
    """Return the logical cores in reach, one of each physical core first, as far as the kernel knows. **Local.**"""
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


def neighbours_apart(cpus: Sequence[int], rate: Callable[[Sequence[int]], float] | None = None) -> list[int]:
    """Return the cores with every other one first, if neighbours hinder each other as the two threads of a core do.

    **Local.** A virtual machine may not tell which of its cores are one in truth.

    Args:
        cpus: in order.
        rate: of work on some cores; default: measured by hashing.
    """
    if len(cpus) < 4:
        return list(cpus)
    rate = rate or hash_rate
    near, far = (max(rate([cpus[0], cpus[i]]) for _ in range(5)) for i in (1, 2))
    return [*cpus[::2], *cpus[1::2]] if near < _SIBLINGS * far else list(cpus)


class Control:
    """How much of their cores k threads get.

    **Local.**

    Args:
        cpus: the cores of the workers, in order.
    """

    def __init__(self, cpus: Sequence[int]) -> None:
        self._cpus = cpus
        found = c.loops()
        self._loops = None if isinstance(found, str) else found
        self._alone = max(self._rate(1) for _ in range(5))

    def __call__(self, k: int) -> float:
        """Return the rate of k threads over k times that of one thread alone."""
        rate = self._rate(k)
        if k == 1:
            self._alone = max(self._alone, rate)
        return rate / (k * self._alone)

    def _rate(self, k: int) -> float:
        cpus = [self._cpus[i % len(self._cpus)] for i in range(k)]
        if self._loops is None:
            return hash_rate(cpus)
        start_at = time.monotonic_ns() + 500_000 + 200_000 * k
        jobs = [
            c.Job(kind=c.SPIN, nanoseconds=_SPIN, n=_SPINS, every=1, start_at=start_at, cpu=cpu)
            for cpu in cpus
        ]
        self._loops.run_threads(jobs)
        return k * 1e9 / (max(job.ended for job in jobs) - start_at)


def until_free(control: Callable[[int], float], k: int) -> float:
    """Look until the cores are free, but not for ever; return what the last look said. **Local.**"""
    for _ in range(TRIES - 1):
        if (share := control(k)) >= LEAST:
            return share
    return control(k)


def hash_rate(cpus: Sequence[int]) -> float:
    """Return the rate of a thread of Python on each core, together. **Local.**"""
    data = bytes(_BYTES)
    start = time.perf_counter() + 0.001 * len(cpus)
    ends = [0.0] * len(cpus)

    def work(i: int) -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {cpus[i]})
        time.sleep(max(0.0, start - time.perf_counter()))
        while time.perf_counter() < start:
            pass
        for _ in range(_PIECES):
            hashlib.blake2b(data)
        ends[i] = time.perf_counter()

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(cpus))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(cpus) / (max(ends) - start)
