"""Guard: whatever happens to this rank, the job ends soon, non-zero, with one report.

Owns the process's hooks for uncaught errors and for its end, the text of a report, the marks that ``mpdp run``
reads, and the ways in which a process ends its job. Process-wide by nature: beside the one world that
:mod:`mpdp.world` joins, it is the place of mpdp with module-level state. Imports neither MPI nor CUDA, because
:func:`install` runs at ``import mpdp``.

A rank's life, and what ends it:

1. before :func:`mpdp.init`: an error is reported and the process kills itself by a signal, which every
   launcher notices; an orderly end goes through :mod:`mpdp.comm.meeting`;
2. after it: the ring (:mod:`mpdp.comm.liveness`) is told, then ``MPI_Abort`` ends the job. An orderly end
   waits until all ranks are done. No collective is entered on the way out.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from . import processes
from .comm.activity import Activity
from .errors import LaunchError
from .launch import Announcement, announced
from .notice import Notice

if TYPE_CHECKING:
    from .comm.liveness import Ring

MARKS = "MPDP_MARKS"  # a directory in which `mpdp run` looks for the marks of its ranks
RANK_PROCESS = "MPDP_RANK_PROCESS"  # the process id of the rank, for the processes that it starts
RESTART = "MPDP_RESTART"  # how often `mpdp run --max-restarts` has started the job again
DEADLINE = 2.0  # seconds from a reported failure to the end of the job, whatever the program does meanwhile
SPREAD = 0.15  # seconds for a failure to get round the ring before its rank ends
READING = 0.05  # seconds that the launcher gets to read a rank's last line: MPICH's drops the rest when a rank aborts
TURN = 0.05  # seconds that a rank gives each lower one to report what all may have met
INTERRUPTED = 130


class Guard:
    """The state of one process: its announcement, its activity and, after init, its ring.

    Attributes:
        announcement: what the launcher said, or None where nothing is guarded.
        activity: what this rank is doing.
        launcher: the process that started the ranks of this node, where it is known.
        ring: the ring, once :func:`mpdp.init` has built it.
        notice: whether a signal has asked this process to end in order.
    """

    def __init__(self) -> None:
        self.announcement: Announcement | None = None
        self.activity = Activity()
        self.launcher: processes.Process | None = None
        self.ring: Ring | None = None
        self.notice = Notice(self._listens, self._not_obeyed)
        self.met = False
        self.error: BaseException | None = None  # the error that fail() has reported
        self._pid = 0
        self._reported = False
        self._written = 0.0  # when this rank has last written a line, by time.monotonic()
        self._asks = True  # where the others were says something of this failure
        self._ending = False
        self._finalizes_mpi = False
        self._lock = threading.Lock()
        self._at_end: list[Callable[[], None]] = []
        self._old_hook: Callable[..., Any] = sys.__excepthook__
        self._old_thread_hook: Callable[..., Any] = threading.__excepthook__

    # -- installation

    def install(self, environ: Mapping[str, str] | None = None) -> bool:
        """Guard this process if a launcher announced it as one rank of several.

        **Local.** 0.3 ms; does nothing the second time, in a process that a rank has started (a pool's
        worker, a tool), or when the launcher's variables make no sense: ``init`` then says so.

        Returns:
            Whether this process is guarded.
        """
        if self._pid == os.getpid():
            return self.announcement is not None and self.announcement.size > 1
        environ = os.environ if environ is None else environ
        try:
            announcement = announced(environ)
        except LaunchError:
            return False
        if announcement is None or _belongs_to_a_rank(environ):
            return False
        self._pid = os.getpid()
        self.announcement = announcement
        if environ.get(RANK_PROCESS, str(self._pid)) != str(self._pid):
            os.environ.pop(MARKS, None)  # they are those of the job whose rank has started this one
        os.environ[RANK_PROCESS] = str(self._pid)
        self._mark("started", _this_process())
        atexit.register(self._on_exit)
        if announcement.size == 1:
            return False
        self.launcher = processes.launcher()
        self._old_hook, sys.excepthook = sys.excepthook, self._on_error
        self._old_thread_hook, threading.excepthook = threading.excepthook, self._on_thread_error
        os.register_at_fork(after_in_child=self._on_fork)
        if not faulthandler.is_enabled():
            with contextlib.suppress(Exception):  # stderr is closed or is no file
                faulthandler.enable()
        return True

    def meet(self, timeout: float) -> None:
        """Wait until every rank of this node is about to call ``MPI_Init``.

        **Collective** over the node's ranks, without MPI.

        Args:
            timeout: seconds to wait for the others.

        Raises:
            RankFailedError: one of them left, died or failed before.
            StallError: one of them did not come in time.
        """
        from .comm import meeting

        if self.announcement is not None and self._pid == os.getpid():
            meeting.meet(self.announcement, self.launcher, timeout, reported=self._has_failed_mark)
        self.met = True

    @contextlib.contextmanager
    def starting_mpi(self, timeout: float) -> Iterator[None]:
        """Bound the time of ``MPI_Init``, in ``with guard.current.starting_mpi(t): from mpi4py import MPI``.

        **Local.** MPICH's holds the GIL and waits for ever for a rank that is gone. A rank of this node that
        goes is seen in :meth:`meet`; this is for one that goes a moment later, or on a node of its own. After
        ``timeout`` seconds a C thread prints the stack and ends the process. Open MPI's waits as long for a launcher
        that was killed: then the kernel ends this process.
        """
        guarded = self.announcement is not None and self.announcement.size > 1
        if self._pid == os.getpid() and "mpi4py.MPI" not in sys.modules:
            with contextlib.suppress(ImportError):  # mpi4py's own finalize runs in forked children too
                import mpi4py

                mpi4py.rc.finalize = False
                self._finalizes_mpi = True
        if guarded:
            with contextlib.suppress(Exception):  # stderr is closed or is no file
                faulthandler.dump_traceback_later(timeout, exit=True)
            processes.end_with(self.launcher)
        try:
            yield
        finally:
            if guarded:
                faulthandler.cancel_dump_traceback_later()
                processes.end_with(None)

    def attach(self, ring: Ring) -> None:
        """Hand over the ring that ``init`` has built; from now on failures go through it. **Local.**"""
        self.ring = ring

    def at_end(self, call: Callable[[], None]) -> None:
        """Let ``call()`` run at this process's orderly end, when all ranks have left. **Local.**

        It enters no collective: nobody watches any more.
        """
        self._at_end.append(call)

    # -- failures

    def fail(self, error: BaseException) -> None:
        """Report an error where it is raised, tell the other ranks, and see to it that the job ends.

        **Local.** The caller goes on raising ``error``: there are DEADLINE seconds for ``finally`` blocks and
        callbacks, in which a collective raises RankFailedError at once. Does nothing in a world of one.
        """
        if self.announcement is None or self.announcement.size == 1 or getattr(error, "agreed", False):
            return
        if getattr(error, "secondary", False) or self.error is not None:
            return
        others = self._give_way() or self._heard_of_a_failure()
        self.error = error
        if not others:
            self._report_error(error)
        if self.ring is not None:
            self.ring.fail(_summary(error), after=DEADLINE)

    def report(self, text: str, body: str = "") -> bool:
        """Print ``[rank/size] error in step k: text`` and a body on stderr, in one piece.

        **Local.** Any thread.

        Returns:
            Whether it was printed: a process prints one report.
        """
        with self._lock:
            if self._reported:
                return False
            self._reported = True
        where = "before init" if self.ring is None else f"in step {self.activity.step}"
        self._write(f"error {where}: {text}", body)
        self._mark("failed", f"{where}: {text}")
        return True

    def say_others(self) -> None:
        """Print what the other ranks were doing when this one reported a failure of its own. **Local.**"""
        others = "" if self.ring is None or not (self._reported and self._asks) else self.ring.others()
        if others:
            self._write(f"info the other ranks were then: {others}", "")

    def end(self, code: int = 1) -> None:
        """End this process and its job: by ``MPI_Abort`` where MPI runs, else by SIGKILL. Does not return.

        **Local.** Any thread.
        """
        with self._lock:
            first, self._ending = not self._ending, True
        if not first:
            time.sleep(60)
        with contextlib.suppress(Exception):
            self.say_others()
        time.sleep(max(0.0, self._written + READING - time.monotonic()))
        # A C thread that needs no GIL, in case that what follows blocks with it held.
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback_later(DEADLINE, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        mpi = sys.modules.get("mpi4py.MPI")
        with contextlib.suppress(Exception):
            if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
                mpi.COMM_WORLD.Abort(code)
        os.kill(os.getpid(), signal.SIGKILL)

    def fail_at_exit(self, error: BaseException) -> None:
        """End a program non-zero whose last work has failed, seen when the program was at its end. Does not return.

        **Local.** For functions registered with ``atexit``, where an error that is raised is printed and forgotten.
        """
        if self._pid == os.getpid() and self.announcement is not None and self.announcement.size > 1:
            self._uncaught(error)
        sys.excepthook(type(error), error, error.__traceback__)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if self._pid == os.getpid():
            self._mark("failed", _summary(error))
        os._exit(1)

    # -- hooks

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if self._pid != os.getpid():
            self._old_hook(kind, error, trace)
            return
        if error.__traceback__ is None:
            error = error.with_traceback(trace)
        self._uncaught(error)

    def _on_thread_error(self, args: Any) -> None:
        if self._pid != os.getpid():
            self._old_thread_hook(args)
        elif args.exc_type is not SystemExit:
            self._uncaught(args.exc_value or args.exc_type(), args.thread)

    def _uncaught(self, error: BaseException, thread: threading.Thread | None = None) -> None:
        assert self.announcement is not None
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        others_first = getattr(error, "agreed", False) or code == INTERRUPTED
        if self.error is not None:  # fail() has reported it, or what it led to
            time.sleep(SPREAD)
            self.end(code)
        if getattr(error, "secondary", False) or self._heard_of_a_failure():
            time.sleep(DEADLINE)  # whoever has reported it ends the job
            self.end(code)
        if (
            others_first
            and self.announcement.rank != 0
            and self._others_report(0.3 if code == INTERRUPTED else 2.0)
        ):
            time.sleep(DEADLINE)
            self.end(code)
        if not others_first and self._give_way():
            time.sleep(DEADLINE)
            self.end(code)
        self.error = error
        self._asks = not getattr(error, "agreed", False)
        try:
            self._report_error(error, thread)
            if self.ring is not None:
                self.ring.fail(_summary(error), code=code)
                time.sleep(SPREAD)
            else:
                self._tell_meeting(_summary(error))
        finally:  # whatever goes wrong here, in a process that may be out of memory
            self.end(code)

    def _on_exit(self) -> None:
        if self._pid != os.getpid() or self.announcement is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if self.announcement.size > 1:
            try:
                self._leave()
            except BaseException as error:  # atexit would print it and go on
                self._uncaught(error)
        self.notice.dismiss()
        self._finalize_mpi()
        self._mark("finished")

    def _leave(self) -> None:
        assert self.announcement is not None
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None and sys.excepthook != self._on_error:
            # Another hook has replaced ours (rich, a debugger) and has printed the traceback.
            self._uncaught(error)
        if self.error is not None:
            self.end(1)  # the program has caught an error of which the other ranks were told
        if self.ring is not None:
            self.ring.leave()
            for call in reversed(self._at_end):
                with contextlib.suppress(Exception):  # the work is done, and the system takes what is left
                    call()
            self.ring.close()
            if self.announcement.rank == 0:
                self._mark("finished", rank="all")
        elif self.met:
            self.report("this rank left inside mpdp.init()")
            self.end(1)
        else:
            from .comm import meeting

            meeting.leave(self.announcement, self.launcher)

    def _on_fork(self) -> None:
        """A forked child is no rank; its copies of the sockets would keep a dead rank's connections open."""
        if self.ring is not None:
            self.ring.forget()
            self.ring = None
        self.announcement = None

    def _finalize_mpi(self) -> None:
        """End MPI in this process, but not in the children that it has forked: theirs would tear down ours."""
        mpi = sys.modules.get("mpi4py.MPI")
        if self._finalizes_mpi and mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.Finalize()

    # -- parts

    def _heard_of_a_failure(self) -> bool:
        return self.error is None and self.ring is not None and self.ring.failure is not None

    def _give_way(self) -> bool:
        """Let lower ranks report first: a mistake in the program is often made by all. **Local.**

        Returns:
            Whether one of them has reported a failure meanwhile.
        """
        assert self.announcement is not None
        rank = self.announcement.rank
        if rank == 0:
            return False
        seconds = TURN * min(rank, 6)
        if self.ring is not None:
            return self._others_report(seconds)
        time.sleep(seconds)  # a launcher that sees rank 0 end ends this one too
        return any(self._has_failed_mark(lower) for lower in range(min(rank, 64)))

    def _others_report(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._heard_of_a_failure():
                return True
            time.sleep(0.01)
        return False

    def _tell_meeting(self, summary: str) -> None:
        from .comm import meeting

        assert self.announcement is not None
        if not self.met:
            with contextlib.suppress(Exception):
                meeting.tell_failure(self.announcement, self.launcher, summary)

    def _report_error(self, error: BaseException, thread: threading.Thread | None = None) -> None:
        assert self.announcement is not None
        if isinstance(error, KeyboardInterrupt):
            self.report("KeyboardInterrupt")
            return
        where = "" if thread is None or thread is threading.main_thread() else f" (in thread {thread.name!r})"
        summary = _summary(error) + where
        if getattr(error, "agreed", False) and not summary.endswith("(on every rank)"):
            summary += " (on all ranks)"
        self.report(summary, "".join(traceback.format_exception(error)))

    def _write(self, line: str, body: str) -> None:
        assert self.announcement is not None
        text = f"[{self.announcement.rank}/{self.announcement.size}] {line}\n{body}"
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        # One write to the descriptor: whole, also while the interpreter is going down or stderr is replaced.
        data = text.encode(errors="backslashreplace")
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(2, data) :]
        self._written = time.monotonic()

    def mark(self, kind: str, text: str, rank: int) -> None:
        """Leave a mark of a rank for ``mpdp run``, where that has started this process. **Local.**"""
        if self.announcement is not None or RANK_PROCESS not in os.environ:  # not in what a rank has started
            self._mark(kind, text, rank)

    def _listens(self, taken: bool) -> None:
        rank = 0 if self.announcement is None else self.announcement.rank
        if taken:
            self.mark("listening", "", rank)
        elif directory := os.environ.get(MARKS):
            with contextlib.suppress(OSError):
                os.remove(os.path.join(directory, f"listening.{rank}"))

    def _not_obeyed(self, number: int) -> None:
        """End a rank that has not come to the end of an update since a signal. In a thread of its own."""
        text = f"{signal.Signals(number).name} came, and the update under way has not ended since"
        if self.ring is not None:
            self.report(text)
            self.end(128 + number)
        with contextlib.suppress(OSError):
            os.write(2, f"[0/1] error {text}\n".encode())
        os._exit(128 + number)

    def _mark(self, kind: str, text: str = "", rank: int | str | None = None) -> None:
        directory = os.environ.get(MARKS)
        if not directory:
            return
        if rank is None:
            assert self.announcement is not None
            rank = self.announcement.rank
        name = f"{kind}.{rank}"
        with contextlib.suppress(OSError):  # a host without that folder; rank 0 marks for all
            with open(os.path.join(directory, name + ".part"), "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(os.path.join(directory, name + ".part"), os.path.join(directory, name))

    def _has_failed_mark(self, rank: int) -> bool:
        directory = os.environ.get(MARKS)
        return bool(directory) and os.path.exists(os.path.join(str(directory), f"failed.{rank}"))


def _summary(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _this_process() -> str:
    process = processes.look(os.getpid())
    return f"{processes.node_name()} {os.getpid()} {0 if process is None else process.start}"


def _belongs_to_a_rank(environ: Mapping[str, str]) -> bool:
    """Return whether a rank started this process, which has inherited its variables and is no rank."""
    spawned = sys.modules.get("multiprocessing.process")
    if spawned is not None and spawned.current_process().name != "MainProcess":
        return True
    text = environ.get(RANK_PROCESS, "")
    if not text.isdigit() or int(text) == os.getpid():
        return False
    nearest = processes.launcher()
    if nearest is None:
        return int(text) == os.getppid()
    for process in processes.ancestors(os.getppid()):
        if process.pid == nearest.pid:
            return False  # the mark is that of a rank which started this job
        if process.pid == int(text):
            return True
    return False


current = Guard()


def install() -> bool:
    """Guard this process if a launcher announced it as one rank of several. **Local.** See :class:`Guard`."""
    return current.install()
