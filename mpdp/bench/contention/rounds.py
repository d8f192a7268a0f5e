"""The rounds of a run: every arm once a round, in random order, each repetition between two controls."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from .control import LEAST, until_free
from .figures import latency_figures
from .workers import Arm, Run, Workers

PILOT = 64  # launches by which the length of an arm's repetition is found
MOST = 50_000
LATE = 0.001  # seconds by which a worker may miss the start, unless Python's lock is what it waits for
ATTEMPTS = 3  # refused repetitions for one accepted, at most


class Rounds:
    """Run arms until each has enough accepted repetitions, or the time is over.

    **Local.**

    Args:
        workers: who runs them.
        arms: to run.
        control: k -> share of their cores that k threads get.
        cpus: cores of the workers, in order.
        repetitions: wanted of each arm.
        seconds: of one repetition.
        keep: is given each sample.
        until: ``time.monotonic()`` after which no repetition begins.
    """

    def __init__(
        self,
        workers: Workers,
        arms: Sequence[Arm],
        control: Callable[[int], float],
        cpus: Sequence[int],
        *,
        repetitions: int,
        seconds: float,
        keep: Callable[[dict[str, Any]], None],
        until: float,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._workers, self._arms, self._control, self._cpus = workers, list(arms), control, cpus
        self._repetitions, self._seconds, self._keep, self._until, self._say = (
            repetitions,
            seconds,
            keep,
            until,
            say,
        )
        self._lengths: dict[Arm, int] = {}
        self._accepted: dict[Arm, int] = {}
        self._tried: dict[Arm, int] = {}
        self.samples: list[dict[str, Any]] = []
        self.in_time = True

    def run(self) -> list[dict[str, Any]]:
        """Return the samples of all repetitions, refused ones too."""
        order = random.Random(0)
        arms = self._pilot()
        while arms and self.in_time:
            order.shuffle(arms)
            for arm in arms:
                if time.monotonic() > self._until:
                    self.in_time = False
                    break
                self._once(arm)
            arms = [arm for arm in arms if self._wants(arm)]
        return self.samples

    def _wants(self, arm: Arm) -> bool:
        accepted, tried = self._accepted.get(arm, 0), self._tried.get(arm, 0)
        return accepted < self._repetitions and tried < (1 + ATTEMPTS) * self._repetitions

    def _pilot(self) -> list[Arm]:
        """Find how many launches fill a repetition; leave out what does not work, and say so."""
        good = []
        for arm in self._arms:
            if time.monotonic() > self._until:
                self.in_time = False
                break
            try:
                run = self._workers.run(arm, PILOT, self._cpus_of(arm))
            except Exception as error:
                self._say(f"left out: {arm.row}, k = {arm.k}: {error}")
                continue
            each = max(PILOT / (run.per_second / arm.k), 1e-9) / PILOT
            self._lengths[arm] = max(PILOT, min(MOST, int(self._seconds / each)))
            good.append(arm)
        return good

    def _cpus_of(self, arm: Arm) -> list[int]:
        if len(self._cpus) < arm.k:
            return [-1] * arm.k
        return list(self._cpus[: arm.k])

    def _once(self, arm: Arm) -> None:
        before = until_free(self._control, arm.k)
        run = self._workers.run(arm, self._lengths[arm], self._cpus_of(arm))
        after = self._control(arm.k)
        waits_for_python = arm.loop != "c" and arm.workers in ("threads", "mutex", "submitter")
        accepted = min(before, after) >= LEAST and (run.late <= LATE or waits_for_python)
        self._tried[arm] = self._tried.get(arm, 0) + 1
        self._accepted[arm] = self._accepted.get(arm, 0) + accepted
        sample = sample_of(arm, run, before, after, accepted)
        self.samples.append(sample)
        self._keep(sample)


def sample_of(arm: Arm, run: Run, before: float, after: float, accepted: bool) -> dict[str, Any]:
    """Return one repetition as JSON-able data. **Local.**"""
    seconds = [(timing.ended - run.start_at) / 1e9 for timing in run.timings]
    shares = [1 / each for each in seconds]
    launches = run.n * len(run.timings)
    return {
        "row": arm.row,
        "workers": arm.workers,
        "loop": arm.loop,
        "launch": arm.own,
        "k": arm.k,
        "n": run.n,
        "accepted": bool(accepted),
        "control": [round(before, 4), round(after, 4)],
        "late_seconds": round(run.late, 6),
        "per_second": run.per_second,
        "enqueued_per_second": run.enqueued_per_second,
        "worker_seconds": [round(each, 6) for each in seconds],
        "least_share": min(shares) / sum(shares) * len(shares),
        "most_share": max(shares) / sum(shares) * len(shares),
        "voluntary_switches": sum(timing.switches[0] for timing in run.timings),
        "involuntary_switches": sum(timing.switches[1] for timing in run.timings),
        "cpu_seconds_per_million": sum(timing.cpu for timing in run.timings) / launches * 1e6,
        "at": time.time(),
        **latency_figures([timing.latencies for timing in run.timings]),
    }
