"""Liveness: a ring of sockets on which ranks learn that one of them failed, died, left or stalls.

Owns one daemon thread a rank. Each rank holds a link to its successor and one from its predecessor, so the
cost does not grow with the number of ranks. Needs no MPI: a peer that hangs inside MPI, or inside C code
that holds the GIL, is alive as long as its sockets are open. How a process reports and ends is
:mod:`mpdp.guard`'s part.

Messages travel both ways round the ring, so that they pass a rank that is gone:

======  ==============================================================================================
beat    each second: step and collective of a neighbour
fail    a failure that is already reported: be quiet, and end when the deadline passes
stall   a rank waited too long: everyone prints what it is doing
where   the answer to both, on its way to the rank that reports: what another one is doing
left    the first rank that came to its orderly end
token   from rank 0 to its successor and on, each rank once it has left; back at rank 0, all have left
bye     all have left: the end of this connection is no death
======  ==============================================================================================
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ..errors import CommunicationError
from ..processes import Process
from .activity import Activity
from .links import Link, Listener, connect
from .whereabouts import Whereabouts

BEAT = 1.0  # seconds between heartbeats
GRACE = (
    1.0  # a rank that left may have served the collective that others are still in: so long they may finish
)
FINISHING = 10.0  # the same where the count of collectives says that it has indeed served it
SPREAD = 0.15  # a reported failure gets round the ring before its rank ends: about 0.1 ms a rank
QUIET = 2.0  # a rank whose peer has reported waits so long to be ended by the launcher
SUSPENDED = 5.0  # this thread did not run for so long: the clocks of the others mean nothing


class Ring:
    """Watch over the ranks of a world.

    Use: ``address = ring.listen(...)``, give it to the predecessor through MPI,
    ``ring.connect(successor's)``.

    Args:
        rank: of this process.
        size: ranks in the world, at least 2.
        activity: what this rank is doing.
        timeout: seconds a rank may be inside one collective, or be silent.
        abort: ends the job with a status; called from the ring's thread; must not return.
        report: prints a report, ``report(text, body="")``; False when this process has printed one already.
        launcher: the process whose end means that nobody would clean up after this rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        activity: Activity,
        *,
        timeout: float,
        abort: Callable[[int], object],
        report: Callable[..., object],
        launcher: Process | None = None,
    ) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.activity = activity
        self._abort, self._report, self._launcher = abort, report, launcher
        self._lock = threading.RLock()
        self._listener: Listener | None = None
        self._successor: Link | None = None
        self._predecessor: Link | None = None
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._wake_read.setblocking(False)
        self._closing = False
        self._deadline: tuple[float, int] | None = None  # when to end, and with which status
        self._departed: dict[str, Any] | None = None  # the first rank that left: its words, when we heard
        self._deaths: dict[int, float] = {}  # neighbour -> when its connection ended
        self._reporter = size  # the lowest rank that is known to have reported,
        self._teller: Link | None = None  # where this rank has heard of it,
        self._others: Whereabouts | None = None  # and what has come back, where it is this one
        self._left = False
        self._token = False
        self._stalled = False
        self._next_beat = 0.0
        self._resumed = 0.0
        self.all_left = threading.Event()

    # -- the calls of other threads

    @property
    def failure(self) -> str | None:
        """What has failed, here or on another rank; it has been reported. None as long as all is well."""
        return self.activity.failure

    def others(self) -> str:
        """Return what the other ranks said they were doing when this one told them of a failure. **Local.**

        Empty where this rank has told nothing.
        """
        return "" if self._others is None else str(self._others)

    def listen(self, across_nodes: bool = False) -> bytes:
        """Open this rank's end and return its address, of ``links.ADDRESS_BYTES`` bytes. **Local.**"""
        self._listener = Listener(across_nodes)
        return self._listener.address

    def connect(self, successor: bytes, patience: float = 30.0) -> None:
        """Join the ring and start to watch.

        **Collective** over the ring, without MPI.

        Args:
            successor: address of rank (rank + 1) % size.
            patience: seconds to wait for the neighbours.

        Raises:
            CommunicationError: a neighbour cannot be reached.
        """
        assert self._listener is not None, "listen() comes first"
        deadline = time.monotonic() + patience
        before = (self.rank - 1) % self.size
        try:
            self._successor = connect(successor, deadline, rank=self.rank)
            accepted = self._listener.accept(deadline)
            self._predecessor = None if accepted is None else accepted[0]
            if accepted is None or accepted[1].get("rank") != before:
                got = "nobody" if accepted is None else f"rank {accepted[1].get('rank')}"
                raise CommunicationError(
                    f"ring: expected rank {before} to connect within {patience:g} s, got {got}; "
                    "open TCP between the nodes, or check their host names"
                )
        except CommunicationError:
            self.forget()
            raise
        finally:
            self._listener.close()
        self._thread = threading.Thread(target=self._run, name="mpdp-liveness", daemon=True)
        self._thread.start()

    def fail(self, summary: str, *, after: float = QUIET, code: int = 1) -> None:
        """Tell the ring of a failure that this rank has reported, and end after a while. **Local.**

        Args:
            summary: one line.
            after: seconds until this rank ends the job.
            code: status of the job.
        """
        with self._lock:
            if self.activity.failure is None:
                self.activity.failure = f"rank {self.rank} failed in step {self.activity.step}: {summary}"
                self._gather()
            self._send_round("fail", None, rank=self.rank, text=self.activity.failure)
            self._end_in(after, code)
        self._wake()

    def leave(self) -> None:
        """Say that this rank is done and wait until all are. **Collective**, without MPI.

        Does not come back when another rank fails or still needs this one: then the job ends.
        """
        with self._lock:
            self._left = True
            self.activity.call = None
            if self._departed is None:
                words = {"rank": self.rank, "step": self.activity.step, "count": self.activity.count}
                self._depart(words, None)
            if self._token or self.rank == 0:
                self._pass_token()
        self._wake()
        while not self.all_left.wait(0.2):  # in slices, so that a signal is handled
            pass

    def hold(self) -> None:
        """Stand still until :meth:`release`, for a measurement of what watching costs. **Local.**"""
        self._lock.acquire()

    def release(self) -> None:
        """Go on after :meth:`hold`. **Local.** The same thread calls it."""
        self._resumed = time.monotonic()
        self._lock.release()

    def close(self) -> None:
        """Stop watching. **Local.** Without :meth:`leave` before it, the others take it for a death."""
        self._closing = True
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self.forget()

    def forget(self) -> None:
        """Close the sockets, no more. **Local.** For a forked child: its copies would hide a death."""
        for end in (self._successor, self._predecessor):
            if end is not None:
                end.sock.close()
        for sock in (self._wake_read, self._wake_write):
            sock.close()

    # -- the thread

    def _run(self) -> None:
        assert self._successor is not None and self._predecessor is not None
        selector = selectors.DefaultSelector()
        selector.register(self._wake_read, selectors.EVENT_READ, None)
        selector.register(
            self._successor, selectors.EVENT_READ, (self._successor, (self.rank + 1) % self.size)
        )
        selector.register(
            self._predecessor, selectors.EVENT_READ, (self._predecessor, (self.rank - 1) % self.size)
        )
        last = time.monotonic()
        while not self._closing:
            for key, _ in selector.select(self._pause(last)):
                if key.data is None:
                    self._drain()
                    continue
                link, neighbour = key.data
                messages = link.receive()
                with self._lock:
                    for message in messages:
                        self._handle(link, message)
                    if link.closed:
                        selector.unregister(link)
                        if not self.all_left.is_set() and self.activity.failure is None:
                            self._deaths.setdefault(neighbour, time.monotonic())
            now = time.monotonic()
            with self._lock:
                if now - last > SUSPENDED:
                    self._resumed = now
                last = now
                self._tick(now)

    def _pause(self, now: float) -> float:
        if self._deadline or self._deaths or (self._departed and not self._left):
            return 0.05
        return max(0.0, min(self._next_beat - now, BEAT, self.timeout / 4))

    def _handle(self, link: Link, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind in ("fail", "stall") and self._is_news(kind, message["rank"]):
            self._learn(link, kind, message)
            if kind == "stall" and not self._stalled:
                self._print_stall()
        elif kind == "where":
            if self._others is not None:
                self._others.note(message["rank"], str(message["text"]))
            elif self._teller is not None:
                self._teller.send("where", rank=message["rank"], text=message["text"])
        elif kind == "left" and self._departed is None:
            self._depart({key: message[key] for key in ("rank", "step", "count")}, link)
        elif kind == "token":
            if self.rank == 0:
                self._say_bye(None)
            elif self._left:
                self._pass_token()
            else:
                self._token = True
        elif kind == "bye":
            self._say_bye(link)

    def _tick(self, now: float) -> None:
        if self._deadline is not None and now >= self._deadline[0]:
            self._abort(self._deadline[1])
        if now >= self._next_beat:
            self._next_beat = now + BEAT
            self._send_round("beat", None, step=self.activity.step, call=self.activity.waiting()[0])
            if self._launcher is not None and self.activity.failure is None and self._launcher.ended:
                self._declare(f"the launcher ({self._launcher.name}, process {self._launcher.pid}) is gone")
        if self.activity.failure is not None or self.all_left.is_set():
            return
        self._judge_deaths(now)
        self._judge_devices()
        self._judge_departure(now)
        self._judge_stall(now)

    # -- judgements

    def _judge_deaths(self, now: float) -> None:
        for neighbour, since in self._deaths.items():
            # The successor speaks at once, the predecessor only when it hears nothing: one report.
            if neighbour == (self.rank - 1) % self.size or now - since > GRACE:
                self._declare(
                    f"rank {neighbour} died: its process ended without a word (killed, crashed or os._exit) "
                    f"while rank {self.rank} is in {self.activity}"
                )
                return

    def _judge_devices(self) -> None:
        for watched in tuple(self.activity.watched):
            text = watched.error()
            if text is not None:
                self._declare(text)
                return

    def _judge_departure(self, now: float) -> None:
        (call, since), gone = self.activity.waiting(), self._departed
        if call is None or gone is None or self._left:
            return
        distance = (self.rank - gone["rank"] - 1) % self.size
        grace = GRACE if self.activity.count > gone["count"] else FINISHING
        if now - max(gone["heard"], since) > grace + 0.25 * min(distance, 4):
            self._declare(f"rank {gone['rank']} left while rank {self.rank} is in {self.activity}")

    def _judge_stall(self, now: float) -> None:
        call, since = self.activity.waiting()
        if call is not None and now - max(since, self._resumed) > self.timeout:
            summary = f"rank {self.rank} waits for more than {self.timeout:g} s"
        else:
            for link, step in ((self._predecessor, -1), (self._successor, 1)):
                assert link is not None
                if now - max(link.heard, self._resumed) > self.timeout + 2 * BEAT:
                    silent = (self.rank + step) % self.size
                    summary = f"rank {silent} has been silent for more than {self.timeout:g} s"
                    break
            else:
                return
        self.activity.failure = summary
        self._gather()
        self._send_round("stall", None, rank=self.rank, text=summary)
        self._print_stall()
        self._end_in(1.0, 1)

    def _print_stall(self) -> None:
        self._stalled = True
        call, since = self.activity.waiting()
        where = "in no collective" if call is None else f"{call}, since {time.monotonic() - since:.1f} s"
        frames = sys._current_frames()
        frame = frames.get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        if call is None:  # what this rank waits for may be another thread's doing: a loader in a read
            for thread in threading.enumerate():
                frame = frames.get(thread.ident or 0)
                if frame is not None and thread not in (threading.main_thread(), threading.current_thread()):
                    stack += f"thread {thread.name!r}:\n" + "".join(traceback.format_stack(frame))
        self._report(f"stalled: rank {self.rank}, step {self.activity.step}, {where} ({self.failure})", stack)

    # -- actions, under the lock

    def _declare(self, text: str) -> None:
        """Report a failure that this thread has found, tell the others, end soon."""
        self.activity.failure = text
        self._gather()
        self._report(text)
        self._send_round("fail", None, rank=self.rank, text=text)
        self._end_in(SPREAD, 1)

    def _is_news(self, kind: str, reporter: int) -> bool:
        """Of several ranks that report at once, all answer the lowest."""
        first = self.activity.failure is None or (kind == "stall" and not self._stalled)
        return first or reporter < self._reporter

    def _learn(self, link: Link, kind: str, message: dict[str, Any]) -> None:
        if self.activity.failure is None:
            self.activity.failure = str(message["text"])
        if message["rank"] < self._reporter:
            self._reporter, self._teller, self._others = message["rank"], link, None
            if Whereabouts(self.rank, self.size).near(self.rank, self._reporter):
                link.send("where", rank=self.rank, text=self._where())
        self._send_round(kind, link, rank=message["rank"], text=message["text"])
        self._end_in(QUIET + GRACE if kind == "stall" else QUIET, 1)

    def _gather(self) -> None:
        self._reporter, self._others = self.rank, Whereabouts(self.rank, self.size)

    def _where(self) -> str:
        call, since = self.activity.waiting()
        if self._left:
            return f"at its end, behind step {self.activity.step}"
        return f"in {self.activity}" + ("" if call is None else f" for {time.monotonic() - since:.1f} s")

    def _depart(self, words: dict[str, Any], link: Link | None) -> None:
        self._departed = {**words, "heard": time.monotonic()}
        self._send_round("left", link, **words)

    def _pass_token(self) -> None:
        assert self._successor is not None
        self._token = False
        self._successor.send("token")

    def _say_bye(self, link: Link | None) -> None:
        if not self.all_left.is_set():
            self._send_round("bye", link)
            self.all_left.set()

    def _send_round(self, kind: str, source: Link | None, **fields: Any) -> None:
        for link in (self._successor, self._predecessor):
            if link is not None and link is not source:
                link.send(kind, **fields)

    def _end_in(self, seconds: float, code: int) -> None:
        when = time.monotonic() + seconds
        if self._deadline is None or when < self._deadline[0]:
            self._deadline = (when, code)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b"!")

    def _drain(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_read.recv(4096)
