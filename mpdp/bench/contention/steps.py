"""The training step in threads, in processes and in one process, whose blocks take turns.

Each is a job of its own that stays alive and is told when to work, so that what else the machine does meets all alike.
"""

from __future__ import annotations

import os
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpdp

from ...cores import VARIABLES
from ...errors import CommunicationError, LaunchError
from .channel import Channel
from .control import LEAST, until_free
from .rounds import ATTEMPTS

SCRIPT = Path(__file__).parent / "step_job.py"
SETTLING = 0.1  # seconds in which threads of BLAS that a block has woken go back to sleep
DATA_PARALLEL, TORCH, STAGED = "DataParallel in threads", "torch DDP", ", staged"


class Steps:
    """The jobs of one workload and number of ranks.

    **Local.**

    Args:
        workload: see ``workloads.build``.
        k: ranks.
        device: of the ranks.
        batch: samples a rank; the one process takes those of all.
        environments: of the jobs of processes, by name: one, or one with and one without MPS.
        say: is told what cannot be measured.
        cores: of the one process's BLAS.
        torch_python: a Python that has PyTorch, whose DDP is measured beside on CPU ranks.
        used_bytes: how much of the GPUs all processes use; where it is given, jobs start one after another, and what
            each costs is kept.

    Attributes:
        about: by job, what it says of itself.
        costs: by job, ``start_seconds`` from its start behind its first steps, ``host_bytes`` of all its ranks at their
            peak, and ``device_bytes`` of the GPUs.
    """

    def __init__(
        self,
        workload: str,
        k: int,
        device: str,
        batch: int,
        environments: dict[str, dict[str, str]],
        say: Callable[[str], None],
        cores: int = 1,
        torch_python: str | None = None,
        used_bytes: Callable[[], int] | None = None,
    ) -> None:
        self.workload, self.k, self.batch = workload, k, batch
        self.about: dict[str, Any] = {}
        self.costs: dict[str, dict[str, Any]] = {}
        self._jobs: dict[str, Channel] = {}
        gpu = device != "cpu"
        root = str(Path(mpdp.__file__).resolve().parents[1])
        run = [sys.executable, "-m", "mpdp", "run"]
        base = environments["threads"]
        whole = {**base, **dict.fromkeys(VARIABLES, str(cores))}
        wanted = {
            "threads": ([*run, "--threads", "-n", str(k)], batch, base, ["eager"]),
            DATA_PARALLEL: (
                [sys.executable],
                batch * k,
                {**base, **dict.fromkeys(VARIABLES, str(max(1, cores // k)))},
                ["data-parallel", str(k)],
            ),
            "one process": ([sys.executable], batch * k, whole, ["eager"]),
        }
        several = gpu and len(mpdp.devices()) > 1
        if several:  # the same all-reduce for both, whatever each of them would choose
            words = [*run, "--threads", "-n", str(k)]
            wanted[f"threads{STAGED}"] = words, batch, base, ["eager", "staged"]
        if gpu:
            wanted["one process, graph"] = ([sys.executable], batch * k, whole, ["graph"])
        from ...cli.mpi_library import find_launcher, probe

        try:
            find_launcher(probe())
            line = [*run, "-n", str(k)]
            for name, environ in environments.items():
                if name != "threads":
                    wanted[name] = line, batch, environ, ["eager"]
                    if gpu:
                        wanted[f"{name}, graph"] = line, batch, environ, ["graph"]
            if several:
                wanted[f"processes{STAGED}"] = line, batch, environments["processes"], ["eager", "staged"]
            if torch_python is not None and not gpu:
                wanted[TORCH] = line, batch, base, ["torch", torch_python]
        except LaunchError as error:
            say(f"steps of processes are left out: {error}")
        for name, (line, samples, environ, how) in wanted.items():
            path = os.pathsep.join(part for part in (root, environ.get("PYTHONPATH", "")) if part)
            words = [*line, str(SCRIPT), workload, device, str(samples), *how]
            used, begun = used_bytes() if used_bytes else 0, time.monotonic()
            self._jobs[name] = Channel(words, {**environ, "PYTHONPATH": path}, f"steps of {name}")
            if (
                used_bytes is not None and self._connect(name, say) and name != TORCH
            ):  # whose ranks are others
                seconds = round(time.monotonic() - begun, 2)
                memory = {"host_bytes": self.about[name]["host_bytes"], "device_bytes": used_bytes() - used}
                self.costs[name] = {"start_seconds": seconds, **memory}
        for name in list(self._jobs):
            if name not in self.about:
                self._connect(name, say)

    def _connect(self, name: str, say: Callable[[str], None]) -> bool:
        """Wait for a job; leave it out, and say so, if it fails."""
        try:
            self.about[name] = self._jobs[name].connect()
        except CommunicationError as error:
            say(f"steps of {name} are left out: {brief(error)}")
            self._jobs.pop(name).close()
        return name in self._jobs

    @property
    def names(self) -> list[str]:
        """The jobs that run."""
        return list(self._jobs)

    def block(self, name: str, steps: int) -> float:
        """Return the seconds of a step in a block of so many. **Local.**"""
        self._jobs[name].send(steps)
        return float(self._jobs[name].receive())

    def turns(
        self,
        control: Callable[[int], float],
        *,
        repetitions: int,
        seconds: float,
        until: float,
        keep: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        """Let the jobs take turns, in random order, each block between two controls.

        **Local.**

        Args:
            control: k -> share of their cores that k threads get.
            repetitions: accepted blocks wanted of each.
            seconds: of a block.
            until: ``time.monotonic()`` after which none begins.
            keep: is given each block.

        Returns:
            ``blocks``, by job the seconds of a step in the accepted ones, ``refused``, and what the jobs are.
        """
        blocks: dict[str, list[float]] = {name: [] for name in self.names}
        lengths = {name: max(1, int(seconds / self.block(name, 3))) for name in self.names}
        order, refused = random.Random(0), dict.fromkeys(self.names, 0)
        for _ in range((1 + ATTEMPTS) * repetitions):
            names = [name for name in self.names if len(blocks[name]) < repetitions]
            order.shuffle(names)
            for name in names:
                if time.monotonic() > until:
                    break
                before = until_free(control, self.k)
                each = self.block(name, lengths[name])
                time.sleep(SETTLING)
                after = control(self.k)
                accepted = min(before, after) >= LEAST
                if accepted:
                    blocks[name].append(each)
                else:
                    refused[name] += 1
                keep({"job": name, "seconds": each, "control": [before, after], "accepted": accepted})
        return {
            "workload": self.workload,
            "ranks": self.k,
            "batch_per_rank": self.batch,
            "about": self.about,
            "costs": self.costs,
            "blocks": blocks,
            "refused": refused,
        }

    def close(self) -> None:
        """End the jobs. **Local.**"""
        for job in self._jobs.values():
            job.close()


def brief(error: Exception) -> str:
    """Return an error in a line: what it says first, and the last error that the output behind it holds. **Local.**"""
    first, *rest = str(error).splitlines()
    named = [line for line in rest if re.match(r"(\[\d+/\d+\] )?[\w .]*(Error|error)\b.*: ", line)]
    return first.removesuffix("; it printed:") + (f": {named[-1].strip()}" if named else "")
