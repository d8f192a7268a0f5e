"""Who launches: one thread, k threads (free, with a user's lock, or with one submitter), threads of C, processes."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from . import loops as c
from .channel import Channel
from .targets import EVERY, WARM_UP, Launch, Target, Timing, wait_until

WORKERS = {
    "one": "one thread, round-robin",
    "threads": "threads",
    "mutex": "threads, user's lock",
    "submitter": "threads, one submitter",
    "pthreads": "threads of C",
    "pthreads mutex": "threads of C, user's lock",
    "processes": "processes",
    "processes MPS": "processes under MPS",
}
LOOPS = ("python", "held", "c")  # a call of Python's each; the same with the GIL held; all n in one call
_LEAD, _LEAD_EACH = 0.012, 0.003  # seconds from the order to the start, and more for each worker


@dataclass(frozen=True)
class Arm:
    """One way of launching, with k workers.

    Attributes:
        workers: one of ``WORKERS``.
        loop: one of ``LOOPS``.
        launch: what each launches.
        k: workers.
        own: the name of what is launched, for tables.
    """

    workers: str
    loop: str
    launch: Launch
    k: int
    own: str

    @property
    def row(self) -> str:
        """What arms that differ in k alone have in common, in words."""
        return row_name(self.workers, self.loop, self.own)


def row_name(workers: str, loop: str, own: str) -> str:
    """Return what is launched, by whom and how. **Local.**"""
    how = {"python": "from Python", "held": "from Python, GIL held", "c": "C loop"}[loop]
    return f"{own}: {WORKERS[workers]}, {how}"


@dataclass
class Run:
    """One repetition: n launches by each of k workers that start together."""

    n: int
    start_at: int
    timings: Sequence[Timing]

    @property
    def late(self) -> float:
        """Seconds by which the last worker missed the start."""
        return (max(timing.started for timing in self.timings) - self.start_at) / 1e9

    @property
    def per_second(self) -> float:
        """Launches a second that the GPU was done with, from the common start to the last worker's end."""
        return (
            self.n * len(self.timings) * 1e9 / (max(timing.ended for timing in self.timings) - self.start_at)
        )

    @property
    def enqueued_per_second(self) -> float:
        """Launches a second of time inside the calls, by the worker that was inside the longest."""
        return self.n * len(self.timings) * 1e9 / max(timing.busy for timing in self.timings)


@dataclass
class Costs:
    """What a process costs before its first launch."""

    start_seconds: float
    host_bytes: int
    device_bytes: int | None = None


class Processes:
    """Workers that are processes: started when first wanted, kept until the end.

    Args:
        environ: of the processes.
    """

    def __init__(self, environ: dict[str, str]) -> None:
        self._environ = environ
        self._channels: list[Channel] = []
        self._ready: set[tuple[int, Launch, int, str]] = set()
        self.costs: list[Costs] = []
        self.used_bytes: Callable[[], int] | None = None

    def run(self, arm: Arm, ordinals: Sequence[int], n: int, cpus: Sequence[int]) -> Run:
        """Let k processes launch n times each. **Local.**"""
        self.start(arm.launch, ordinals, arm.loop)
        channels = self._channels[: arm.k]
        start_at = time.monotonic_ns() + int(1e9 * (_LEAD + _LEAD_EACH * arm.k + 0.005))
        for i, channel in enumerate(channels):
            mutex = arm.workers == "mutex"
            channel.send((arm.launch, ordinals[i], arm.loop, n, start_at, 0, mutex, cpus[i]))
        return Run(n, start_at, [channel.receive() for channel in channels])

    def begin(self, launch: Launch, ordinal: int, start_at: int, stop_at: int, cpu: int) -> None:
        """Let the first process, which has to be ready, launch in a loop of C from one moment to another. **Local.**"""
        self._channels[0].send((launch, ordinal, "c", 1 << 40, start_at, stop_at, False, cpu))

    def end(self) -> Timing:
        """Return how that went. **Local.**"""
        timing: Timing = self._channels[0].receive()
        return timing

    def start(self, launch: Launch, ordinals: Sequence[int], loop: str) -> None:
        """Start processes where there are too few, and let each launch once. **Local.**"""
        first = len(self._channels)
        begun = time.monotonic_ns()
        for i in range(first, len(ordinals)):
            words = [sys.executable, "-m", "mpdp.bench.contention.child"]
            self._channels.append(Channel(words, self._environ, f"worker {i}"))
        for channel in self._channels[first:]:
            channel.connect()
        for i, ordinal in enumerate(ordinals):
            key = i, launch, ordinal, loop
            if key in self._ready:
                continue
            free = None if self.used_bytes is None else self.used_bytes()
            self._channels[i].send((launch, ordinal, loop, 0, 0, 0, False, -1))
            told = self._channels[i].receive()
            self._ready.add(key)
            if i >= first:  # its first launch: the context is new
                used = None if free is None or self.used_bytes is None else self.used_bytes() - free
                self.costs.append(Costs((told["ready"] - begun) / 1e9, told["host_bytes"], used))

    def close(self) -> None:
        """End the processes. **Local.**"""
        for channel in self._channels:
            channel.close()


@dataclass
class Workers:
    """Runs arms; makes targets when they are first wanted and keeps them.

    Args:
        gpus: GPUs to go round; 0 where the arms launch mocks.
        processes: the processes of each kind of workers that are processes.
    """

    gpus: int
    processes: dict[str, Processes] = field(default_factory=dict)
    _targets: dict[Any, Target] = field(default_factory=dict)

    def run(self, arm: Arm, n: int, cpus: Sequence[int]) -> Run:
        """Let k workers launch n times each, and return how it went.

        **Local.**

        Args:
            arm: how.
            n: launches a worker.
            cpus: the core of each; -1 for any.
        """
        ordinals = [i % max(1, self.gpus) for i in range(arm.k)]
        if arm.workers in self.processes:
            return self.processes[arm.workers].run(arm, ordinals, n, cpus)
        free = arm.loop != "held"
        targets = [self._target(arm.launch, i, ordinal, free) for i, ordinal in enumerate(ordinals)]
        start_at = time.monotonic_ns() + int(1e9 * (_LEAD + _LEAD_EACH * arm.k))
        if arm.workers.startswith("pthreads"):
            return self._run_c(arm, targets, n, start_at, cpus)
        if arm.workers == "one":
            return self._run_one(targets, n, start_at, cpus)
        if arm.workers == "submitter":
            return self._run_submitter(targets, n, start_at, cpus)
        return self._run_threads(arm, targets, n, start_at, cpus)

    def beside(
        self, launch: Launch, other: Launch | None, process: str | None, seconds: float, cpus: Sequence[int]
    ) -> tuple[Timing, Timing | None]:
        """Let a thread of C launch while another thread, or a process, does something else, on the next GPU.

        **Local.**

        Args:
            launch: of the thread that is looked at.
            other: what goes on beside it; None for nothing.
            process: of which processes the other is one; None: a thread of this process.
            seconds: from the common start to the stop.
            cpus: the cores of both; -1 for any.

        Returns:
            how it went for the thread, and for the other.
        """
        loops = c.loops()
        assert not isinstance(loops, str)
        ordinal = 1 % max(1, self.gpus)
        targets = [self._target(launch, 0, 0)]
        beside = None if process is None else self.processes[process]
        if other is not None and beside is not None:
            beside.start(other, [ordinal], "c")
        elif other is not None:
            targets.append(self._target(other, 1, ordinal))
        start_at = time.monotonic_ns() + int(1e9 * (_LEAD + 2 * _LEAD_EACH))
        stop_at = start_at + int(1e9 * seconds)
        latencies = targets[0].jobs(int(seconds * 4e6), start_at, False, stop_at)
        for target in targets[1:]:
            target.jobs(1 << 40, start_at, False, stop_at, keep=False)
        for target, cpu in zip(targets, cpus):
            target.job.cpu = cpu
        if other is not None and beside is not None:
            beside.begin(other, ordinal, start_at, stop_at, cpus[1])
        loops.run_threads([target.job for target in targets])
        timing = targets[0].timing(latencies)
        if other is None:
            return timing, None
        return timing, targets[1].timing(latencies[:0]) if beside is None else beside.end()

    def _target(self, launch: Launch, i: int, ordinal: int, free: bool = True) -> Target:
        key = launch, i, free
        if key not in self._targets:
            self._targets[key] = Target(launch, ordinal, free)
        return self._targets[key]

    def _run_c(self, arm: Arm, targets: list[Target], n: int, start_at: int, cpus: Sequence[int]) -> Run:
        loops = c.loops()
        assert not isinstance(loops, str)
        latencies = [target.jobs(n, start_at, arm.workers == "pthreads mutex") for target in targets]
        for target, cpu in zip(targets, cpus):
            target.job.cpu = cpu
        loops.run_threads([target.job for target in targets])
        return Run(n, start_at, [target.timing(each) for target, each in zip(targets, latencies)])

    def _run_threads(
        self, arm: Arm, targets: list[Target], n: int, start_at: int, cpus: Sequence[int]
    ) -> Run:
        def work(i: int) -> Timing:
            targets[i].enter(cpus[i])
            run = targets[i].from_c if arm.loop == "c" else targets[i].from_python
            return run(n, start_at, arm.workers == "mutex")

        return Run(n, start_at, _in_threads([partial(work, i) for i in range(len(targets))]))

    def _run_one(self, targets: list[Target], n: int, start_at: int, cpus: Sequence[int]) -> Run:
        """Let one thread launch for all; the latencies are those of its calls, in turn."""

        def work() -> list[Timing]:
            timings = [Timing(0, 0, 0, _zeros(n)) for _ in targets]
            for target in targets:
                target.enter(cpus[0])
                for _ in range(WARM_UP):
                    target.call()
                target.synchronize()
            wait_until(start_at)
            clock, several = time.monotonic_ns, len({target.job.context for target in targets}) > 1
            started, busy = clock(), 0
            for i in range(n):
                for target, timing in zip(targets, timings):
                    before = clock()
                    if several or (len(targets) > 1 and target.job.context is None):
                        target.enter()
                    target.call()
                    timing.latencies[i] = spent = clock() - before
                    busy += spent
                if (i + 1) % EVERY == 0:
                    for target in targets:
                        target.synchronize()
            for target in targets:
                target.synchronize()
            ended = clock()
            for timing in timings:
                timing.started, timing.ended, timing.busy = started, ended, busy
            return timings

        return Run(n, start_at, _in_threads([work])[0])

    def _run_submitter(self, targets: list[Target], n: int, start_at: int, cpus: Sequence[int]) -> Run:
        """Let threads hand their launches to one thread; a latency is from the handing over to the end of the call."""
        waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        rooms = [threading.Semaphore(EVERY // 2) for _ in targets]
        timings = [Timing(0, 0, 0, _zeros(n)) for _ in targets]
        clock = time.monotonic_ns

        def submit() -> None:
            for target in targets:
                target.enter(cpus[0])
                for _ in range(WARM_UP):
                    target.call()
                target.synchronize()
            several = len({target.job.context for target in targets}) > 1
            left = n * len(targets)
            while left:
                i, number, handed = waiting.get()
                before = clock()
                if several or (len(targets) > 1 and targets[i].job.context is None):
                    targets[i].enter()
                targets[i].call()
                after = clock()
                timings[i].latencies[number] = after - handed
                timings[i].busy += after - before
                rooms[i].release()
                left -= 1
                if (number + 1) % EVERY == 0:
                    targets[i].synchronize()
            for target in targets:
                target.synchronize()
            ended, busy = clock(), sum(timing.busy for timing in timings)
            for timing in timings:
                timing.ended, timing.busy = ended, busy

        def hand(i: int) -> None:
            wait_until(start_at)
            timings[i].started = clock()
            for number in range(n):
                rooms[i].acquire()
                waiting.put((i, number, clock()))

        _in_threads([submit, *(partial(hand, i) for i in range(len(targets)))])
        return Run(n, start_at, timings)

    def close(self) -> None:
        """End the processes and give back the targets. **Local.**"""
        for processes in self.processes.values():
            processes.close()
        for target in self._targets.values():
            target.close()
        self._targets.clear()


def _zeros(n: int) -> Any:
    import numpy as np

    return np.zeros(n, np.float32)


def _in_threads(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return what each returns, all in threads; raise the first error."""
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = works[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def environment(mps: bool) -> dict[str, str]:
    """Return the environment of processes that use MPS, where it runs, or do not. **Local.**"""
    environ = dict(os.environ)
    if not mps:
        environ["CUDA_MPS_PIPE_DIRECTORY"] = NO_MPS
    return environ


NO_MPS = "/nonexistent/mps"
