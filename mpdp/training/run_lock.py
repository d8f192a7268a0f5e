"""The lock of a run folder: one job at a time writes there.

The process that writes holds an exclusive ``flock`` on the file ``lock``, whose text says which process that is. It
holds one for all its trainers of that folder, until what refers to it is gone. The kernel gives it up when the process
ends, however it ends. Where the file system knows no such locks there is none. This module knows folders, no runs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import time
import weakref
from pathlib import Path

NAME = "lock"
PATIENCE = 2.5  # seconds; a job that is killed and started again may find its predecessor still dying
_LOOK_SECONDS = 0.05
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class RunLock:
    """A lock that this process holds; it is given up when nobody refers to it any more.

    **Local.**

    Args:
        descriptor: of the locked file.
    """

    def __init__(self, descriptor: int) -> None:
        self.close = weakref.finalize(self, _close, descriptor, os.getpid())


_held: weakref.WeakValueDictionary[tuple[int, int], RunLock] = weakref.WeakValueDictionary()


def take(folder: Path, patience: float = PATIENCE) -> RunLock | None:
    """Return the lock of a folder, the one that this process holds already if it does.

    **Local.**

    Args:
        folder: it is there, and can be written.
        patience: seconds to wait for another process to give it up.

    Returns:
        the lock; None where the file system knows none.

    Raises:
        ValueError: another process holds it.
        OSError: the file cannot be written.
    """
    path = folder / NAME
    deadline = time.monotonic() + patience
    while True:
        try:
            return _try(path)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"run_dir: expected a folder where no other job writes, got {folder} where another running job does"
                    f" ({_holder(path)}); let it end or choose another folder; if its machine is gone, remove {path}"
                ) from None
        time.sleep(_LOOK_SECONDS)


def _try(path: Path) -> RunLock | None:
    """Take the lock, or raise BlockingIOError where another process holds it."""
    with contextlib.suppress(FileNotFoundError):
        held = _held.get(_identity(os.stat(path)))
        if held is not None:
            return held
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in _NO_LOCKS:
            return None
        raise
    lock = _held[_identity(os.fstat(descriptor))] = RunLock(descriptor)
    text = f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    with contextlib.suppress(OSError):  # for readers alone: a full disk is said where it matters
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
    return lock


def _identity(status: os.stat_result) -> tuple[int, int]:
    """Return what stays when a folder is renamed, and is another for a folder made anew."""
    return status.st_dev, status.st_ino


def _holder(path: Path) -> str:
    """Return what the one who holds a lock says of itself."""
    try:
        with open(path, "rb") as file:
            lines = file.read(200).decode(errors="replace").splitlines()
    except OSError:
        lines = []
    said = "".join(character for character in (lines or [""])[0] if character.isprintable()).strip()
    return said or "its file does not say which process"


def _close(descriptor: int, pid: int) -> None:
    """Give a lock up, and say so in the file; a forked child lets go of its copy alone."""
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _let_go() -> None:
    """Let no forked child keep a lock when its parent is gone."""
    for lock in list(_held.values()):
        lock.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
