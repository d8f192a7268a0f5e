"""The locks that a library takes in launches: how many, how many had to wait, for how long.

``locks.c`` counts them, in a process of its own, since it makes each call slower: the rate beside the counts is to be
held against that of the arm. It sees pthread's mutexes and read-write locks that callers inside the driver take. A
driver that spins, or asks the kernel itself, shows nothing here; voluntary switches stand beside for that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...errors import CommunicationError
from . import loops as c
from .arms import MOCK, NULL, OWN, own_name
from .channel import Channel
from .crew import PRELOAD
from .targets import Launch
from .workers import Arm

PILOT = 64
LAUNCHES = 4096  # by each worker, and once more for each that is looked at
DRIVER, LOOPS = "/libcuda.so", "/launches-"  # in the path of the library whose locks count


def launches(gpus: int) -> list[Launch]:
    """Return what is looked at. **Local.**"""
    if not gpus:
        return [MOCK, replace(MOCK, locked=True)]
    calls = [Launch(kind) for kind in ("event record", "allocate async", "copy pageable")]
    return [NULL, OWN, Launch("graph", nodes=100), *calls]


def count(
    gpus: int,
    wanted: Sequence[Launch],
    ks: Sequence[int],
    cpus: Sequence[int],
    environ: dict[str, str],
    say: Callable[[str], None],
    n: int = LAUNCHES,
) -> list[dict[str, Any]]:
    """Return what threads of C take of locks, one row a launch and k.

    **Local.** What cannot be looked at is said and left out.

    Args:
        gpus: 0 for mocks, whose lock the loops themselves hold.
        wanted: what is launched.
        ks: numbers of workers.
        cpus: the cores of the workers, in order.
        environ: of the process that does it.
        say: is told what is left out.
        n: launches a worker.

    Returns:
        ``launch``, ``k``, ``launches``, ``calls`` of a lock, those ``contended``, ``waited_seconds`` of all workers,
        ``per_second``, ``enqueued_per_second``, ``voluntary_switches``.
    """
    try:
        library = c.library("locks")
    except (OSError, RuntimeError) as error:
        say(f"locks are not counted: {error}")
        return []
    words = [sys.executable, "-m", "mpdp.bench.contention.crew"]
    before = environ.get(PRELOAD)
    preload = str(library) if not before else f"{library}{os.pathsep}{before}"
    rows: list[dict[str, Any]] = []
    channel = Channel(words, {**environ, PRELOAD: preload}, "the counter of locks")
    try:
        channel.connect()
        for launch in wanted:
            for k in ks:
                arm = Arm("pthreads", "c", launch, k, own_name(launch))
                bound = list(cpus[:k]) if len(cpus) >= k else [-1] * k
                channel.send((gpus, DRIVER if gpus else LOOPS, arm, PILOT, n, bound))
                try:
                    found = channel.receive()
                except CommunicationError as error:
                    say(f"locks are not counted: {arm.own}, k = {k}: {error}")
                    if channel.process.poll() is not None:
                        return rows
                    continue
                rows.append({"launch": arm.own, "k": k, "launches": n * k, **found})
    except CommunicationError as error:
        say(f"locks are not counted: {error}")
    finally:
        channel.close()
    return rows
