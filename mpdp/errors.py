"""The exceptions of mpdp.

A user's input (shapes, dtypes, labels, arguments) raises ``ValueError`` or ``TypeError``.
Everything else raises a class of this tree::

    MpdpError
    |-- LaunchError             the launcher and the world do not fit, or no MPI was found
    |-- MissingDependencyError  an optional package is asked for and not installed
    |-- CommunicationError      a message between ranks could not be carried
    |   |-- RankFailedError     another rank raised, died or left
    |   `-- StallError          a rank waited longer than the world's timeout
    |-- DisagreementError       ranks hold different things where they must be equal
    |   `-- DivergenceError     replicas differ although every input agreed
    |-- DeviceError             a device is unknown, missing or out of memory
    |   `-- DeviceMismatchError operands of one operation live on different devices
    |-- TapeError               a tape was used after it was consumed
    |-- NonFiniteError          a loss or a gradient is NaN or infinite
    |-- CheckpointError         a checkpoint is missing, torn or does not fit
    `-- WorkerError             a worker process of a data set failed or cannot be started

    SystemExit
    `-- Preempted               a signal has asked the job to end: exit status 75

An error that all ranks raise together carries ``agreed = True``: it was settled by a small
all-reduce, so no rank is left waiting and a program may catch it on every rank and go on.
"""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class MpdpError(Exception):
    """Base of every error that is not the fault of one argument.

    Attributes:
        agreed: every rank raises it, so no rank is left waiting.
        secondary: it only repeats what another rank, or an earlier line, has reported.
    """

    agreed = False
    secondary = False


class LaunchError(MpdpError):
    """The launcher and the world do not fit, or no MPI library was found."""


class MissingDependencyError(MpdpError, ImportError):
    """An optional package is asked for and not installed; the message holds the install line."""


class CommunicationError(MpdpError):
    """A message between ranks could not be carried."""


class RankFailedError(CommunicationError):
    """Another rank raised, died or left while this one needs it."""


class StallError(CommunicationError):
    """A rank waited longer than the world's timeout."""


class DisagreementError(MpdpError):
    """Ranks hold different things where they must be equal."""


class DivergenceError(DisagreementError):
    """Replicas differ although every input agreed.

    Attributes:
        root: the rank whose state most ranks share; the lowest of them.
        repaired: what to say where all ranks have taken it over.
    """

    root = 0
    repaired = ""


class DeviceError(MpdpError):
    """A device is unknown, missing or out of memory."""


class DeviceMismatchError(DeviceError):
    """Operands of one operation live on different devices."""


class TapeError(MpdpError):
    """A tape was used after it was consumed."""


class NonFiniteError(MpdpError):
    """A loss or a gradient is NaN or infinite."""


class CheckpointError(MpdpError):
    """A checkpoint is missing, torn or does not fit the model."""


class WorkerError(MpdpError):
    """A worker process of a data set failed, died, or cannot be started."""


class Preempted(SystemExit):
    """SIGTERM or SIGUSR1 has ended the training on all ranks after the same update, in order.

    A ``SystemExit``, so that ``finally`` blocks run and ``except Exception`` does not stop it; not caught, it ends the
    program with status 75, by which a scheduler or ``mpdp run --max-restarts`` knows that the run may go on.

    Args:
        message: what came, and what was saved.
    """

    agreed = True
    secondary = False
    STATUS = 75  # EX_TEMPFAIL of sysexits.h: try again

    def __init__(self, message: str) -> None:
        super().__init__(self.STATUS)
        self.message = message

    def __str__(self) -> str:
        return self.message


def on_all_ranks(error: E) -> E:
    """Mark an error that every rank raises by itself, from what all of them know; return it. **Local.**

    The guard then lets rank 0 alone report it, and a program may catch it on every rank.
    """
    error.agreed = True  # type: ignore[attr-defined]
    return error
