"""A worker that is a process: ``python -m mpdp.bench.contention.child``, told what to launch by its parent."""

from __future__ import annotations

import resource
import time

from .channel import answer
from .targets import Launch, Target


def main() -> None:
    """Answer until the parent says None or is gone. **Local.**"""
    parent = answer()
    parent.send({"imported": time.monotonic_ns()})
    targets: dict[tuple[Launch, int, bool], Target] = {}
    while True:
        try:
            asked = parent.recv()
        except EOFError:
            return
        if asked is None:
            return
        try:
            launch, ordinal, loop, n, start_at, stop_at, mutex, cpu = asked
            key = launch, ordinal, loop != "held"
            if key not in targets:
                targets[key] = Target(*key)
            target = targets[key]
            target.enter(cpu)
            if n == 0:
                target.call()
                target.synchronize()
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                parent.send({"ready": time.monotonic_ns(), "host_bytes": peak})
            elif loop == "c":
                parent.send(target.from_c(n, start_at, mutex, stop_at, keep=stop_at == 0))
            else:
                parent.send(target.from_python(n, start_at, mutex))
        except Exception as error:
            parent.send({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
