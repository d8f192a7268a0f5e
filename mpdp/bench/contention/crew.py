"""Workers of arms in a process of their own, with locks counted: ``python -m mpdp.bench.contention.crew``.

Told arms by its parent, which has put ``locks.c``, compiled, before all other libraries (``LD_PRELOAD``).
"""

from __future__ import annotations

import ctypes
import os

from .channel import answer
from .workers import Arm, Workers

PRELOAD = "LD_PRELOAD"


def main() -> None:
    """Answer until the parent says None or is gone. **Local.**"""
    parent = answer()
    counter = ctypes.CDLL(os.environ.pop(PRELOAD).split(os.pathsep)[0])
    counter.mpdp_locks_of.argtypes = (ctypes.c_char_p,)
    sums = (ctypes.c_int64 * 3)()
    workers: Workers | None = None
    parent.send("ready")
    while True:
        try:
            asked = parent.recv()
        except EOFError:
            return
        if asked is None:
            break
        try:
            gpus, library, arm, pilot, n, cpus = asked
            assert isinstance(arm, Arm)
            workers = workers or Workers(gpus, {})
            workers.run(arm, pilot, cpus)
            if not counter.mpdp_locks_of(library.encode()):
                raise RuntimeError(f"no library with {library!r} in its path")
            counter.mpdp_locks_read(sums)
            run = workers.run(arm, n, cpus)
            counter.mpdp_locks_read(sums)
            calls, contended, waited = sums
            switches = sum(timing.switches[0] for timing in run.timings)
            parent.send(
                {
                    "calls": calls,
                    "contended": contended,
                    "waited_seconds": waited / 1e9,
                    "per_second": run.per_second,
                    "enqueued_per_second": run.enqueued_per_second,
                    "voluntary_switches": switches,
                }
            )
        except Exception as error:
            parent.send({"error": f"{type(error).__name__}: {error}"})
    if workers is not None:
        workers.close()


if __name__ == "__main__":
    main()
