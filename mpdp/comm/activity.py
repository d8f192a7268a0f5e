"""Activity: what this rank is doing, in a form that another thread may read at any moment.

Owns four attributes and no thread, socket or clock of its own. Communicators call :meth:`Activity.enter` and
:meth:`Activity.leave` around each blocking collective, the trainer sets :attr:`Activity.step`, and
:mod:`mpdp.comm.liveness` reads. One object is written by one thread at a time.
"""

from __future__ import annotations

from time import monotonic

from ..errors import RankFailedError


class Activity:
    """Record the step and the collective that a rank is in.

    **Local.** Plain attribute stores, 0.2 us for an enter and a leave together.

    Attributes:
        step: number of the update in progress.
        call: name of the collective that this rank is inside of, or None.
        since: ``time.monotonic()`` at which it entered, in seconds.
        count: collectives entered so far.
        failure: why no collective can succeed any more, or None.
    """

    __slots__ = ("call", "count", "failure", "since", "step")

    def __init__(self) -> None:
        self.step = 0
        self.call: str | None = None
        self.since = 0.0
        self.count = 0
        self.failure: str | None = None

    def enter(self, call: str) -> None:
        """Say that this rank enters the collective ``call``. **Local.**

        Raises:
            RankFailedError: this rank or another has failed, so nobody would answer. The error is
                ``secondary``: the failure itself was reported where it happened.
        """
        if self.failure is not None:
            raise secondary(
                f"{call}: expected all ranks alive, got a failure ({self.failure}); "
                "see the first report, this job is ending"
            )
        self.count += 1
        self.since = monotonic()  # before `call`, so that a reader never pairs a new call with an old time
        self.call = call

    def resume(self, call: str) -> None:
        """Say that this rank is back in a collective that it has entered before. **Local.**"""
        if self.failure is None:
            self.since = monotonic()
            self.call = call

    def leave(self) -> None:
        """Say that the collective is over. **Local.**"""
        self.call = None

    def __str__(self) -> str:
        call = self.call
        return f"step {self.step}" if call is None else f"step {self.step} ({call})"


def secondary(message: str) -> RankFailedError:
    """Return an error that only repeats what another rank, or an earlier line, has reported. **Local.**"""
    error = RankFailedError(message)
    error.secondary = True
    return error
