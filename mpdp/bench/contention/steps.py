"""The training step in threads, in processes and in one process, whose blocks take turns.

Each is a job of its own that stays alive and is told when to work, so that what else the machine does meets all alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpdp

from ...cores import VARIABLES
from ...errors import CommunicationError, LaunchError
from .channel import Channel

SCRIPT = Path(__file__).parent / "step_job.py"
TORCH = Path(__file__).parents[1] / "peers" / "torch_train.py"
_TORCH_SECONDS = 120.0


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
    ) -> None:
        self.workload, self.k, self.batch = workload, k, batch
        self.about: dict[str, Any] = {}
        self._jobs: dict[str, Channel] = {}
        root = str(Path(mpdp.__file__).resolve().parents[1])
        run = [sys.executable, "-m", "mpdp", "run"]
        base = environments["threads"]
        wanted = {
            "threads": ([*run, "--threads", "-n", str(k)], batch, base),
            "one process": ([sys.executable], batch * k, {**base, **dict.fromkeys(VARIABLES, str(cores))}),
        }
        from ...cli.mpi_library import find_launcher, probe

        try:
            find_launcher(probe())
            for name, environ in environments.items():
                if name != "threads":
                    wanted[name] = [*run, "-n", str(k)], batch, environ
        except LaunchError as error:
            say(f"steps of processes are left out: {error}")
        for name, (line, samples, environ) in wanted.items():
            path = os.pathsep.join(part for part in (root, environ.get("PYTHONPATH", "")) if part)
            words = [*line, str(SCRIPT), workload, device, str(samples)]
            self._jobs[name] = Channel(words, {**environ, "PYTHONPATH": path}, f"steps of {name}")
        for name, job in list(self._jobs.items()):
            try:
                self.about[name] = job.connect()
            except CommunicationError as error:
                say(f"steps of {name} are left out: {error}")
                job.close()
                del self._jobs[name]

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


def torch_blocks(
    python: str, workload: str, k: int, batch: int, seconds: float, blocks: int, cores: int
) -> dict[str, Any]:
    """Return what PyTorch's DistributedDataParallel takes for the same step on CPU ranks.

    **Local.**

    Raises:
        CommunicationError: it does not run.
    """
    words = [python, "-m", "torch.distributed.run", "--nproc_per_node", str(k), str(TORCH), workload]
    words += ["--batch", str(batch), "--blocks", str(blocks), "--seconds", str(seconds)]
    environ = {**os.environ, **dict.fromkeys(VARIABLES, str(max(1, cores // k)))}
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=_TORCH_SECONDS)
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise CommunicationError(f"torch: expected figures from {python}, got {error}") from error
