"""What the figures of a run are of: hardware, driver, versions, and what else could bear on them."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ... import __version__
from ...comm.tuned import processor
from .driver import driver

_CLOCKS = "clocks.sm,clocks.max.sm,temperature.gpu,pstate"


def about(gpus: int, cpus: int) -> dict[str, Any]:
    """Return what does not change during a run.

    **Local.**

    Args:
        gpus: that are used; 0 for none.
        cpus: cores in reach.
    """
    found: dict[str, Any] = {
        "system": f"mpdp-{__version__}",
        "command": " ".join(["mpdp", *sys.argv[1:]]),
        "processor": processor(),
        "cores": cpus,
        "hypervisor": _hypervisor(),
        "cpu_quota": _quota(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "switch_interval": sys.getswitchinterval(),
        "cuda_environment": {name: value for name, value in os.environ.items() if name.startswith("CUDA_")},
    }
    if gpus:
        version = query("driver_version")
        found |= {"gpu": driver().name(0), "driver_cuda": driver().version(), "driver": version}
        if importlib.util.find_spec("cupy") is not None:
            import cupy  # type: ignore[import-not-found,unused-ignore]

            found |= {"cupy": cupy.__version__, "cuda": cupy.cuda.runtime.runtimeGetVersion()}
    return found


def moment(gpus: int) -> dict[str, Any]:
    """Return what does change: the first GPU's clocks and heat, never set; the stolen time. **Local.**"""
    return {"clocks": query(_CLOCKS) if gpus else None, "stolen_seconds": _stolen()}


def query(what: str) -> str | None:
    """Return what nvidia-smi says of the first GPU; None where it says nothing. **Local.**"""
    line = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=20)
        return done.stdout.splitlines()[0].strip() or None
    except (OSError, subprocess.TimeoutExpired, IndexError):
        return None


def _hypervisor() -> bool:
    """Return whether the processor says that it is a virtual one."""
    try:
        return " hypervisor" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _quota() -> str | None:
    """Return the limit on the processes' time of cores, as the kernel spells it; None for none."""
    try:
        found = Path("/sys/fs/cgroup/cpu.max").read_text().strip()
    except OSError:
        return None
    return None if found.startswith("max") else found


def _stolen() -> float | None:
    """Return the seconds that the hypervisor has kept for others, over all cores."""
    try:
        words = Path("/proc/stat").read_text().split(maxsplit=9)
        return int(words[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None
