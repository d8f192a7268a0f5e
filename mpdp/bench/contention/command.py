"""``mpdp bench contention``: do threads hinder each other's launches on this machine, and processes not?

Prints tables, one line ``verdict: ...`` by the rule of ``rule``, and what the machine cannot decide. Read ``arms`` for
what is measured, ``rounds`` for when a repetition counts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ... import __version__
from ...comm.tuned import processor
from ...cores import cores
from ...errors import MpdpError
from . import loops as c
from .arms import KS, plan, verdict_rows
from .control import LEAST, Control, cores_in_order
from .driver import driver
from .figures import interval, summary
from .kept import keep as keep_verdict
from .rounds import ATTEMPTS, Rounds
from .rule import Verdict, advise, decide, readings
from .steps import Steps
from .workers import NO_MPS, Processes, Workers, environment

REPETITIONS = {"quick": 3, "default": 9, "full": 15}
SECONDS = {"quick": 0.02, "default": 0.03, "full": 0.06}  # of a repetition
ARMS_SECONDS = {"quick": 14.0, "default": 75.0, "full": 3600.0}  # after which no repetition begins
STEPS_SECONDS = {"quick": 12.0, "default": 40.0, "full": 1800.0}
STEP_BLOCK = {"quick": 0.15, "default": 0.3, "full": 1.0}
_BATCHES = {"launch-bound": 128, "compute-bound": 4096}  # samples a rank of the step on a GPU


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
    mps = _mps(device)
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    mine = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = NO_MPS  # threads are measured without a server between
    try:
        return _Run(device, extent, gpus, mps, mine, say).run(json_path, plot_path, torch_python)
    finally:
        if mine is None:
            del os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        else:
            os.environ["CUDA_MPS_PIPE_DIRECTORY"] = mine


def _mps(device: str) -> bool:
    """Return whether CUDA's multi-process service runs here."""
    if device == "cpu":
        return False
    where = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    try:
        pid = int(Path(where, "nvidia-cuda-mps-control.pid").read_text())
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


class _Run:
    def __init__(
        self, device: str, extent: str, gpus: int | None, mps: bool, pipes: str | None, say: TextIO
    ) -> None:
        self.extent, self.mps, self._say_to = extent, mps, say
        self.notes: list[str] = []
        self.gpus = self._count(device, gpus)
        self.device = "cuda" if self.gpus else "cpu"
        self.cpus = cores_in_order()[: max(1, cores())]
        most = len(self.cpus)
        self.ks = [k for k in KS if k <= most]
        if self.ks != list(KS):
            left = [str(k) for k in KS if k > most]
            self.note(f"k = {', '.join(left)} left out: {most} {'core' if most == 1 else 'cores'} in reach")
        served = environment(mps=True)
        if pipes is None:
            served.pop("CUDA_MPS_PIPE_DIRECTORY", None)
        else:
            served["CUDA_MPS_PIPE_DIRECTORY"] = pipes
        self.environments = {
            "processes": environment(mps=False),
            **({"processes MPS": served} if mps else {}),
        }
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
        begun = time.monotonic()
        samples_path = None if json_path in (None, "-") else Path(f"{json_path}.samples.jsonl")
        file = None if samples_path is None else open(samples_path, "w", encoding="utf-8")  # noqa: SIM115
        about = self.about()
        try:
            samples, costs, complete = self._launches(file, about)
            rows = sorted(summary(samples), key=lambda row: (self.order.index(row["row"]), row["k"]))
            self.print(_table(rows))
            steps = self._steps(file, torch_python)
        finally:
            if file is not None:
                file.close()
        self._print_costs(costs)
        verdict = self._decide(rows)
        launch_bound = next((each for each in steps if each["kind"] == "launch-bound"), None)
        blocks = {} if launch_bound is None else dict(launch_bound["blocks"])
        if self.gpus == 1 and blocks.get("processes MPS"):
            blocks["processes"] = blocks["processes MPS"]
        advice = advise(blocks, self.gpus, on_cpu=self.gpus == 0)
        told = [] if verdict.k is None else readings(rows, verdict.k)
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
            "seconds": round(time.monotonic() - begun, 1),
            "complete": complete,
            "notes": self.notes,
            "rows": rows,
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

    def about(self) -> dict[str, Any]:
        """Return what the figures are of."""
        found: dict[str, Any] = {
            "system": f"mpdp-{__version__}",
            "command": " ".join(["mpdp", *sys.argv[1:]]),
            "extent": self.extent,
            "device": self.device,
            "gpus": self.gpus,
            "mps": self.mps,
            "processor": processor(),
            "cores": len(self.cpus),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "switch_interval": sys.getswitchinterval(),
        }
        if self.gpus:
            found |= {"gpu": driver().name(0), "driver_cuda": driver().version(), "driver": _driver_version()}
            if importlib.util.find_spec("cupy") is not None:
                import cupy  # type: ignore[import-not-found,unused-ignore]

                found |= {"cupy": cupy.__version__, "cuda": cupy.cuda.runtime.runtimeGetVersion()}
        return found

    # -- launches

    def _launches(
        self, file: TextIO | None, about: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, Any], bool]:
        def keep(sample: dict[str, Any]) -> None:
            if file is not None:
                file.write(json.dumps(sample) + "\n")

        if file is not None:
            file.write(json.dumps({"about": about}) + "\n")
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
            costs = {
                name: [vars(cost) for cost in each.costs] for name, each in processes.items() if each.costs
            }
        finally:
            workers.close()
        return samples, costs, rounds.in_time

    def _decide(self, rows: Sequence[dict[str, Any]]) -> Verdict:
        threads, processes = verdict_rows(self.gpus, self.mps)
        about = self.about()
        machine = about.get("gpu", about["processor"])
        if self.gpus:
            machine = f"{self.gpus} x {machine}, driver {about['driver'] or about['driver_cuda']}"
        return decide(
            rows,
            threads=threads,
            processes=processes,
            wanted=REPETITIONS[self.extent],
            gpus=self.gpus,
            machine=machine,
            missing=self.loops if isinstance(self.loops, str) else None,
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
        if torch_python is None and importlib.util.find_spec("torch") is not None:
            torch_python = sys.executable
        k = min(2, len(self.cpus)) if self.extent != "full" or self.gpus < 4 else 4
        kinds = {"launch-bound": _BATCHES["launch-bound"]}
        if self.gpus and self.extent != "quick":
            kinds["compute-bound"] = _BATCHES["compute-bound"]
        found = []
        environments = {"threads": environment(mps=False), **self.environments}
        until = time.monotonic() + STEPS_SECONDS[self.extent]
        for kind, batch in kinds.items():
            try:
                steps = Steps("mlp", k, self.device, batch, environments, self.note, cores(), torch_python)
            except MpdpError as error:
                self.note(f"{kind} steps are left out: {error}")
                continue
            try:
                made = self._blocks(steps, file, kind, until)
            except MpdpError as error:
                self.note(f"{kind} steps are left out: {error}")
                continue
            finally:
                steps.close()
            self.print(_steps_table(made))
            found.append(made)
        return found

    def _blocks(self, steps: Steps, file: TextIO | None, kind: str, until: float) -> dict[str, Any]:
        length = STEP_BLOCK[self.extent]
        blocks: dict[str, list[float]] = {name: [] for name in steps.names}
        lengths = {name: max(1, int(length / steps.block(name, 3))) for name in steps.names}
        order = random.Random(0)
        refused = dict.fromkeys(steps.names, 0)
        wanted = REPETITIONS[self.extent]
        for _ in range((1 + ATTEMPTS) * wanted):
            names = [name for name in steps.names if len(blocks[name]) < wanted]
            order.shuffle(names)
            for name in names:
                if time.monotonic() > until:
                    break
                before = self.control(steps.k)
                seconds = steps.block(name, lengths[name])
                after = self.control(steps.k)
                accepted = min(before, after) >= LEAST
                if accepted:
                    blocks[name].append(seconds)
                else:
                    refused[name] += 1
                if file is not None:
                    sample = {"step": kind, "job": name, "seconds": seconds, "control": [before, after]}
                    file.write(json.dumps({**sample, "accepted": accepted}) + "\n")
        return {
            "kind": kind,
            "workload": steps.workload,
            "ranks": steps.k,
            "batch_per_rank": steps.batch,
            "about": steps.about,
            "blocks": blocks,
            "refused": refused,
        }


def _used_bytes() -> int:
    """Return the bytes in use on the GPUs, by all processes."""
    from ...device_memory import devices

    return sum(gpu.total - gpu.free for gpu in devices())


def _driver_version() -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
        return done.stdout.splitlines()[0].strip() or None
    except (OSError, subprocess.TimeoutExpired, IndexError):
        return None


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the launches as lines for people."""
    width = max((len(row["row"]) for row in rows), default=0)
    head = f"{'launches':<{width}}  k  enqueued/s  completed/s  {'scaling of both':<20}  "
    lines = [head + "  p50 us   p99 us  p99.9 us    max us  accepted"]
    for row in rows:
        counts = f"{row['accepted']} of {row['accepted'] + row['refused']}"
        if not row["accepted"]:
            lines.append(f"{row['row']:<{width}}  {row['k']}  (cores busy)  {counts}")
            continue
        scalings = [row[name] for name in ("enqueued_scaling", "scaling")]
        told = "  ".join("" if each is None else f"{each[0]:.2f}" for each in scalings)
        lines.append(
            f"{row['row']:<{width}}  {row['k']}  {row['enqueued_per_second']:>10,.0f}  {row['per_second']:>11,.0f}  "
            f"{told:<20}  {row['p50_us']:>8.2f} {row['p99_us']:>8.2f} {row['p99_9_us']:>9.2f} {row['max_us']:>9.1f}  "
            f"{counts}"
        )
    return "\n".join(lines)


def _steps_table(made: dict[str, Any]) -> str:
    blocks = made["blocks"]
    lines = [
        f"{made['kind']} step of {made['workload']}, {made['ranks']} ranks, {made['batch_per_rank']} samples each:"
    ]
    first = blocks.get("threads")
    for name, seconds in blocks.items():
        against = f", {made['refused'].get(name, 0)} blocks refused"
        if not seconds:
            lines.append(f"  {name:<22} (cores busy){against}")
            continue
        if first and name != "threads":
            value, low, high = interval(first, seconds)
            against += f", threads take {value:.2f} times [{low:.2f}, {high:.2f}]"
        lines.append(f"  {name:<22} {float(np.median(seconds)) * 1e6:>10.0f} us{against}")
    return "\n".join(lines)
