"""Staying the parent of a job: signals go to it, its ranks' marks come back, and nobody outlives it.

Owns the launcher's process and the folder of marks. A rank writes ``started.R`` when it imports mpdp,
``failed.R`` when it reports, ``finished.R`` at its orderly end (:mod:`mpdp.guard`); rank 0 writes
``finished.all`` when all have said that they are done, for hosts that do not share the folder. A training writes
``listening.R`` while a signal asks it to save and end, ``updated.R`` behind its first update, and ``saved.R`` with the
step of a checkpoint that is whole. What comes after a job that failed is :mod:`.restarts`'s part.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ..guard import MARKS, RANK_PROCESS, RESTART
from ..processes import Process, node_name
from .command import Command

LOOK = 0.25  # seconds between looks at the marks,
SOON = 0.02  # while ranks are still to start
LOST = 3.0  # a rank that ended without a word is the ring's to report; after so long nobody does
FAILED = 5.0  # a rank that reported ends the job within 2 s; after so long it has not
PATIENCE = 5.0  # from SIGTERM to SIGKILL


@dataclass
class Marks:
    """What the ranks have written so far. **Local.**

    Attributes:
        started: rank -> its process, or None for one of another host.
        failed: ranks that have reported -> where and what, the first one first.
        finished: ranks at their orderly end.
        all_finished: rank 0 says that all are.
        updated: a rank has done its first update.
        saved: the step of the newest checkpoint that was written, or None.
    """

    started: dict[int, Process | None]
    failed: dict[int, str]
    finished: set[int]
    all_finished: bool
    updated: bool = False
    saved: int | None = None

    @classmethod
    def read(cls, folder: Path) -> Marks:
        """Return what lies in a folder of marks."""
        marks = cls({}, {}, set(), False)
        for path in sorted(folder.iterdir(), key=_age):
            kind, _, rank = path.name.partition(".")
            if path.name == "finished.all":
                marks.all_finished = True
            elif rank.isdigit() and kind == "started":
                node, pid, start = path.read_text(encoding="utf-8").rsplit(" ", 2)
                process = Process(int(pid), int(start), "", 0, "")
                marks.started[int(rank)] = process if node == node_name() else None
            elif rank.isdigit() and kind == "failed":
                marks.failed[int(rank)] = path.read_text(encoding="utf-8")
            elif rank.isdigit() and kind == "finished":
                marks.finished.add(int(rank))
            elif rank.isdigit() and kind == "updated":
                marks.updated = True
            elif rank.isdigit() and kind == "saved":
                marks.saved = int(path.read_text(encoding="utf-8"))
        return marks

    def lost(self) -> list[int]:
        """Ranks of this host that have ended and have not finished."""
        if self.all_finished:
            return []
        return sorted(
            rank
            for rank, process in self.started.items()
            if rank not in self.finished and process is not None and process.ended
        )

    def unfinished(self, n: int) -> list[int]:
        """Ranks that have not finished; none where no rank has ever imported mpdp."""
        if not self.started or self.all_finished:
            return []
        return sorted(set(range(n)) - self.finished)


@dataclass(frozen=True)
class Ended:
    """How a job has ended. **Local.**

    Attributes:
        status: its exit status.
        ordered: this process was told by a signal to end it.
        marks: what its ranks have written.
    """

    status: int
    ordered: bool
    marks: Marks


def verdict(status: int, marks: Marks, n: int) -> int:
    """Return the job's exit status: 0 only if the launcher says so and every rank has finished. **Local.**"""
    if status < 0:
        return 128 - status
    return 1 if status == 0 and marks.unfinished(n) else status


def supervise(command: Command, n: int) -> int:
    """Run a job to its end and return its exit status. **Local.** See :func:`watch`."""
    return watch(command, n).status


def watch(command: Command, n: int) -> Ended:
    """Run a job to its end. **Local.**

    Args:
        command: the line that starts it.
        n: its ranks.
    """
    folder = Path(tempfile.mkdtemp(prefix="mpdp-run-"))
    try:
        return _Job(command, n, folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Ends:
    """The order in which processes of this host end, as the kernel tells it.

    A launcher kills the survivors of a rank within milliseconds, so a look now and then would find them all
    gone. An epoll object returns what happened in its order. Without one (not Linux) nothing is noted.
    """

    def __init__(self, launcher: int) -> None:
        self.order: list[int] = []
        self._seen: set[int] = set()
        self._ranks: dict[int, int] = {}
        self._poll = select.epoll() if hasattr(select, "epoll") and hasattr(os, "pidfd_open") else None
        if self._poll is not None:
            self._launcher = os.pidfd_open(launcher)
            self._poll.register(self._launcher, select.EPOLLIN)

    def add(self, rank: int, process: Process) -> None:
        if self._poll is None or rank in self._seen:
            return
        self._seen.add(rank)
        try:
            handle = os.pidfd_open(process.pid)
        except OSError:
            self.order.append(rank)
            return
        self._ranks[handle] = rank
        self._poll.register(handle, select.EPOLLIN)

    def wait(self, seconds: float) -> None:
        """Return when a process has ended, or after a while."""
        if self._poll is None:
            time.sleep(seconds)
            return
        for handle, _ in self._poll.poll(seconds):
            self._poll.unregister(handle)
            os.close(handle)
            if handle != self._launcher:
                self.order.append(self._ranks.pop(handle))

    def close(self) -> None:
        for handle in self._ranks:
            os.close(handle)
        if self._poll is not None:
            self._poll.close()


class _Job:
    def __init__(self, command: Command, n: int, folder: Path) -> None:
        self.command, self.n, self.folder = command, n, folder
        self.signals: list[int] = []
        self.interrupts = 0
        self.signalled = self.ordered = self.told = self.asked = False
        self.lost_since: float | None = None
        self.failed_since: float | None = None
        self.ending_since: float | None = None
        self.marks = Marks({}, {}, set(), False)

    def run(self) -> Ended:
        names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        before = {name: signal.signal(name, self._note) for name in names}
        try:
            self.process = subprocess.Popen(
                self.command.words,
                env=self._environ(),
                # A group of its own: Ctrl-C comes to us alone and is forwarded once. A terminal may not be
                # read from outside the foreground group.
                process_group=0,
                stdin=subprocess.DEVNULL if sys.stdin is not None and sys.stdin.isatty() else None,
                preexec_fn=_end_with_parent(),
            )
            self.ends = _Ends(self.process.pid)
            while (status := self.process.poll()) is None:
                self._forward()
                self._look(time.monotonic())
                self.ends.wait(LOOK if len(self.marks.started) == self.n else SOON)
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)
        return self._conclude(status)

    def _environ(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if name != RANK_PROCESS}
        return {**inherited, RESTART: "0", **self.command.settings, MARKS: str(self.folder)}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        self.signalled = True
        self.ordered = self.ordered or number != signal.SIGUSR2  # that one is the program's own
        self._forward()

    def _forward(self) -> None:
        while self.signals and getattr(self, "process", None) is not None:
            number = self.signals.pop(0)
            if number == signal.SIGINT:
                self.interrupts += 1
            if self.interrupts > 2:
                self._kill()
            elif number == signal.SIGHUP or self.interrupts == 2:
                self._end()
            elif number == signal.SIGTERM and self._listen():
                # Open MPI's mpirun kills its ranks half a second after SIGTERM, and forwards this one.
                self.process.send_signal(signal.SIGUSR1)
            else:
                self.process.send_signal(number)

    def _listen(self) -> bool:
        """Return whether the ranks save and end when they get a signal."""
        self.asked = self.asked or any(self.folder.glob("listening.*"))
        return self.asked

    def _look(self, now: float) -> None:
        if self.ending_since is not None:
            if now - self.ending_since > PATIENCE:
                self._kill()
            return
        marks = self.marks = Marks.read(self.folder)
        for rank, process in marks.started.items():
            if process is not None:
                self.ends.add(rank, process)
        lost = marks.lost()
        self.lost_since = (self.lost_since or now) if lost else None
        self.failed_since = (self.failed_since or now) if marks.failed else None
        if self.lost_since is not None and now - self.lost_since > LOST:
            self._say(f"{_ranks(lost)} ended without a word (killed, crashed or os._exit); ending the job")
            self.told = True
            self._end()
        elif self.failed_since is not None and now - self.failed_since > FAILED:
            self._say(f"{_ranks(sorted(marks.failed))} failed and the job goes on; ending it")
            self._end()

    def _end(self) -> None:
        """Ask the launcher to end the job: Open MPI's leaves its ranks behind when it is killed itself."""
        self.ending_since = self.ending_since or time.monotonic()
        self.process.terminate()

    def _kill(self) -> None:
        self._kill_ranks()
        self.process.kill()

    def _kill_ranks(self) -> None:
        for process in Marks.read(self.folder).started.values():
            if process is not None and not process.ended:
                with contextlib.suppress(OSError):
                    os.kill(process.pid, signal.SIGKILL)

    def _conclude(self, status: int) -> Ended:
        self.ends.wait(0)
        self.ends.close()
        marks = Marks.read(self.folder)
        self._kill_ranks()
        code = verdict(status, marks, self.n)
        if self.interrupts and code != 0:
            code = 128 + signal.SIGINT  # MPICH's mpirun mixes the ranks' signals into one number
        unfinished = marks.unfinished(self.n)
        if code != 0 and unfinished and not marks.failed and not self.told:
            first = next((rank for rank in self.ends.order if rank in unfinished), None)
            if first is not None and not self.signalled:
                self._say(f"rank {first} was the first to end, without a word (killed, crashed or os._exit)")
            self._say(f"{_ranks(unfinished)} of {self.n} did not finish")
        for rank, what in itertools.islice(marks.failed.items(), 1):
            # Once more below what the launcher has to say, and because Open MPI's drops output at times.
            self._say(f"rank {rank} failed {what}")
        return Ended(code, self.ordered, marks)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk behind stderr
            print(f"mpdp run: {text}", file=sys.stderr, flush=True)


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # renamed in between
        return 0


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank) for rank in ranks)


def _end_with_parent() -> Callable[[], None] | None:
    """Return what makes the launcher get SIGTERM when this process is killed; None where Linux is not."""
    if sys.platform != "linux":
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def arrange() -> None:
        prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before
            os.kill(os.getpid(), signal.SIGTERM)

    return arrange
