"""The line that starts a job: a pure function of the MPI at hand, the machine and the wish.

Owns what each MPI needs to start n ranks on this machine. Starts nothing and looks at nothing but its
arguments, except :func:`count_gpus`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..cores import VARIABLES
from ..guard import RESTART
from .mpi_library import MpiLibrary

_CARRIED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "MPI4PY_LIBMPI", "CUDA_VISIBLE_DEVICES", RESTART)


@dataclass(frozen=True)
class Host:
    """A host of the job and how many ranks it takes; None: not said."""

    name: str
    slots: int | None


@dataclass(frozen=True)
class Command:
    """A line that starts a job.

    Attributes:
        words: program and arguments.
        settings: environment variables to set for it.
    """

    words: tuple[str, ...]
    settings: Mapping[str, str]

    def __str__(self) -> str:
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.settings.items()]
        return " ".join([*settings, shlex.join(self.words)])


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read ``a,b:2``. **Local.**

    Raises:
        ValueError: an empty name, or slots that are no number of at least 1.

    Example:
        >>> parse_hosts("a,b:2")
        (Host(name='a', slots=None), Host(name='b', slots=2))
    """
    hosts = []
    for part in text.split(","):
        name, colon, slots = part.strip().partition(":")
        good = slots.isascii() and slots.isdigit() and int(slots) >= 1
        if not name or name.startswith("-") or (colon and not good):
            raise ValueError(
                f"hosts: expected NAME or NAME:SLOTS with commas between, got {text!r}; as in a:2,b:2"
            )
        hosts.append(Host(name, int(slots) if colon else None))
    return tuple(hosts)


def build(
    library: MpiLibrary,
    launcher: str,
    program: Sequence[str],
    n: int,
    *,
    hosts: Sequence[Host] = (),
    cores: int,
    root: bool,
    environ: Mapping[str, str],
    remote_shell: bool = True,
) -> Command:
    """Return the line that starts ``program`` as n ranks.

    **Local.** What ``environ`` sets already is left as it is.

    Args:
        library: the MPI that the ranks will load.
        launcher: path of its mpirun.
        program: program and arguments of a rank.
        n: ranks.
        hosts: hosts to use; none: this one.
        cores: cores of a host that the job may use.
        root: whether the user is root.
        environ: the environment that the line will run in.
        remote_shell: whether ssh or rsh is installed.
    """
    local_ranks = -(-n // max(1, len(hosts)))
    settings: dict[str, str] = {}
    words = [launcher]
    if library.family == "openmpi":
        if root:
            settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if library.version[0] >= 5:
            settings["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
        else:
            settings["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
            if not remote_shell and not hosts:
                settings["OMPI_MCA_plm_rsh_agent"] = "sh"  # it looks for ssh also where it needs none
        settings["OMPI_MCA_btl"] = "^ofi"  # its start sleeps for one second
        words += [
            "--bind-to",
            "none",
        ]  # the default gives each of two ranks one core, loader threads included
    elif library.family == "mpich":
        words += ["-disable-auto-cleanup"]  # survivors report before they end the job themselves
    else:
        settings["I_MPI_PIN"] = "0"
    if "OMP_NUM_THREADS" not in environ:
        settings |= dict.fromkeys(VARIABLES, str(max(1, cores // local_ranks)))
    settings = {name: value for name, value in settings.items() if name not in environ}
    if hosts:
        names = ",".join(host.name if host.slots is None else f"{host.name}:{host.slots}" for host in hosts)
        words += ["--host" if library.family == "openmpi" else "-hosts", names]
        if library.family == "openmpi":  # it carries its own variables to other hosts, and no others
            carried = [name for name in (*_CARRIED, *VARIABLES) if name in environ or name in settings]
            words += [word for name in carried for word in ("-x", name)]
    return Command((*words, "-n", str(n), *program), settings)


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return how many GPUs a process started here would see, without touching CUDA. **Local.**"""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        return next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        pass
    program = shutil.which("nvidia-smi", path=environ.get("PATH", os.defpath))
    if program is None:
        return 0
    try:
        result = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in result.stdout.splitlines())
