"""Jobs for tests: start ranks, bound their time, bring back what they said.

Owns the processes it starts, which it knows by a mark in their environment, and ends no others. Open MPI's
mpirun puts ranks in groups of their own and leaves them behind when it is killed, so SIGTERM comes before
SIGKILL.

A script that a job runs may use :func:`record` to hand a value back to the test.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "tests" / "parallel" / "programs"
MARK = "MPDP_TEST_JOB"
RESULTS = "MPDP_TEST_RESULTS"
FAULT = "fault"  # a file among the results
# prterun of Open MPI 5 sends one byte too many behind its own notices (openpmix/prrte, pull request 1905).
STRAY_BYTE = re.compile(rb"(-{60,}\n)[^\n](?=\[\d+/\d+\] )")
_WORDS = ("PMI", "PMIX", "OMPI", "PRTE", "MPI_LOCAL", "HYDI", "HYDRA", "SLURM", "MPDP")


@dataclass
class Result:
    """What a job did.

    Attributes:
        rc: exit status of the command.
        output: its stdout and stderr, interleaved as they came.
        seconds: to the end, from the fault that a rank announced (:func:`fault`), else from the start.
        timed_out: it was still there at its time limit; the output then holds each rank's stack.
        values: what rank r gave to :func:`record`; missing ranks gave nothing.
        orphans: processes of the job that outlived its command; they have been killed.
    """

    rc: int
    output: str
    seconds: float
    timed_out: bool
    values: dict[int, Any] = field(default_factory=dict)
    orphans: list[int] = field(default_factory=list)

    @property
    def results(self) -> list[Any]:
        """The values by rank."""
        return [self.values[rank] for rank in sorted(self.values)]

    def check(self) -> Result:
        """Fail with the output unless the job ended in order."""
        assert self.rc == 0 and not self.timed_out and not self.orphans, f"{self}"
        return self

    def __str__(self) -> str:
        limit = ", at its time limit" if self.timed_out else ""
        return (
            f"rc {self.rc} after {self.seconds:.1f} s{limit}, orphans {self.orphans}, output:\n{self.output}"
        )


def record(value: Any, rank: int | None = None) -> None:
    """In a rank: give ``value`` (for JSON) to the test. Does nothing outside a job."""
    folder = os.environ.get(RESULTS)
    if folder is None:
        return
    if rank is None:
        from mpdp.launch import announced

        announcement = announced(os.environ)
        rank = 0 if announcement is None else announcement.rank
    path = Path(folder, f"{rank}.json")
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(path)


def fault() -> None:
    """In a rank: say that the fault comes now. The first rank's word counts."""
    folder = os.environ.get(RESULTS)
    if folder is not None:
        part = Path(folder, f"{FAULT}.{os.getpid()}")
        part.write_text(str(time.time()))
        with contextlib.suppress(FileExistsError):
            os.link(part, Path(folder, FAULT))


def wait_for_fault(process: Any, seconds: float = 60.0) -> None:
    """In ``after``: come back when a rank has announced a fault, or when the job has ended without one."""
    deadline = time.monotonic() + seconds
    while not Path(process.results, FAULT).exists() and process.poll() is None:
        assert time.monotonic() < deadline, "no rank has come to its fault"
        time.sleep(0.01)


@functools.cache
def mpi() -> tuple[str, str] | None:
    """Return the family of the MPI that mpi4py loads here and its launcher, or None where there is none."""
    from mpdp.cli.mpi_library import find_launcher, probe
    from mpdp.errors import LaunchError

    try:
        library = probe()
        return library.family, find_launcher(library)
    except LaunchError:
        return None


def mpirun(n: int, *flags: str) -> tuple[list[str], dict[str, str]]:
    """Return the plain mpirun line for n ranks, and the variables that its MPI needs on a small machine."""
    found = mpi()
    assert found is not None
    family, launcher = found
    settings = {}
    if family == "openmpi":
        settings = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # Open MPI 5
            "OMPI_MCA_rmaps_base_oversubscribe": "1",  # Open MPI 4
            "OMPI_MCA_btl": "^ofi",
        }
        if shutil.which("ssh") is None:
            settings["OMPI_MCA_plm_rsh_agent"] = "sh"  # Open MPI 4 looks for ssh also where it needs none
    return [launcher, *flags, "-n", str(n)], settings


def launch(
    *arguments: str | os.PathLike[str],
    n: int = 2,
    form: str = "mpirun",
    timeout: float = 60.0,
    environ: dict[str, str] | None = None,
    flags: tuple[str, ...] = (),
    after: Any = None,
) -> Result:
    """Run a script as n ranks.

    Args:
        arguments: script and its arguments.
        n: ranks.
        form: ``"mpirun"``, ``"mpdp run"`` or ``"python"`` (one process, no launcher).
        timeout: seconds until each rank's stack is printed and the job is ended.
        environ: variables to set on top; None as a value removes one.
        flags: more flags for the launcher.
        after: called with the command's process when it has started; its ``mark`` is for :func:`marked`, and it is
            for :func:`wait_for_fault`.
    """
    words = [os.fspath(argument) for argument in arguments]
    settings: dict[str, str] = {}
    if form == "mpirun":
        line, settings = mpirun(n, *flags)
        line += [sys.executable, *words]
    elif form == "mpdp run":
        line = [sys.executable, "-m", "mpdp", "run", *flags, "-n", str(n), *words]
    else:
        assert form == "python" and n == 1
        line = [sys.executable, *words]
    return run(line, timeout=timeout, environ={**settings, **(environ or {})}, after=after)


def run(
    line: list[str],
    *,
    timeout: float = 60.0,
    environ: dict[str, str] | None = None,
    after: Any = None,
) -> Result:
    """Run any command as a job of its own; see :func:`launch`."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="mpdp-job-") as results:
        env = {name: value for name, value in os.environ.items() if not name.startswith(_WORDS)}
        path = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        env |= {
            MARK: mark,
            RESULTS: results,
            "PYTHONPATH": os.pathsep.join(part for part in path if part),
            "PYTHONFAULTHANDLER": "1",
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": os.path.join(results, "cache"),  # no sizes that somebody has tuned here
        }
        for name, value in (environ or {}).items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        with tempfile.TemporaryFile() as output:
            begin = time.time()
            process = subprocess.Popen(
                line,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_as_from_a_terminal,
            )
            process.mark, process.results = mark, results  # type: ignore[attr-defined]
            timed_out = False
            try:
                if after is not None:
                    after(process)
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                end = time.time()
                if process.poll() is None:
                    _print_stacks(mark)
                    _terminate(process)
                orphans = _settle(mark)
                for pid in orphans:
                    _kill(pid, signal.SIGKILL)
            output.seek(0)
            text = STRAY_BYTE.sub(rb"\1", output.read()).decode(errors="replace")
        announced = Path(results, FAULT)
        seconds = end - (float(announced.read_text()) if announced.exists() else begin)
        values = {int(path.stem): json.loads(path.read_text()) for path in Path(results).glob("*.json")}
    return Result(process.returncode, text, seconds, timed_out, values, orphans)


def marked(mark: str) -> list[int]:
    """Return the living processes that carry a mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environ = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environ and state not in "ZX":
            found.append(int(entry.name))
    return found


def _as_from_a_terminal() -> None:
    """Let Ctrl-C end the job, which a shell's background jobs ignore; leave no core file."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def _print_stacks(mark: str) -> None:
    """Make each Python process of the job print its stacks: faulthandler does so on SIGABRT, GIL or not.

    The launchers are stopped meanwhile: they would kill all ranks at the first one's end, and mix what they
    print.
    """
    ranks, others = [], []
    for pid in marked(mark):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        is_rank = b"python" in words[0] and words[1:4] != [b"-m", b"mpdp", b"run"]
        (ranks if is_rank else others).append(pid)
    for pid in others:
        _kill(pid, signal.SIGSTOP)
    for pid in ranks:
        _kill(pid, signal.SIGABRT)
    time.sleep(0.5)
    for pid in others:
        _kill(pid, signal.SIGCONT)
    time.sleep(0.5)


def _terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
        return
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # a session of its own: nobody else is in its group
    process.wait()


def _settle(mark: str, seconds: float = 3.0) -> list[int]:
    """Return who of the job is left a moment after its command has ended."""
    deadline = time.monotonic() + seconds
    while left := marked(mark):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left
