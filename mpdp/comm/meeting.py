"""Meeting: the ranks of one node wait for each other before any of them calls ``MPI_Init``.

MPICH's ``MPI_Init`` waits for ever for a rank that has exited before it, and it holds the GIL: no thread of a
waiting rank could say so. So the ranks meet on a socket first. Whoever comes first is the host; all others
connect to it and say why they come: to call ``init``, or to end without it. The host speaks one verdict to
all.

======  =================================================================================
go      all of the node's ranks are here to call ``init``
gone    none is: a script that only imports mpdp ends in order
fail    some are and some never will be: one of them reports, and the job ends
======  =================================================================================

The name of the socket comes from the user and the node's launcher process, so that nobody has to announce it
and jobs never mix. Where the launcher is unknown (no Linux, a container with process ids of its own) there
is no meeting. Knows no MPI and no ring; ranks of other nodes meet among themselves.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from ..errors import MpdpError, RankFailedError, StallError
from ..launch import Announcement
from ..processes import Process, ranks_of
from .activity import secondary
from .links import Link, same_user

LOOK = 0.25  # seconds between looks at the launcher's children: 0.2 ms each
VANISHED = 1.0  # a rank is given up when it is missing for so long; a launcher that kills all is faster


def meet(
    announcement: Announcement,
    launcher: Process | None,
    timeout: float,
    *,
    reported: Callable[[int], bool] = lambda rank: False,
) -> None:
    """Wait until every rank of this node has come to call ``MPI_Init``.

    **Collective** over the node's ranks, without MPI. 1 to 3 ms when all are there.

    Args:
        announcement: what the launcher said.
        launcher: the process that started the node's ranks.
        timeout: seconds to wait for the others.
        reported: whether the failure of a rank is known to have been reported.

    Raises:
        RankFailedError: a rank of the node left or ended before it came here. On all ranks but one the error
            is ``secondary``.
        StallError: one has not come within ``timeout``.
    """
    meeting = _open(announcement, launcher)
    if meeting is None:
        return
    verdict = meeting.gather("init", timeout, reported)
    if verdict["kind"] == "fail":
        if verdict["reporter"] != announcement.rank:
            raise secondary(verdict["text"])
        kind: type[MpdpError] = StallError if verdict["stall"] else RankFailedError
        raise kind(verdict["text"])


def leave(announcement: Announcement, launcher: Process | None) -> None:
    """Say that this rank ends in order without ``init``, and wait until that is known to be right or wrong.

    **Collective** over the node's ranks, without MPI. Comes back when all of them end so, when one that
    waits in :func:`meet` has been told, or when no other lives.
    """
    meeting = _open(announcement, launcher)
    if meeting is not None:
        meeting.gather("leave", float("inf"), lambda rank: False)


def tell_failure(announcement: Announcement, launcher: Process | None, summary: str) -> None:
    """Tell those who wait that this rank has failed and has reported it. **Local.** Waits for nobody."""
    meeting = _open(announcement, launcher)
    if meeting is not None:
        meeting.tell("failed", summary)


def _open(announcement: Announcement, launcher: Process | None) -> _Meeting | None:
    if launcher is None or announcement.local_size is None or announcement.local_size == 1:
        return None
    return _Meeting(announcement, launcher, announcement.local_size)


class _Meeting:
    def __init__(self, announcement: Announcement, launcher: Process, expected: int) -> None:
        self.announcement, self.launcher, self.expected = announcement, launcher, expected
        self.name = f"\0mpdp-meeting-{os.getuid()}-{launcher.pid}-{launcher.start}"

    def gather(self, word: str, timeout: float, reported: Callable[[int], bool]) -> dict[str, Any]:
        """Be the host, or a guest of whoever is; a host that dies is replaced by a guest."""
        begin = time.monotonic()
        while True:
            host = self._bind()
            if host is not None:
                with host:
                    return _Host(self, host, word, begin + timeout, reported).preside()
            link = self._enter(word)
            verdict = None if link is None else self._await(link, word, begin, timeout)
            if verdict is not None:
                return verdict
            time.sleep(0.005)

    def tell(self, word: str, summary: str) -> None:
        link = self._enter(word, summary)
        if link is not None:
            link.close()

    def _bind(self) -> socket.socket | None:
        host = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            host.bind(self.name)
        except OSError:
            host.close()
            return None
        host.listen(self.expected + 8)
        host.setblocking(False)
        return host

    def _enter(self, word: str, text: str = "") -> Link | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(5.0)
            sock.connect(self.name)
            if not same_user(sock):
                raise OSError("the socket belongs to another user")
        except OSError:
            sock.close()
            return None
        link = Link(sock)
        link.send("hello", rank=self.announcement.rank, word=word, text=text)
        return link

    def _await(self, link: Link, word: str, begin: float, timeout: float) -> dict[str, Any] | None:
        """Return the verdict; None when the host has ended without one."""
        with selectors.DefaultSelector() as selector:
            selector.register(link, selectors.EVENT_READ)
            while not link.closed:
                selector.select(1.0)
                for message in link.receive():
                    link.close()
                    return message
                if word == "init" and time.monotonic() - begin > timeout + 5:  # the host should have said so
                    link.close()
                    text = f"mpdp.init: expected all ranks of this node within {timeout:g} s, got no verdict"
                    return {"kind": "fail", "reporter": self.announcement.rank, "text": text, "stall": True}
        link.close()
        return None


class _Host:
    def __init__(
        self,
        meeting: _Meeting,
        host: socket.socket,
        word: str,
        deadline: float,
        reported: Callable[[int], bool],
    ) -> None:
        self._meeting, self._host = meeting, host
        self._deadline, self._reported = deadline, reported
        self._words: dict[int, str] = {meeting.announcement.rank: word}
        self._failed: dict[int, str] = {}
        self._links: list[Link] = []
        self._rank_of: dict[Link, int] = {}
        self._missing: dict[int, float] = {}
        self._next_look = 0.0
        self._begin = time.monotonic()

    def preside(self) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._host, selectors.EVENT_READ, None)
            while True:
                verdict = self._judge(time.monotonic())
                if verdict is not None:
                    break
                for key, _ in selector.select(LOOK):
                    if key.data is None:
                        self._accept(selector)
                    else:
                        self._listen(key.data, selector)
        for link in self._links:
            link.send(**verdict)
            link.close()
        return verdict

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            sock, _ = self._host.accept()
        except OSError:
            return
        if not same_user(sock):
            sock.close()
            return
        link = Link(sock)
        self._links.append(link)
        selector.register(link, selectors.EVENT_READ, link)

    def _listen(self, link: Link, selector: selectors.BaseSelector) -> None:
        for message in link.receive():
            rank, word = int(message.get("rank", -1)), message.get("word")
            if word == "failed":
                self._failed[rank] = f"rank {rank} failed before mpdp.init(): {message.get('text')}"
            else:
                self._words[rank] = str(word)
                self._rank_of[link] = rank
                if word == "init" and len(self._waiting()) == 1:
                    self._begin = time.monotonic()
        if link.closed:
            selector.unregister(link)
            self._links.remove(link)
            link.close()
            self._words.pop(self._rank_of.pop(link, -1), None)

    def _waiting(self) -> list[int]:
        return sorted(rank for rank, word in self._words.items() if word == "init")

    def _judge(self, now: float) -> dict[str, Any] | None:
        waiting = self._waiting()
        leaving = sorted(rank for rank, word in self._words.items() if word == "leave")
        if len(waiting) == self._meeting.expected:
            return {"kind": "go"}
        if len(leaving) == self._meeting.expected:
            return {"kind": "gone"}
        if waiting and self._failed:
            return _fail(-1, next(iter(self._failed.values())))
        if waiting and leaving:
            return _fail(
                waiting[0], f"{_ranks(leaving)} left before mpdp.init() while {_wait(waiting)} in it"
            )
        if now >= self._next_look:
            self._next_look = now + LOOK
            if self._meeting.launcher.ended:
                name = self._meeting.launcher.name
                text = f"the launcher ({name}) is gone while {_wait(waiting)} in mpdp.init()"
                return _fail(waiting[0], text) if waiting else {"kind": "gone"}
            lost = self._vanished(now)
            if lost is not None and not waiting and len(leaving) + len(lost) >= self._meeting.expected:
                return {"kind": "gone"}
            if lost and waiting:
                text = (
                    f"{_ranks(lost)} ended before mpdp.init() without a word (killed, crashed or os._exit) "
                    f"while {_wait(waiting)} in it"
                )
                return _fail(-1 if any(self._reported(rank) for rank in lost) else waiting[0], text)
        if waiting and now > self._deadline:
            others = sorted(set(range(self._meeting.announcement.size)) - set(waiting))
            who = _ranks(others) if self._one_node() else f"{self._meeting.expected - len(waiting)} rank(s)"
            text = (
                f"mpdp.init: expected all {self._meeting.expected} ranks of this node within "
                f"{now - self._begin:.0f} s, got no word from {who}; "
                "every rank has to call mpdp.init(); give it a larger timeout if some come late"
            )
            return _fail(waiting[0], text, stall=True)
        return None

    def _one_node(self) -> bool:
        return self._meeting.expected == self._meeting.announcement.size

    def _vanished(self, now: float) -> list[int] | None:
        """Return the ranks that are neither here nor living children of the launcher; None if unknown."""
        alive = ranks_of(self._meeting.launcher)
        if alive is None or self._meeting.announcement.rank not in alive:
            return None
        known = alive | set(self._words)
        count = self._meeting.expected - len(known)
        if count <= 0:
            self._missing.clear()
            return []
        # On several nodes the ranks of this one cannot be named: -1 stands for each of them.
        lost = sorted(set(range(self._meeting.expected)) - known) if self._one_node() else [-1] * count
        self._missing = {rank: self._missing.get(rank, now) for rank in set(lost)}
        return [rank for rank in lost if now - self._missing[rank] > VANISHED]


def _fail(reporter: int, text: str, stall: bool = False) -> dict[str, Any]:
    return {"kind": "fail", "reporter": reporter, "text": text, "stall": stall}


def _ranks(ranks: list[int]) -> str:
    if -1 in ranks:
        return f"{len(ranks)} rank(s) of this node"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank) for rank in ranks)


def _wait(ranks: list[int]) -> str:
    return f"{_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"
