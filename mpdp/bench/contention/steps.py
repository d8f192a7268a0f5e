"""The training step in threads, in processes and in one process, whose blocks take turns.

Each is a job of its own that stays alive and is told when to work, so that what else the machine does meets all alike.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpdp

from ...cores import VARIABLES
from ...errors import CommunicationError, LaunchError
from .channel import Channel

SCRIPT = Path(__file__).parent / "step_job.py"
DATA_PARALLEL = "DataParallel in threads"


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
            if torch_python is not None and not gpu:
                wanted["torch DDP"] = line, batch, base, ["torch", torch_python]
        except LaunchError as error:
            say(f"steps of processes are left out: {error}")
        for name, (line, samples, environ, how) in wanted.items():
            path = os.pathsep.join(part for part in (root, environ.get("PYTHONPATH", "")) if part)
            words = [*line, str(SCRIPT), workload, device, str(samples), *how]
            used, begun = used_bytes() if used_bytes else 0, time.monotonic()
            self._jobs[name] = Channel(words, {**environ, "PYTHONPATH": path}, f"steps of {name}")
            if used_bytes is not None and self._connect(name, say) and name != "torch DDP":
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
            say(f"steps of {name} are left out: {error}")
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

    def close(self) -> None:
        """End the jobs. **Local.**"""
        for job in self._jobs.values():
            job.close()
