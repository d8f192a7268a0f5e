"""What a launcher announced to this process, read from the environment alone, and which code it runs.

Owns the table of launchers. Knows nothing of MPI, sockets or processes, imports neither, and changes nothing,
so that ``import mpdp`` may ask. :mod:`mpdp.guard` acts on the answer; :mod:`mpdp.world` compares it with the
world that MPI then gives.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import LaunchError


@dataclass(frozen=True)
class Announcement:
    """What the launcher said of this process.

    Attributes:
        size: processes in the job.
        rank: index of this one.
        local_rank: index among those of its node, or None where the launcher does not say.
        local_size: processes of the job on this node, or None where the launcher does not say.
        launcher: ``"openmpi"``, ``"hydra"`` (of MPICH and Intel MPI), ``"slurm"``, ``"pals"``, ``"flux"``,
            ``"pmi"`` or ``"pmix"``.
    """

    size: int
    rank: int
    local_rank: int | None
    local_size: int | None
    launcher: str


@dataclass(frozen=True)
class _Launcher:
    name: str
    size: tuple[str, ...]
    rank: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    also: tuple[str, ...] = ()  # every one of these must be set, else the row does not apply


# The first row whose rank and size are set wins. Each row has a variable that only a process manager sets: it
# shows that an MPI library can find its peers. Slurm's and torchrun's own do not show that, see `left_over`.
_LAUNCHERS = (
    _Launcher(
        "openmpi",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        "hydra",
        ("PMI_SIZE",),
        ("PMI_RANK",),
        ("MPI_LOCALRANKID",),
        ("MPI_LOCALNRANKS",),
        ("MPI_LOCALNRANKS",),
    ),
    _Launcher(
        "slurm", ("PMI_SIZE",), ("PMI_RANK",), ("SLURM_LOCALID",), (), ("SLURM_STEP_ID", "SLURM_LOCALID")
    ),
    _Launcher(
        "slurm",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("PMIX_RANK",),
        ("SLURM_LOCALID",),
        (),
        ("SLURM_STEP_ID", "SLURM_LOCALID"),
    ),
    _Launcher(
        "pals",
        ("PMI_SIZE", "PALS_NRANKS"),
        ("PMI_RANK", "PALS_RANKID"),
        ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        ("PALS_RANKID",),
    ),
    _Launcher(
        "flux",
        ("PMI_SIZE", "FLUX_JOB_SIZE"),
        ("PMI_RANK", "FLUX_TASK_RANK"),
        ("FLUX_TASK_LOCAL_ID",),
        (),
        ("FLUX_TASK_RANK",),
    ),
    _Launcher("pmi", ("PMI_SIZE",), ("PMI_RANK",), ("PMI_LOCAL_RANK",), ("PMI_LOCAL_SIZE",)),
    _Launcher("pmix", ("PMIX_SIZE",), ("PMIX_RANK",), ("PMIX_LOCAL_RANK",), ("PMIX_LOCAL_SIZE",)),
)

_LEFT_OVER = (("SLURM_NTASKS", "SLURM_PROCID"), ("WORLD_SIZE", "RANK"))


def announced(environ: Mapping[str, str]) -> Announcement | None:
    """Return what a launcher announced, or None when this process was started alone.

    **Local.** A pure function of ``environ``. Where a job was started from inside another one, the variables
    of both are there: a row that announces one process gives way to a row that announces several.

    Raises:
        LaunchError: a variable that is no number, or a rank outside its world.

    Example:
        >>> announced({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
        Announcement(size=4, rank=1, local_rank=1, local_size=2, launcher='hydra')
        >>> announced({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) is None
        True
    """
    alone = None
    for launcher in _LAUNCHERS:
        if any(name not in environ for name in launcher.also):
            continue
        size_name, rank_name = _first(environ, launcher.size), _first(environ, launcher.rank)
        if size_name is None or rank_name is None:
            continue
        found = _read(environ, launcher, size_name, rank_name)
        if found.size > 1:
            return found
        alone = alone or found
    return alone


def left_over(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables that speak of several processes although no launcher announced any.

    **Local.** A shell inside a Slurm allocation, or one that once ran ``torchrun``, holds them; they are no
    world. :func:`mpdp.init` says so once and goes on as one process.

    Example:
        >>> left_over({"WORLD_SIZE": "8", "RANK": "3"})
        ('WORLD_SIZE=8', 'RANK=3')
    """
    if announced(environ) is not None:
        return ()
    names: list[str] = []
    for size, rank in _LEFT_OVER:
        value = environ.get(size, "")
        if value.isdigit() and int(value) > 1 and rank in environ:
            names += [f"{size}={value}", f"{rank}={environ[rank]}"]
    return tuple(names)


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in environ), None)


def _number(environ: Mapping[str, str], name: str, low: int, high: int | None = None) -> int:
    text = environ[name]
    ok = text.isascii() and text.isdigit() and int(text) >= low and (high is None or int(text) <= high)
    if not ok:
        rule = f"a whole number of at least {low}" if high is None else f"a number in {low}..{high}"
        raise LaunchError(
            f"{name}: expected {rule} from the launcher, got {text!r}; "
            "start the job with `mpdp run` or mpirun, or unset the variable"
        )
    return int(text)


def _read(environ: Mapping[str, str], launcher: _Launcher, size_name: str, rank_name: str) -> Announcement:
    size = _number(environ, size_name, 1)
    rank = _number(environ, rank_name, 0, size - 1)
    rank_here, size_here = _first(environ, launcher.local_rank), _first(environ, launcher.local_size)
    local_size = None if size_here is None else _number(environ, size_here, 1, size)
    local_rank = None if rank_here is None else _number(environ, rank_here, 0, (local_size or size) - 1)
    return Announcement(size, rank, local_rank, local_size, launcher.name)


def misfit(launcher: str, vendor: str, details: str) -> str | None:
    """Return why a launcher cannot start ranks of an MPI library, or None where nothing is known against it.

    **Local.** The ranks would end inside ``MPI_Init`` with messages of its own, or be n worlds of one.

    Args:
        launcher: of an :class:`Announcement`.
        vendor: the library's name for itself.
        details: its version text: an MPICH that is built for PMIx can be started by Open MPI's mpirun.

    Example:
        >>> misfit("openmpi", "MPICH", "MPICH Version: 5.0.2")
        'the mpirun of Open MPI has started this process, and mpi4py loads MPICH'
        >>> misfit("hydra", "MPICH", "") is None
        True
    """
    if launcher == "openmpi" and vendor != "Open MPI" and "pmix" not in details.lower():
        return f"the mpirun of Open MPI has started this process, and mpi4py loads {vendor}"
    if launcher == "hydra" and vendor == "Open MPI":
        return "the mpirun of MPICH or Intel MPI has started this process, and mpi4py loads Open MPI"
    return None


def code() -> dict[str, str]:
    """Return what tells two versions of a program apart: its script, and what it stands on.

    **Local.** Ranks that differ in it would compute different things from the same arguments.
    """
    import mpdp

    numpy = sys.modules.get("numpy")
    return {
        "version of mpdp": mpdp.__version__,
        "version of Python": ".".join(map(str, sys.version_info[:2])),
        "version of NumPy": getattr(numpy, "__version__", "none"),
        "script": _script(),
    }


def _script() -> str:
    """Return the name and the digest of the script that this process runs."""
    path: str | None = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None:
        return "none"
    try:
        with open(path, "rb") as file:
            return f"{os.path.basename(path)} ({hashlib.blake2b(file.read(), digest_size=6).hexdigest()})"
    except OSError:
        return os.path.basename(path)  # it was in an archive, or is gone
