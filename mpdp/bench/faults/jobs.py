"""Jobs that are to break: how they are started, watched, and cleared away.

Every process of a job carries a mark in its environment, by which it is found when its parents are gone. Nothing here
knows what is broken.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...cli.mpi_library import MpiLibrary, find_launcher, probe

MARK = "MPDP_FAULT_JOB"
_OTHERS = ("PMI", "PMIX", "OMPI", "PRTE", "MPI_LOCAL", "HYDI", "HYDRA", "SLURM", "MPDP")
_SETTLING = 10.0  # seconds for a job's processes to be gone once its command has ended


@dataclass(frozen=True)
class Mpi:
    """An interpreter with the MPI that its mpi4py loads.

    Attributes:
        python: path of the interpreter.
        library: the MPI.
        launcher: path of its mpirun.
    """

    python: str
    library: MpiLibrary
    launcher: str

    @classmethod
    def of(cls, python: str = sys.executable) -> Mpi:
        """Return what an interpreter has. **Local.**

        Raises:
            LaunchError: no MPI, or no launcher of it.
        """
        library = probe(python)
        return cls(python, library, find_launcher(library))

    @property
    def family(self) -> str:
        """``"mpich"``, ``"openmpi"`` or ``"intel"``."""
        return self.library.family

    def line(self, form: str, n: int, script: str) -> tuple[list[str], dict[str, str]]:
        """Return the line that starts n ranks, and the variables it needs on a small machine, also as root. **Local.**

        Args:
            form: ``"mpirun"`` or ``"mpdp run"``.
        """
        if form == "mpdp run":
            return [self.python, "-m", "mpdp", "run", "-n", str(n), script], {}
        settings = {}
        if self.family == "openmpi":
            settings = {
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
                "OMPI_MCA_rmaps_base_oversubscribe": "1",
                "OMPI_MCA_btl": "^ofi",
            }
            if shutil.which("ssh") is None:
                settings["OMPI_MCA_plm_rsh_agent"] = "sh"  # Open MPI 4 looks for ssh also where it needs none
        return [self.launcher, "-n", str(n), self.python, script], settings


@dataclass
class Ended:
    """How a job has ended.

    Attributes:
        status: of its command.
        output: stdout and stderr.
        ended: ``time.time()`` when the command had ended and no process of the job was left.
        late: it was still there at its time limit.
        orphans: processes that outlived the command, and were killed then.
    """

    status: int
    output: str
    ended: float
    late: bool
    orphans: int


def run(
    line: Sequence[str],
    environ: Mapping[str, str],
    limit: float,
    disturb: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> Ended:
    """Run a job to its end. **Local.**

    Args:
        line: the command.
        environ: what it finds in its environment beside this process's own.
        limit: seconds after which it is killed.
        disturb: called with the command's process once it is started.
    """
    mark = uuid.uuid4().hex
    root = str(Path(__file__).parents[3])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}
    path = os.pathsep.join(filter(None, [root, inherited.get("PYTHONPATH", "")]))
    settings = {**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ, MARK: mark}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            line,
            env=settings,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_no_core,
        )
        late = False
        try:
            if disturb is not None:
                disturb(process)
            process.wait(limit)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            orphans = [] if late else _left(mark)
            ended = time.time()
            if process.poll() is None:
                _end(process)
            for pid in {*orphans, *marked(mark)}:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Ended(process.returncode, text, ended, late, len(orphans))


def marked(mark: str) -> list[int]:
    """Return the living processes of a job. **Local.**"""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environ = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environ and state not in "ZX":
            found.append(int(entry.name))
    return found


def _left(mark: str) -> list[int]:
    """Return who of a job is left a while after its command has ended."""
    deadline = time.monotonic() + _SETTLING
    while (pids := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return pids


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command; Open MPI's leaves its ranks behind when it is killed, so it is asked first."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # a session of its own: nobody else is in its group
        process.wait()


def _no_core() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
