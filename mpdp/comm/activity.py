"""Activity: what this rank is doing, in a form that another thread may read at any moment.

Owns four attributes and no thread, socket or clock of its own. Communicators call :meth:`Activity.enter` and
:meth:`Activity.leave` around each blocking collective, the trainer sets :attr:`Activity.step`, and
:mod:`mpdp.comm.liveness` reads. One object is written by one thread at a time.

Collectives on a GPU block no thread of the host. Their transports register a :class:`Watched`, by which the ring
learns what the device waits for, and the device that a rank has failed.
"""

from __future__ import annotations

import contextlib
from time import monotonic
from typing import Protocol

from ..errors import RankFailedError


class Watched(Protocol):
    """A transport whose collectives run on a device. Its methods are called by any thread, and never wait."""

    def waiting(self) -> tuple[str, float] | None:
        """Return what the device waits in, and since when (``time.monotonic()``); None if it does not wait."""

    def error(self) -> str | None:
        """Return what has gone wrong on the device, in one line."""

    def abort(self) -> None:
        """Let all collectives on the device end: no other rank will answer."""


class Activity:
    """Record the step and the collective that a rank is in.

    **Local.** Plain attribute stores, 0.2 us for an enter and a leave together.

    Attributes:
        step: number of the update in progress.
        call: name of the collective that this rank is inside of, or None.
        since: ``time.monotonic()`` at which it entered, in seconds.
        count: collectives entered so far.
        failure: why no collective can succeed any more, or None. To set it ends what waits on a device.
        watched: transports whose collectives run on a device.
    """

    __slots__ = ("_failure", "call", "count", "since", "step", "watched")

    def __init__(self) -> None:
        self.step = 0
        self.call: str | None = None
        self.since = 0.0
        self.count = 0
        self.watched: list[Watched] = []
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        return self._failure

    @failure.setter
    def failure(self, text: str | None) -> None:
        self._failure = text
        if text is not None:
            for watched in tuple(self.watched):
                with contextlib.suppress(Exception):  # whoever tells of a failure goes on to end the job
                    watched.abort()

    def check(self, call: str) -> None:
        """Raise if this rank or another has failed. **Local.** See :meth:`enter`."""
        if self._failure is not None:
            raise secondary(
                f"{call}: expected all ranks alive, got a failure ({self._failure}); "
                "see the first report, this job is ending"
            )

    def waiting(self) -> tuple[str | None, float]:
        """Return the collective that this rank waits in, on the host or on its device, and since when. **Local.**"""
        call, since = self.call, self.since
        if call is None:
            for watched in tuple(self.watched):
                found = watched.waiting()
                if found is not None:
                    return found
        return call, since

    def enter(self, call: str) -> None:
        """Say that this rank enters the collective ``call``. **Local.**

        Raises:
            RankFailedError: this rank or another has failed, so nobody would answer. The error is
                ``secondary``: the failure itself was reported where it happened.
        """
        if self._failure is not None:
            self.check(call)
        self.count += 1
        self.since = monotonic()  # before `call`, so that a reader never pairs a new call with an old time
        self.call = call

    def resume(self, call: str) -> None:
        """Say that this rank is back in a collective that it has entered before. **Local.**"""
        if self._failure is None:
            self.since = monotonic()
            self.call = call

    def leave(self) -> None:
        """Say that the collective is over. **Local.**"""
        self.call = None

    def __str__(self) -> str:
        call, _ = self.waiting()
        return f"step {self.step}" if call is None else f"step {self.step} ({call})"


def secondary(message: str) -> RankFailedError:
    """Return an error that only repeats what another rank, or an earlier line, has reported. **Local.**"""
    error = RankFailedError(message)
    error.secondary = True
    return error
