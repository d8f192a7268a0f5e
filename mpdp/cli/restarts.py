"""``mpdp run --max-restarts``: start a job again when it has failed, and know when to stop.

Owns what follows from the end of a job: whether it is started again, with how many ranks and after how long. What a
start is made of is the caller's part; how one is watched is :mod:`.supervise`'s. That a job goes on where it was is
the script's: it calls ``trainer.resume()``.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..errors import Preempted
from .supervise import Ended

FIRST_WAIT = 1.0  # seconds before the first restart; doubled after each start that has saved nothing
LONGEST_WAIT = 60.0
REPEATS = 3  # times the same failure, or starts without an update, in a row


@dataclass
class Policy:
    """What to do when a job has ended; it knows the ends before. **Local.**

    Args:
        most: restarts in all.
        ranks: ranks of a start.
        least: ranks that are enough.

    Attributes:
        restarts: how many there were.
        wait: seconds to wait before the next start.
    """

    most: int
    ranks: int
    least: int
    restarts: int = 0
    wait: float = FIRST_WAIT
    _idle: int = 0  # starts in a row without an update
    _failure: str | None = None
    _times: int = 0  # that failure in a row

    def refuses(self, ended: Ended) -> str | None:
        """Return why the job is not to be started again; None where it is, with ``ranks``, after ``wait`` seconds."""
        marks = ended.marks
        failure = next(iter(marks.failed.values()), None)
        self._idle = 0 if marks.updated else self._idle + 1
        self._times = self._times + 1 if failure is not None and failure == self._failure else 1
        self._failure = failure
        lost = failure is None or "without a word" in failure or "is gone" in failure
        if self.restarts == 0 and not marks.updated and not lost:
            return "the first start failed before its first update; mend what the report names"
        if failure is not None and self._times >= REPEATS:
            return f"the same failure came {REPEATS} times in a row; mend what the report names"
        if not marks.updated and lost and self.ranks > self.least:
            self.ranks, self._idle = self.ranks - 1, 0  # the place of a rank may be gone
        elif self._idle >= REPEATS:
            return f"{REPEATS} starts in a row ended before their first update; see what each has said"
        if self.restarts >= self.most:
            return f"--max-restarts {self.most} is used up"
        self.wait = (
            FIRST_WAIT if marks.saved is not None or self.restarts == 0 else min(2 * self.wait, LONGEST_WAIT)
        )
        self.restarts += 1
        return None


def describe(ended: Ended) -> str:
    """Return in a few words how a job has ended. **Local.**"""
    for rank, what in ended.marks.failed.items():
        return f"rank {rank} failed {what}"
    if ended.status == Preempted.STATUS:
        return "a signal has stopped it"
    return f"status {ended.status}"


def run(
    policy: Policy,
    start: Callable[[int, int], Ended],
    available: Callable[[int], int],
    say: Callable[[str], None],
) -> int:
    """Run a job to its end, with restarts, and return its exit status. **Local.**

    Args:
        policy: decides.
        start: ``start(ranks, restart)`` runs the job once.
        available: ``available(ranks)`` returns for how many of so many ranks there is a place now.
        say: prints one line.
    """
    with _signals() as told:
        saved = None
        ended = start(policy.ranks, 0)
        while ended.status != 0 and not (ended.ordered or told.is_set()):
            saved = ended.marks.saved if ended.marks.saved is not None else saved
            why = policy.refuses(ended)
            ranks = 0
            if why is None:
                ranks = min(policy.ranks, available(policy.ranks))
                if ranks < policy.least:
                    why = f"there is a place for {ranks} ranks, fewer than {policy.least}"
            if why is not None:
                say(f"not started again: {why}")
                break
            place = "" if saved is None else f", saved at update {saved}"
            say(
                f"restart {policy.restarts} of {policy.most} in {policy.wait:g} s with "
                f"{ranks} rank{'s' * (ranks != 1)}{place} ({describe(ended)})"
            )
            if told.wait(policy.wait):
                break
            ended = start(ranks, policy.restarts)
    return ended.status


@contextlib.contextmanager
def _signals() -> Iterator[threading.Event]:
    """Note signals between two starts, which end the waiting. **Local**, in the main thread."""
    told = threading.Event()
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {name: signal.signal(name, lambda number, frame: told.set()) for name in names}
    try:
        yield told
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def say(text: str) -> None:
    """Print a line of ``mpdp run`` on stderr. **Local.**"""
    with contextlib.suppress(OSError):  # a full disk behind stderr
        print(f"mpdp run: {text}", file=sys.stderr, flush=True)
