"""A world of threads: ranks that are threads of one process, with everything above them as it is for processes.

:func:`run` calls a function once in each of n threads; ``mpdp run --threads`` runs a script so. In such a thread
:func:`mpdp.init` returns the world of threads: its own rank, device and stream, and the ``threads`` transport. What the
ranks share is the process: imported modules and whatever they hold, ``sys.argv``, the environment, the working
directory and the handlers of signals, which run in the main thread alone; it works on nothing and waits for the ranks.

Owns the threads, the watch over them, and the end of all when one fails. Read ``world`` for what a rank joins,
``comm/thread_memory`` for how it talks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, TypeVar

from . import cores, guard, kernels
from . import world as worlds
from .comm.activity import Activity
from .comm.agreement import compare, together
from .comm.base import Communicator
from .comm.thread_memory import Meeting, ThreadCommunicator
from .device import CPU, Device, as_device
from .device_choice import VISIBLE, choose_device
from .errors import CommunicationError, DeviceError, LaunchError, RankFailedError, StallError, on_all_ranks
from .world import World

__all__ = ["run"]

T = TypeVar("T")
LOOK = 0.05  # seconds between two looks at the ranks
GONE = 1.0  # seconds that ranks wait for one that has ended before that is called a failure


def run(
    function: Callable[[], T],
    n: int | None = None,
    *,
    devices: Sequence[Device | str] | None = None,
) -> list[T]:
    """Call ``function()`` in each of n threads of this process, each a rank of one world.

    **Local.** Returns when all have ended. In the function :func:`mpdp.init` (and what calls it) gives the rank's
    world; seeds, ``no_grad`` and the like start as in a new process. CPU ranks share the cores: BLAS gets cores / n
    threads.

    Args:
        function: what each rank does. Each should build its own model and data: objects from outside are shared.
        n: ranks; default: one a device, else 2.
        devices: the device of each rank; default: what each asks ``init`` for, as a process of its rank would get.

    Returns:
        what each rank returned, by rank.

    Raises:
        LaunchError: the process is a rank itself, of a launcher's world or of threads.
        StallError: a rank waited longer than the world's timeout.
        RankFailedError: a rank ended while others wait for it.
        BaseException: the first that a rank raised, with a note that names the rank; the others end too.

    Example:
        >>> import mpdp, mpdp.threads
        >>> mpdp.threads.run(lambda: mpdp.init(device="cpu").rank, 3)
        [0, 1, 2]
    """
    return prepare(n, devices).run(lambda rank: function())


def prepare(n: int | None = None, devices: Sequence[Device | str] | None = None) -> Group:
    """Return a world of threads that is still to run; see :func:`run` for arguments and errors. **Local.**"""
    announcement = guard.current.announcement
    if announcement is not None and announcement.size > 1:
        raise LaunchError(
            f"threads: expected a process that is no rank, got rank {announcement.rank} of {announcement.size}; "
            "start the script without a launcher"
        )
    if worlds.is_joining_here():
        raise LaunchError(
            "threads: expected a call outside of threads.run, got one in a rank; call it from the main program"
        )
    given = None if devices is None else [as_device(device) for device in devices]
    if n is None:
        n = 2 if given is None else len(given)
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n: expected a number of threads of at least 1, got {n!r}; pass an int")
    if given is not None and len(given) != n:
        raise ValueError(f"devices: expected {n}, one a rank, got {len(given)}; name one for each")
    return Group(n, given)


class Group:
    """The ranks of one world of threads, and the watch over them.

    Attributes:
        error: the first that a rank raised.
        failed_rank: whose it is; None where the watch found it.
    """

    def __init__(self, size: int, devices: Sequence[Device] | None) -> None:
        self.size = size
        self.error: BaseException | None = None
        self.failed_rank: int | None = None
        self._in_order: SystemExit | None = None
        self._devices = devices
        self._meeting = Meeting(size)
        self._activities = [Activity() for _ in range(size)]
        self._timeout = 300.0
        self._results: list[Any] = [None] * size
        self._alive = set(range(size))
        self._changed = threading.Condition()

    @property
    def alive(self) -> bool:
        """Whether ranks are left."""
        return bool(self._alive)

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Run all ranks to their end, once; the function is given the rank. **Local.** See :func:`run`."""
        with cores.capped(self.size, os.environ):
            return self._run(function)

    def _run(self, function: Callable[[int], T]) -> list[T]:
        self._threads = [
            threading.Thread(
                target=Context().run, args=(self._rank, rank, function), name=f"mpdp-rank{rank}", daemon=True
            )
            for rank in range(self.size)
        ]
        for thread in self._threads:
            thread.start()
        try:
            while self._wait():
                self._look()
                guard.current.notice.sync()  # handlers of signals are set in the main thread, if this is it
        except BaseException as error:  # a signal's handler has raised in this thread
            self.fail(None, error)
        guard.current.notice.sync()
        if self.error is not None:
            self._end()
            guard.current.notice.sync()  # ranks that have ended meanwhile listen no longer
            if self.failed_rank is not None:
                self.error.add_note(f"on rank {self.failed_rank} of {self.size} threads")
            raise self.error
        if self._in_order is not None:
            raise self._in_order
        return self._results

    def fail(self, rank: int | None, error: BaseException) -> None:
        """Let the first error end all ranks: what waits raises at once. **Local**, any thread."""
        with self._changed:
            if self.error is not None or getattr(error, "secondary", False):
                return
            self.error, self.failed_rank = error, rank
        text = str(error).splitlines()
        where = "" if rank is None else f"rank {rank}: "
        failure = where + f"{type(error).__name__}: {text[0] if text else ''}".removesuffix(": ")
        for activity in self._activities:
            activity.failure = failure
        self._meeting.abort()
        with self._changed:
            self._changed.notify_all()

    def step(self) -> int:
        """Return the step that the failing rank, or else the furthest, is in. **Local.**"""
        if self.failed_rank is not None:
            return self._activities[self.failed_rank].step
        return max(activity.step for activity in self._activities)

    # -- one rank, in its thread

    def _rank(self, rank: int, function: Callable[[int], Any]) -> None:
        try:
            kernels.hold(rank + 1)
            cores.cap(self.size, os.environ)  # OpenMP's count of threads is that of each thread that asks
            worlds.joins_by(lambda *arguments: self._join(rank, *arguments))
            self._results[rank] = function(rank)
        except SystemExit as error:
            if getattr(error, "agreed", False):
                # The others come to the same end, and may be behind: in the save, in the log.
                self._in_order = error
            elif error.code not in (None, 0):
                self.fail(rank, error)
        except BaseException as error:
            self.fail(rank, error)
        finally:
            with self._changed:
                self._alive.discard(rank)
                self._changed.notify_all()

    def _join(self, rank: int, device: Device | str, transport: str, timeout: float) -> World:
        """Make the world as a rank sees it. **Collective.**"""
        module = _being_imported() if self.size > 1 else None
        if module is not None:
            raise LaunchError(
                f"init: expected a call outside of an import where ranks are threads, got one while {module} is "
                "imported, which one rank does and the others wait for; call it in the script or in a function, or "
                "start processes"
            )
        activity = self._activities[rank]
        host = ThreadCommunicator(self._meeting, rank, activity)
        asked = worlds.wanted(transport)
        compare(host, "init", {"device": str(device), "transport": asked, "timeout": timeout})
        if asked not in ("auto", "threads", "staged"):
            raise on_all_ranks(
                CommunicationError(
                    f"transport: expected auto, threads or staged where ranks are threads, got {asked}; leave it out, "
                    "or start processes"
                )
            )
        chosen, why = together(host, lambda: self._choose(rank, device))
        together(host, lambda: _use(chosen))
        comm, reason = _communicator(host, chosen, asked)
        everywhere = self._meeting.exchange(rank, chosen)
        self._timeout = timeout
        place = (rank, self.size, 0, 1)
        world = worlds.make_world(comm, chosen, timeout, activity, place, comm.transport)
        world.transport_reason = reason
        world.fails = lambda error: None if getattr(error, "agreed", False) else self.fail(rank, error)
        if chosen.kind == "cuda":
            world.ranks_per_device = max(everywhere.count(each) for each in everywhere)
        worlds.announce(world, why)
        return world

    def _choose(self, rank: int, asked: Device | str) -> tuple[Device, str]:
        if self._devices is not None:
            given = self._devices[rank]
            if asked not in ("auto", given.kind) and as_device(asked) != given:
                raise ValueError(
                    f"device: expected {given} as given to threads.run, got {asked}; leave it out"
                )
            asked = given
        environ = dict(os.environ)
        device, why = choose_device(asked, rank, environ)
        if environ.get(VISIBLE) != os.environ.get(VISIBLE):
            raise DeviceError(
                f"device cuda: expected GPUs, got slices of them in {VISIBLE}, of which CUDA shows a process "
                "one; start processes instead of threads"
            )
        return device, why

    # -- the watch, in the thread that called run()

    def _wait(self) -> bool:
        """Wait a moment; return whether ranks are left and none has failed."""
        with self._changed:
            if self._alive and self.error is None:
                self._changed.wait(LOOK)
            return bool(self._alive) and self.error is None

    def _look(self) -> None:
        """End all where ranks wait for one that has ended, or for too long."""
        now = time.monotonic()
        alive = sorted(self._alive)
        waits = {rank: wait for rank in alive if (wait := self._waiting(rank)) is not None}
        if not waits:
            return
        ended = sorted(set(range(self.size)) - set(alive))
        if ended and len(waits) == len(alive) and now - max(since for _, since in waits.values()) > GONE:
            rank, (call, _) = min(waits.items())
            self.fail(
                None,
                RankFailedError(
                    f"{call}: expected all ranks alive, got rank {', '.join(map(str, ended))} ended while rank {rank} "
                    "waits; run the same code on all ranks"
                ),
            )
            return
        rank, (call, since) = min(waits.items(), key=lambda item: item[1][1])
        if now - since > self._timeout:
            working = [rank for rank in alive if rank not in waits]
            doing = f"rank {', '.join(map(str, working))} did not come" if working else "all ranks wait"
            error = StallError(
                f"{call}: expected all ranks within {self._timeout:g} s, got rank {rank} waiting while {doing}; see "
                "what it does below, or raise the timeout of init"
            )
            for each in working or alive:
                error.add_note(f"rank {each} in step {self._activities[each].step}:\n{self._stack(each)}")
            self.fail(None, error)

    def _waiting(self, rank: int) -> tuple[str, float] | None:
        call, since = self._activities[rank].waiting()
        if call is not None:
            return call, since
        met = self._meeting.waits(rank)
        return None if met is None else ("init", met)

    def _stack(self, rank: int) -> str:
        frame = sys._current_frames().get(self._threads[rank].ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def _end(self) -> None:
        """Give the ranks a moment for their ``finally`` blocks, then raise in those that go on. **Local.**"""
        for _ in range(2):
            deadline = time.monotonic() + guard.DEADLINE
            with self._changed:
                while self._alive and time.monotonic() < deadline:
                    with contextlib.suppress(KeyboardInterrupt):  # the second Ctrl-C ends the waiting
                        self._changed.wait(LOOK)
                        continue
                    return
                alive = sorted(self._alive)
            for rank in alive:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._threads[rank].ident or 0), ctypes.py_object(_Ended)
                )


class _Ended(RankFailedError):
    """Raised inside a rank that goes on when another has failed."""

    secondary = True


def _being_imported() -> str | None:
    """Return the name of the module that the calling thread is importing, or None. **Local.**"""
    frame, module = sys._getframe(), None
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            module = str(frame.f_globals.get("__name__"))
        elif frame.f_code.co_name == "_find_and_load" and "importlib" in frame.f_code.co_filename:
            return module or "a module"
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _use(device: Device) -> None:
    """Make a device and a stream of its own the current ones of the thread. **Local.**"""
    device.use()
    if device.kind == "cuda":
        device.xp.cuda.Stream(non_blocking=True).use()


def _communicator(host: ThreadCommunicator, device: Device, asked: str) -> tuple[Communicator, str]:
    """Return what carries the arrays of a world of threads, and why. **Collective.**"""
    reason = "ranks are threads of one process" if asked == "auto" else "as asked for"
    if all(each == CPU for each in host.meeting.exchange(host.rank, device)):
        return host, reason
    from .comm.staged import StagedCommunicator
    from .comm.thread_gpu import ThreadGpuCommunicator, unreachable

    missing = together(host, lambda: unreachable(host, device))
    if asked != "staged" and missing is None:
        return ThreadGpuCommunicator(host, device), reason
    if asked == "threads":
        raise on_all_ranks(
            CommunicationError(
                f'transport: expected threads to work, got: {missing}; use transport="auto" or "staged"'
            )
        )
    return StagedCommunicator(host, device), reason if missing is None else f"not threads: {missing}"
