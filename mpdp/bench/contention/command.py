"""``mpdp bench contention``: do threads hinder each other's launches on this machine, and processes not?

Prints tables, one line ``verdict: ...`` by the rule of ``rule``, and what the machine cannot decide. Read ``arms`` for
what is measured, ``rounds`` for when a repetition counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ...cores import cores
from ...errors import MpdpError
from . import interference, locks, machine
from . import loops as c
from .arms import KS, NULL, OWN, own_name, plan, verdict_rows
from .control import Control, cores_in_order, neighbours_apart
from .driver import driver
from .figures import summary
from .kept import keep as keep_verdict
from .mps import PIPES, service
from .rounds import Rounds
from .rule import Verdict, advise, decide, graph_readings, readings, whose
from .steps import Steps
from .tables import interference_table, launches_table, locks_table, steps_table
from .workers import NO_MPS, Processes, Workers, environment, row_name

REPETITIONS = {"quick": 3, "default": 9, "full": 15}
SECONDS = {"quick": 0.02, "default": 0.03, "full": 0.06}  # of a repetition
ARMS_SECONDS = {"quick": 14.0, "default": 180.0, "full": 3600.0}  # after which no repetition begins
BESIDE_SECONDS = {"default": 30.0, "full": 300.0}
LOADING = "CUDA_MODULE_LOADING"
_TURNS = {  # of steps: blocks accepted of each side, seconds of one, seconds after which no turn begins
    # On a CPU, which others disturb more, in more and longer blocks.
    "cpu": {"quick": (3, 0.15, 9.0), "default": (21, 0.5, 200.0), "full": (25, 1.0, 1800.0)},
    "cuda": {"quick": (3, 0.15, 9.0), "default": (9, 0.2, 60.0), "full": (15, 1.0, 1800.0)},
}
_BATCHES = {  # samples a rank
    "cuda": {"launch-bound": 128, "compute-bound": 4096},
    "cpu": {"launch-bound": 8, "compute-bound": 128},
}


def run(
    *,
    device: str = "auto",
    extent: str = "default",
    gpus: int | None = None,
    json_path: str | None = None,
    plot_path: str | None = None,
    torch_python: str | None = None,
) -> int:
    """Measure, and print the verdict. **Local.**

    Returns:
        the exit status, 0 whatever the verdict.
    """
    say = sys.stderr if json_path == "-" else sys.stdout
    if plot_path is not None:
        from ..plot import plotting

        plotting()  # an error before time is spent
    environ, changed = dict(os.environ), (LOADING, PIPES)
    with contextlib.ExitStack() as stack:
        served: dict[str, str] | str = "without a GPU"
        if device != "cpu" and _has_gpu():
            served = stack.enter_context(service(environ))
        os.environ.setdefault(LOADING, "EAGER")
        os.environ[PIPES] = NO_MPS  # threads are measured without a server between
        try:
            return _Run(device, extent, gpus, served, say).run(json_path, plot_path, torch_python)
        finally:
            for name in changed:
                os.environ.pop(name)
                if name in environ:
                    os.environ[name] = environ[name]


def _has_gpu() -> bool:
    """Return whether there is a GPU, without a start of the driver in this process, whose variables are to be set."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


class _Run:
    def __init__(
        self, device: str, extent: str, gpus: int | None, served: dict[str, str] | str, say: TextIO
    ) -> None:
        self.extent, self.mps, self._say_to = extent, not isinstance(served, str), say
        self.notes: list[str] = []
        self.stages: dict[str, float] = {}
        self._since = 0.0
        self.gpus = self._count(device, gpus)
        self.device = "cuda" if self.gpus else "cpu"
        self.cpus = neighbours_apart(cores_in_order()[: max(1, cores())])
        most = len(self.cpus)
        self.ks = [k for k in KS if k <= most]
        if self.ks != list(KS):
            left = [str(k) for k in KS if k > most]
            self.note(f"k = {', '.join(left)} left out: {most} {'core' if most == 1 else 'cores'} in reach")
        if self.gpus and isinstance(served, str):
            self.note(f"arms under MPS are left out: {served}")
        self.environments = {"processes": environment(mps=False)}
        if not isinstance(served, str):
            found = environment(mps=True)
            found.pop(PIPES, None)
            self.environments["processes MPS"] = {**found, **served}
        self.control = Control(self.cpus)
        self.loops = c.loops()
        if isinstance(self.loops, str):
            self.note(f"loops of C are left out, and the verdict with them: {self.loops}")

    def note(self, text: str) -> None:
        """Say something once, and keep it for the JSON object."""
        self.notes.append(text)
        self.print(f"note: {text}")

    def print(self, text: str) -> None:
        print(text, file=self._say_to, flush=True)

    def _passed(self, stage: str) -> None:
        """Keep how long a part of the run took."""
        now = time.monotonic()
        self.stages[stage], self._since = round(now - self._since, 1), now

    def _count(self, device: str, gpus: int | None) -> int:
        if device == "cpu":
            return 0
        try:
            found = driver().count()
        except MpdpError as error:
            if device != "auto":
                raise
            self.note(f"without a GPU: {error}")
            return 0
        return found if gpus is None else min(found, gpus)

    def run(self, json_path: str | None, plot_path: str | None, torch_python: str | None) -> int:
        """Measure, print and write."""
        begun = self._since = time.monotonic()
        samples_path = None if json_path in (None, "-") else Path(f"{json_path}.samples.jsonl")
        file = None if samples_path is None else open(samples_path, "w", encoding="utf-8")  # noqa: SIM115
        about = {**self.about(), "at_start": machine.moment(self.gpus)}
        try:
            samples, costs, complete = self._launches(file, about)
            rows = sorted(summary(samples), key=lambda row: (self.order.index(row["row"]), row["k"]))
            self.print(launches_table(rows))
            if self.beside:
                self.print(interference_table(self.beside))
            counted = self._locks(file)
            self._passed("locks")
            steps = self._steps(file, torch_python)
            self._passed("steps")
        finally:
            if file is not None:
                file.close()
        self._print_costs(costs)
        verdict = self._decide(rows, counted)
        launch_bound = next((each for each in steps if each["kind"] == "launch-bound"), None)
        advice = (
            "training: undecided (not measured)" if launch_bound is None else advise(launch_bound, self.gpus)
        )
        told = [] if verdict.k is None else readings(rows, verdict.k)
        if self.gpus and verdict.k is not None:
            own = row_name("pthreads", "c", own_name(OWN))
            told += whose(rows, verdict_rows(self.gpus, self.mps)[0], own, verdict.k)
        told += graph_readings(samples, self.gpus, self.mps)
        for each in told:
            self.print(each)
        for each in verdict.open_questions:
            self.print(f"open: {each}")
        if not complete:
            self.print(
                "open: the time was over before all arms had their repetitions; --full takes what it needs"
            )
        self.print(advice)
        self.print(f"verdict: {verdict.line}")
        result = {
            "benchmark": "contention",
            **about,
            "at_end": machine.moment(self.gpus),
            "seconds": round(time.monotonic() - begun, 1),
            "stage_seconds": self.stages,
            "complete": complete,
            "notes": self.notes,
            "rows": rows,
            "interference": self.beside,
            "locks": counted,
            "steps": steps,
            "process_costs": costs,
            "readings": told,
            "training": advice,
            "open": verdict.open_questions,
            "word": verdict.word,
            "verdict": verdict.line,
        }
        keep_verdict(result)
        if json_path == "-":
            print(json.dumps(result), flush=True)
        elif json_path is not None:
            Path(json_path).write_text(json.dumps(result) + "\n", encoding="utf-8")
        if plot_path is not None:
            from ..plot_contention import plot_contention

            plot_contention(result, plot_path)
        return 0

    def _locks(self, file: TextIO | None) -> list[dict[str, Any]]:
        """Count locks, by one worker and by the most."""
        if isinstance(self.loops, str) or (self.gpus and self.extent == "quick"):
            return []
        ks = sorted({self.ks[0], self.ks[-1]})
        found = locks.count(
            self.gpus, locks.launches(self.gpus), ks, self.cpus, environment(mps=False), self.note
        )
        for row in found:
            _write(file, {}, {"locks": row})
        if found:
            self.print(locks_table(found))
        return found

    def about(self) -> dict[str, Any]:
        """Return what the figures are of."""
        found = {"extent": self.extent, "device": self.device, "gpus": self.gpus, "mps": self.mps}
        return {**machine.about(self.gpus, len(self.cpus)), **found}

    # -- launches

    def _launches(
        self, file: TextIO | None, about: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any], bool]:
        keep = partial(_write, file, {})
        keep({"about": about})
        cupy = bool(self.gpus) and importlib.util.find_spec("cupy") is not None
        arms = plan(self.extent, self.gpus, self.ks, self.mps, not isinstance(self.loops, str), cupy)
        self.order = list(dict.fromkeys(arm.row for arm in arms))
        processes = {name: Processes(environ) for name, environ in self.environments.items()}
        if self.gpus:
            for each in processes.values():
                each.used_bytes = _used_bytes
        workers = Workers(self.gpus, processes)
        try:
            rounds = Rounds(
                workers,
                arms,
                self.control,
                self.cpus,
                repetitions=REPETITIONS[self.extent],
                seconds=SECONDS[self.extent],
                keep=keep,
                until=time.monotonic() + ARMS_SECONDS[self.extent],
                say=self.note,
            )
            samples = rounds.run()
            self._passed("launches")
            self.beside = self._interference(workers, keep)
            self._passed("interference")
            costs = {
                name: [vars(cost) for cost in each.costs] for name, each in processes.items() if each.costs
            }
        finally:
            workers.close()
        return samples, costs, rounds.in_time

    def _interference(self, workers: Workers, keep: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
        if not self.gpus or isinstance(self.loops, str) or self.extent == "quick":
            return []
        return interference.measure(
            workers,
            self.control,
            self.cpus,
            repetitions=REPETITIONS[self.extent],
            seconds=SECONDS[self.extent],
            until=time.monotonic() + BESIDE_SECONDS[self.extent],
            keep=keep,
            say=self.note,
        )

    def _decide(self, rows: Sequence[dict[str, Any]], locked: Sequence[dict[str, Any]]) -> Verdict:
        threads, processes = verdict_rows(self.gpus, self.mps)
        about = self.about()
        name = about.get("gpu", about["processor"])
        if self.gpus:
            name = f"{self.gpus} x {name}, driver {about['driver'] or about['driver_cuda']}"
        return decide(
            rows,
            threads=threads,
            processes=processes,
            wanted=REPETITIONS[self.extent],
            gpus=self.gpus,
            machine=name,
            missing=self.loops if isinstance(self.loops, str) else None,
            locks=[row for row in locked if row["launch"] == own_name(NULL)],
        )

    def _print_costs(self, costs: dict[str, Any]) -> None:
        for name, each in costs.items():
            seconds = [cost["start_seconds"] for cost in each]
            host = [cost["host_bytes"] >> 20 for cost in each]
            device = [cost["device_bytes"] >> 20 for cost in each if cost["device_bytes"] is not None]
            self.print(
                f"a worker of {name} costs: first launch after {min(seconds):.1f} to {max(seconds):.1f} s, "
                f"{min(host)} to {max(host)} MiB of host memory"
                + (f", {min(device)} to {max(device)} MiB of the GPU" if device else "")
            )

    # -- steps

    def _steps(self, file: TextIO | None, torch_python: str | None) -> list[dict[str, Any]]:
        if self.gpus and importlib.util.find_spec("cupy") is None:
            self.note("steps on a GPU are left out: CuPy is not installed")
            return []
        if torch_python is None and importlib.util.find_spec("torch") is not None:
            torch_python = sys.executable
        k = min(len(self.cpus), self.gpus if self.gpus > 1 else 2)
        kinds = dict(_BATCHES[self.device])
        repetitions, block, limit = _TURNS[self.device][self.extent]
        if self.extent == "quick":
            del kinds["compute-bound"]
        found: list[dict[str, Any]] = []
        environments = {"threads": environment(mps=False), **self.environments}
        for kind, batch in kinds.items():
            try:
                steps = Steps(
                    "mlp", k, self.device, batch, environments, self.note, cores(), torch_python,
                    _used_bytes if self.extent != "quick" and not found else None,
                )  # fmt: skip
            except MpdpError as error:
                self.note(f"{kind} steps are left out: {error}")
                continue
            try:
                until = time.monotonic() + limit / len(kinds)
                told = partial(_write, file, {"step": kind})
                made = {"kind": kind} | steps.turns(
                    self.control,
                    repetitions=repetitions,
                    seconds=block,
                    until=until,
                    keep=told,
                )
            except MpdpError as error:
                self.note(f"{kind} steps are left out: {error}")
                continue
            finally:
                steps.close()
            self.print(steps_table(made))
            found.append(made)
        return found


def _write(file: TextIO | None, more: dict[str, Any], sample: dict[str, Any]) -> None:
    """Keep a sample, as a line of JSON."""
    if file is not None:
        file.write(json.dumps({**more, **sample}) + "\n")


def _used_bytes() -> int:
    """Return the bytes in use on the GPUs, by all processes; 0 where there are none."""
    from ...device_memory import devices

    return sum(gpu.total - gpu.free for gpu in devices())
