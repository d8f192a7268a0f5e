"""The C of this folder, compiled when it is first wanted: the loops of ``launches.c`` and what one job of them is."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SPIN, SLEEP, KERNEL, GRAPH, QUERY, ATTRIBUTE, RECORD, COPY, ALLOCATE, ALLOCATE_ASYNC, WAIT, LOAD = range(12)
_COMPILERS = ("cc", "gcc", "clang")

_i64, _pointer = ctypes.c_int64, ctypes.c_void_p


class Job(ctypes.Structure):
    """``Job`` of ``launches.c``."""

    _fields_ = tuple(
        (name, kind)
        for kind, names in (
            (_i64, "kind n every nanoseconds mock_lock user_lock cpu start_at stop_at bytes"),
            (_pointer, "call second third synchronize set_context context stream target event memory"),
            (_pointer, "parameters latencies"),
            (_i64, "started ended busy calls error voluntary involuntary cpu_nanoseconds"),
        )
        for name in names.split()
    )


class Loops:
    """The compiled loops.

    Args:
        path: of the shared library.

    Attributes:
        free: its calls release the GIL.
        held: its calls keep it.
    """

    def __init__(self, path: str) -> None:
        self.free = ctypes.CDLL(path)
        self.held = ctypes.PyDLL(path)
        for library in (self.free, self.held):
            library.once.argtypes = (_pointer,)
            library.once.restype = _i64
            library.run_loop.argtypes = (_pointer,)
            library.run_loop.restype = None
            library.run_threads.argtypes = (_pointer, _i64)
            library.run_threads.restype = ctypes.c_int

    def run(self, job: Job) -> None:
        """Run one job in the calling thread, from one call of Python's. **Local.**"""
        self.free.run_loop(ctypes.addressof(job))

    def run_threads(self, jobs: list[Job]) -> None:
        """Run each job in a thread in which no Python runs. **Local.**"""
        pointers: Any = (_pointer * len(jobs))(*(ctypes.addressof(job) for job in jobs))
        if self.free.run_threads(ctypes.addressof(pointers), len(jobs)):
            raise RuntimeError(
                f"pthread_create: expected {len(jobs)} threads, got fewer; raise the limit of processes"
            )


@cache
def loops() -> Loops | str:
    """Return the loops, or why there are none. **Local.**"""
    try:
        return Loops(str(library("launches")))
    except (OSError, RuntimeError) as error:
        return str(error)


def library(name: str) -> Path:
    """Return the shared library of a file of C of this folder, compiled once a user and source, into the cache.

    **Local.**

    Raises:
        RuntimeError: why there is none, such as no compiler.
    """
    compiler = next((found for each in _COMPILERS if (found := shutil.which(each))), None)
    if compiler is None:
        raise RuntimeError(f"no C compiler ({', '.join(_COMPILERS)})")
    source = FOLDER / f"{name}.c"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for place in (lambda: os.path.join(base, "mpdp"), lambda: tempfile.mkdtemp(prefix="mpdp-launches-")):
        try:
            folder = Path(place())
            path = folder / f"{name}-{digest}.so"
            if not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                part = path.with_name(f"{path.name}.{os.getpid()}.part")
                line = [compiler, "-O2", "-shared", "-fPIC", "-pthread", "-o", str(part), str(source), "-ldl"]
                done = subprocess.run(line, capture_output=True, text=True, timeout=60)
                if done.returncode:
                    raise RuntimeError(
                        f"{compiler} cannot compile {name}.c: {done.stderr.strip().splitlines()[-1:]}"
                    )
                os.replace(part, path)
            ctypes.CDLL(str(path))
            return path
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
    raise RuntimeError(f"{name}.c cannot be built: {why}")
