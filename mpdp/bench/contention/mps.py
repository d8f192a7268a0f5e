"""CUDA's multi-process service, under which processes share a GPU instead of taking turns.

The benchmark uses the one that runs, or starts one of its own: a control daemon with pipes and logs in a private
folder, which nothing else finds, stopped at the end. Settings of the GPU are left alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_DEFAULT = "/tmp/nvidia-mps"
_PATIENCE = 20.0  # seconds for an answer of the daemon
_APPEARS = 3.0  # seconds for it to say that it is there
_CLIENTS_END = 5  # seconds for its clients at the end


def runs(environ: Mapping[str, str]) -> bool:
    """Return whether the daemon runs that an environment names. **Local.**"""
    try:
        pid = int(Path(environ.get(PIPES, _DEFAULT), f"{CONTROL}.pid").read_text())
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


@contextlib.contextmanager
def service(environ: Mapping[str, str]) -> Iterator[dict[str, str] | str]:
    """Have a service; give the variables by which processes find it, or why there is none. **Local.**"""
    if runs(environ):
        yield {PIPES: environ[PIPES]} if PIPES in environ else {}
        return
    program = shutil.which(CONTROL)
    if program is None:
        yield f"{CONTROL} is not on PATH"
        return
    folder = tempfile.mkdtemp(prefix="mpdp-mps-")
    own = {PIPES: folder, LOGS: folder}
    inside = {**environ, **own}
    try:
        why = _ask([program, "-d"], inside)
        try:
            deadline = time.monotonic() + _APPEARS
            while why is None and not runs(inside) and time.monotonic() < deadline:
                time.sleep(0.02)
            if why is None and not runs(inside):
                why = f"{CONTROL} -d: expected a daemon, got none; see control.log of a start by hand"
            yield own if why is None else why
        finally:
            if runs(inside):
                _ask([program], inside, f"quit -t {_CLIENTS_END}\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ask(line: list[str], environ: Mapping[str, str], text: str = "") -> str | None:
    """Return why a call of the daemon's program failed, or None."""
    try:
        done = subprocess.run(
            line, input=text, env=dict(environ), capture_output=True, text=True, timeout=_PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{CONTROL}: {error}"
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()[-1:]
        return f"{CONTROL}: status {done.returncode} {said}"
    return None
