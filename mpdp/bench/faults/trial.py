"""One trial: break a job, look at its end and at what it leaves, go on from there, compare with a run left alone."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...training import checkpoint
from .jobs import Ended, Mpi, run
from .kinds import KINDS, Kind
from .moment import MARK, Fault

SCRIPT = str(Path(__file__).with_name("training.py"))
UPDATES = 24  # of the training
PAUSE = 0.02  # seconds of an update, at the least
TIMEOUT, PATIENT = 5.0, 60.0  # of mpdp.init, where a stall is to be seen and elsewhere
WITHIN = 10.0  # seconds from a fault to the end of its job, beside the timeout of a stall
LIMIT = 90.0  # seconds for a job, after which it hangs
STARTING = 0.7  # seconds in which a rank comes to its first update, about
REPORT = re.compile(r"^\[\d+/\d+\] error ", re.MULTILINE)


@dataclass(frozen=True)
class Trial:
    """What is to be done.

    Attributes:
        number: of the trial.
        fault: what is broken, when; its folder is filled in when it runs.
        n: ranks.
        family: of the MPI.
        form: ``"mpirun"`` or ``"mpdp run"``.
    """

    number: int
    fault: Fault
    n: int
    family: str
    form: str

    @classmethod
    def drawn(
        cls,
        number: int,
        seed: int,
        kinds: Sequence[str],
        families: Sequence[str],
        sizes: Sequence[int],
        device: str = "cpu",
    ) -> Trial:
        """Return trial ``number`` of a plan: kinds, launchers and sizes in turn, moments at random. **Local.**

        A pure function of its arguments, so that a plan that was broken off goes on where it was.
        """
        draw = random.Random(f"{seed} {number}")
        kind = KINDS[kinds[number % len(kinds)]]
        rounds = number // len(kinds) + number
        ways = [(family, form) for family in families for form in ("mpirun", "mpdp run")]
        family, form = ways[rounds % len(ways)]
        n = sizes[(rounds // len(ways)) % len(sizes)]
        moment = draw.choice(kind.moments)
        step = {"start": 0, "end": UPDATES + 1, "step": draw.randint(kind.earliest, kind.latest)}[moment]
        delay = draw.uniform(0, STARTING if moment == "start" else PAUSE)
        timeout = TIMEOUT if kind.stalls else PATIENT
        fault = Fault(kind.name, draw.randrange(n), step, delay, draw.choice(kind.loops), "", timeout, device)
        return cls(number, fault, n, family, form)


@dataclass
class Outcome:
    """What came of a trial.

    Attributes:
        seconds: from the fault to the end of the job's last process; NaN if the fault never came.
        status: of the command.
        wrong: sentences on what was not as promised; empty if all was.
        lost_status: status 0 after ``os._exit(0)`` under MPICH's plain mpirun, which is not ours to mend.
        checkpoint: step of the checkpoint that was found; -1 if there was none.
        hung, false_success, orphans, lost: what may never be; the last of checkpoints and resumed runs.
        reported: the report was there and right.
    """

    trial: Trial
    seconds: float
    status: int
    wrong: list[str] = field(default_factory=list)
    lost_status: bool = False
    checkpoint: int = -1
    hung: bool = False
    false_success: bool = False
    orphans: int = 0
    lost: bool = False
    reported: bool = True
    output: str = ""

    def row(self) -> dict[str, Any]:
        """Return it as one line of the results. **Local.**"""
        trial = asdict(self.trial)
        fault = trial.pop("fault")
        for name in ("folder", "timeout"):
            fault.pop(name)
        result = {
            "seconds": round(self.seconds, 3),
            "status": self.status,
            "checkpoint": self.checkpoint,
            "hung": self.hung,
            "false_success": self.false_success,
            "orphans": self.orphans,
            "lost": self.lost,
            "reported": self.reported,
            "wrong": self.wrong,
            "lost_status": self.lost_status,
        }
        return {**trial, **fault, **result, **({"output": self.output} if self.wrong else {})}


class Trials:
    """Run trials; keep what undisturbed runs computed.

    Args:
        mpis: family to MPI.
        folder: for the jobs' files; emptied again.
    """

    def __init__(self, mpis: Mapping[str, Mpi], folder: Path) -> None:
        self.mpis, self.folder = mpis, folder
        self._references: dict[tuple[str, int, str], Path] = {}

    def run(self, trial: Trial) -> Outcome:
        """Break one job, and judge. **Local.**"""
        folder = Path(tempfile.mkdtemp(dir=self.folder, prefix=f"trial-{trial.number}-"))
        fault = replace(trial.fault, folder=str(folder))
        trial = replace(trial, fault=fault)
        try:
            reference = self.reference(trial)
            begin = time.time()
            ended = self._start(trial, fault, disturb=True)
            outcome = judge(trial, ended, begin)
            self._compare(trial, reference, folder / "run", outcome)
            return outcome
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def reference(self, trial: Trial) -> Path:
        """Return the run folder of the undisturbed training, with every checkpoint. **Local.**

        Raises:
            RuntimeError: it failed: nothing can be said of faults then.
        """
        fault = trial.fault
        key = (trial.family, trial.n, fault.loop)
        if key not in self._references:
            folder = Path(tempfile.mkdtemp(dir=self.folder, prefix="whole-"))
            whole = replace(fault, kind="none", folder=str(folder), timeout=PATIENT)
            ended = self._start(trial, whole)
            if ended.status != 0 or ended.late:
                raise RuntimeError(f"the training fails although nothing is broken:\n{ended.output}")
            self._references[key] = folder / "run"
        return self._references[key]

    def _start(self, trial: Trial, fault: Fault, disturb: bool = False) -> Ended:
        line, settings = self.mpis[trial.family].line(trial.form, trial.n, SCRIPT)
        breaks = _kill_launcher(fault) if disturb and fault.kind == "launcher_killed" else None
        return run(line, {**settings, **fault.environ()}, LIMIT, breaks)

    def _compare(self, trial: Trial, reference: Path, left: Path, outcome: Outcome) -> None:
        """Check the newest checkpoint against the undisturbed run's, go on from it, and compare the ends."""
        problems: list[str] = []
        if KINDS[trial.fault.kind].changes_data:
            reference = left
        outcome.checkpoint = _same(left, reference, problems, "the checkpoint")
        ended = self._start(trial, replace(trial.fault, kind="none", timeout=PATIENT))
        if ended.status != 0 or ended.late or ended.orphans:
            problems.append(f"the resumed run ended with status {ended.status}")
            outcome.output += f"\nresumed:\n{ended.output}"
        elif _same(left, reference, problems, "the resumed run") != UPDATES:
            problems.append("the resumed run did not come to its end")
        outcome.lost = bool(problems)
        outcome.wrong += problems


def judge(trial: Trial, ended: Ended, begin: float) -> Outcome:
    """Return what is to be said of a job's end. **Local.**

    Args:
        trial: what was done to it.
        ended: how it ended.
        begin: ``time.time()`` at its start.
    """
    kind, fault = KINDS[trial.fault.kind], trial.fault
    mark = Path(fault.folder, MARK)
    moment = float(mark.read_text()) if mark.exists() else None
    outcome = Outcome(trial, ended.ended - (begin if moment is None else moment), ended.status)
    outcome.output = ended.output
    wrong = outcome.wrong
    outcome.hung, outcome.orphans = ended.late, ended.orphans
    if moment is None and ended.status == 0:  # nothing can be said of it
        wrong.append("the fault never came")
        return outcome
    if moment is None:
        wrong.append("the fault never came")
    if ended.late:
        wrong.append(f"hung for {LIMIT:g} s")
    within = WITHIN + (fault.timeout if kind.stalls else 0)
    if outcome.seconds > within and moment is not None:
        wrong.append(f"took {outcome.seconds:.1f} s, more than {within:g} s")
    if ended.orphans:
        wrong.append(f"{ended.orphans} processes outlived the job")
    if ended.status == 0:
        outcome.lost_status = (fault.kind, trial.form, trial.family) == ("os_exit_0", "mpirun", "mpich")
        outcome.false_success = not outcome.lost_status
    if outcome.false_success:
        wrong.append("status 0 although a rank did not finish")
    _judge_report(trial, kind, ended.output, outcome)
    return outcome


def _judge_report(trial: Trial, kind: Kind, output: str, outcome: Outcome) -> None:
    if kind.report is not None:
        pattern = kind.report.format(rank=trial.fault.rank, n=trial.n)
        outcome.reported = bool(re.search(pattern, output, re.MULTILINE))
        # Where the launcher has seen it first and has ended the survivors, `mpdp run` names the rank.
        named = trial.form == "mpirun" or kind.group == "launcher" or "\nmpdp run: rank" in output
        if not outcome.reported and not (kind.best_effort and named):
            outcome.wrong.append(f"no report like {pattern}")
    # Before init the ranks do not know of one another yet, nor where the launcher is gone.
    if trial.fault.step > 0 and kind.group != "launcher":
        reports = len(REPORT.findall(output))
        if reports > (trial.n if kind.stalls else 1):
            outcome.wrong.append(f"{reports} reports")


def _same(left: Path, reference: Path, wrong: list[str], what: str) -> int:
    """Compare the newest checkpoint of a run with the undisturbed run's of the same step; return that step."""
    found, reasons = checkpoint.newest(left / "checkpoints")
    wrong += [f"{what}: {reason}" for reason in reasons]
    if found is None:
        return -1
    step = found[0].step
    there = _checkpoints(reference).get(step)
    if there is None:
        wrong.append(f"{what} is of update {step}, where the undisturbed run has none")
    else:
        expected = checkpoint.load(checkpoint.read(there))
        differing = [name for name in expected if not _equal(expected[name], found[1].get(name))]
        if differing or set(expected) != set(found[1]):
            wrong.append(f"{what} differs from the undisturbed run in {', '.join(differing) or 'its names'}")
    return step


def _checkpoints(run_dir: Path) -> dict[int, Path]:
    paths = (run_dir / "checkpoints").iterdir()
    return {int(path.name.split("-")[1]): path for path in paths if path.name.startswith("step-")}


def _equal(a: np.ndarray, b: np.ndarray | None) -> bool:
    return b is not None and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _kill_launcher(fault: Fault) -> Any:
    """Return what kills the command of a job with SIGKILL: while it starts, or after it has come to its updates."""

    def kill(process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + LIMIT / 2
        log = Path(fault.folder, "run", "log.jsonl")
        while fault.step > 0 and not log.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(fault.step * PAUSE if fault.step > 0 else fault.delay)
        fault.now()
        os.kill(process.pid, signal.SIGKILL)

    return kill
