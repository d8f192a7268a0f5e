"""How many cores a rank may use, and the caps on BLAS threads that follow.

Two ranks with two BLAS threads each on two cores run 6.5 times slower than with one each (measured), so
``init`` caps threads as well as the launcher does. Knows nothing of MPI.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from threadpoolctl import threadpool_limits

VARIABLES = (
    "OMP_NUM_THREADS",  # first: who has set it has answered for all of them
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def cores() -> int:
    """Return the cores this process may run on: its affinity, capped by the container's quota. **Local.**"""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        count = os.cpu_count() or 1
    quota = _quota()
    return max(1, min(count, quota) if quota else count)


def per_rank(local_size: int) -> int:
    """Return the BLAS threads of one of ``local_size`` ranks on this node. **Local.**

    A rank that the launcher bound to fewer cores than its part of the node gets no more threads than those.
    """
    return max(1, min(cores(), on_node() // local_size))


def on_node() -> int:
    """Return the cores that this node's ranks share: all of them, or the container's quota. **Local.**"""
    return _quota() or os.cpu_count() or 1


def cap(local_size: int, environ: Mapping[str, str]) -> int | None:
    """Cap the BLAS threads of this process, unless the user set them.

    **Local.** Libraries that are already loaded are capped too.

    Returns:
        the number of threads, or None where the user's own setting stands.
    """
    if local_size <= 1 or any(environ.get(name) for name in VARIABLES):
        return None
    threads = per_rank(local_size)
    threadpool_limits(threads)
    return threads


@contextlib.contextmanager
def capped(local_size: int, environ: Mapping[str, str]) -> Iterator[None]:
    """Cap the BLAS threads as :func:`cap` does, until the end of the ``with``.

    **Local.** For ranks that are threads: each of them uses as many threads as the cap says, side by side.
    """
    if local_size <= 1 or any(environ.get(name) for name in VARIABLES):
        yield
    else:
        with threadpool_limits(per_rank(local_size)):
            yield


def _quota() -> int | None:
    """Return the whole cores of a cgroup's quota, or None where there is none."""
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))
