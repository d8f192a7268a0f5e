"""The processes of this host, as far as one of its ranks needs to know them.

Owns the reading of Linux's ``/proc``: who started this process, whether it still lives, which of its children
are ranks. Elsewhere every question is answered "unknown" (None). Knows nothing of sockets and MPI.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import LaunchError
from .launch import announced

# The process that starts a node's ranks. The kernel cuts names at 15 characters.
_LAUNCHERS = frozenset(
    name[:15]
    for name in (
        *(
            "hydra_pmi_proxy",
            "hydra_bstrap_proxy",
            "pmi_proxy",
            "mpiexec.hydra",
            "mpiexec.gforker",
        ),  # MPICH, Intel MPI
        *("prterun", "prted", "prte", "orterun", "orted"),  # Open MPI
        *("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.openmpi", "mpirun.mpich", "mpiexec.mpich"),
        *("slurmstepd", "palsd", "apinit", "flux-shell"),
    )
)
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_GONE = ("Z", "X", "x")  # a zombie has ended; it only waits to be asked for its status


@dataclass(frozen=True)
class Process:
    """A process, told apart from a later one with the same id by its start.

    Attributes:
        pid: process id.
        start: clock ticks after boot at which it started.
        name: the kernel's name for it, at most 15 characters.
        parent: process id of its parent when it was looked at.
        state: the kernel's letter when it was looked at.
    """

    pid: int
    start: int
    name: str
    parent: int
    state: str

    @property
    def ended(self) -> bool:
        """Whether the process has ended by now. **Local.** 20 us."""
        now = look(self.pid)
        return now is None or now.start != self.start or now.state in _GONE


def look(pid: int) -> Process | None:
    """Return the process with this id, or None when there is none or this system does not say. **Local.**"""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
    return Process(pid, int(rest[19]), name, int(rest[1]), rest[0])


def ancestors(pid: int) -> Iterator[Process]:
    """Yield the process and those that started it, nearest first. **Local.**"""
    while pid > 0:
        process = look(pid)
        if process is None:
            return
        yield process
        pid = process.parent


def node_name() -> str:
    """Return what tells this host's processes and sockets from others': boot and name spaces. **Local.**"""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return " ".join([boot, os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid")])
    except OSError:
        return socket.gethostname()


def launcher(pid: int | None = None) -> Process | None:
    """Return the nearest ancestor that is a launcher, or None.

    **Local.** Wrappers between the two (``bash -c``, ``timeout``, ``numactl``) do not matter. None inside a
    container with process ids of its own.
    """
    chain = ancestors(os.getpid() if pid is None else pid)
    next(chain, None)
    return next((process for process in chain if process.name in _LAUNCHERS), None)


def children(pid: int) -> list[Process] | None:
    """Return the living children of a process, or None when this system does not say. **Local.**"""
    pids: set[int] = set()
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                pids.update(int(text) for text in file.read().split())
    except OSError:
        return None
    found = (look(child) for child in pids)
    return [
        child for child in found if child is not None and child.parent == pid and child.state not in _GONE
    ]


def end_with(parent: Process | None) -> None:
    """Let the kernel kill this process when its parent ends; with None, no more. **Local.**

    Linux alone; does nothing where ``parent`` is not this process's parent (a wrapper stands between). The kernel goes
    by the parent's *thread* that has started this process, so this is for a short time.
    """
    if sys.platform != "linux" or (parent is not None and os.getppid() != parent.pid):
        if parent is not None and parent.ended:
            os.kill(os.getpid(), signal.SIGKILL)  # it was killed before
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, 0 if parent is None else signal.SIGKILL, 0, 0, 0)
    if parent is not None and parent.ended:
        os.kill(os.getpid(), signal.SIGKILL)


def environment(pid: int) -> dict[str, str] | None:
    """Return the environment a process was started with, or None when it may not be read. **Local.**"""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            text = os.fsdecode(file.read())
    except OSError:
        return None
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def ranks_of(process: Process) -> set[int] | None:
    """Return the ranks that are living children of a launcher.

    **Local.** A child's rank stands in the environment it was started with; a wrapper's too.

    Returns:
        The ranks, or None when this system does not say.
    """
    found = children(process.pid)
    if found is None:
        return None
    ranks = set()
    for child in found:
        try:
            announcement = announced(environment(child.pid) or {})
        except LaunchError:
            continue
        if announcement is not None:
            ranks.add(announcement.rank)
    return ranks
