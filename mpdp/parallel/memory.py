"""How much memory a replica takes, by what it is for.

Arenas and optimizer state are known to the byte. Activations are measured on the tape when backward starts, for a
graph or a share that is larger than any before. What a call of an operation takes and gives back within itself is seen
on a GPU alone, in what CuPy's pool and the transport hold.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from typing import Any

from ..autodiff import Tape
from ..device import Device
from .replica import Replica

_MOST_GRAPHS = 256


class MemoryUse:
    """Note the largest activations seen, and report. **Local.**"""

    def __init__(self) -> None:
        self.activations = self._peak = 0
        self._seen: dict[int, int] = {}
        self.beside: Callable[[], int] | None = None  # bytes of a GPU in pools beside CuPy's own

    def look(self, tape: Tape, signature: int, samples: int | None) -> None:
        """Measure what a tape holds, unless the same graph was measured with as many samples or more."""
        if self._seen.get(signature, -1) < (samples or 0):
            if len(self._seen) >= _MOST_GRAPHS:
                self._seen.clear()
            self._seen[signature] = samples or 0
            self.activations = max(self.activations, tape.held_bytes())

    def note_peak(self, replica: Replica) -> int:
        """Return the most bytes of a GPU that this rank has had; call it before a pool gives some back. **Local.**"""
        now = _pool_bytes(replica.device) + replica.comm.device_bytes
        self._peak = max(self._peak, now + (0 if self.beside is None else self.beside()))
        return self._peak

    def report(self, replica: Replica) -> dict[str, int]:
        """Return bytes by purpose; see ``DataParallel.memory``."""
        copies, optimizer, average = replica.copies, replica.optimizer, replica.average
        parts = {
            "parameters": replica.weights_nbytes
            + (0 if copies is None else copies.nbytes)
            + sum(buffer.data.nbytes for buffer in replica.buffers.values()),
            "gradients": replica.arena.array.nbytes,
            "optimizer": (0 if optimizer is None else sum(flat.nbytes for flat in optimizer.state.values()))
            + (0 if average is None else average.array.nbytes),
            "activations": self.activations,
        }
        if replica.device.kind == "cuda":
            peak = self.note_peak(replica)
            return parts | {"workspace": max(0, peak - sum(parts.values())), "peak": peak}
        return parts | {
            "workspace": (0 if optimizer is None else optimizer.scratch_bytes)
            + (0 if average is None else average.scratch_bytes),
            "peak": _resident_bytes(),
        }


def _pool_bytes(device: Device) -> int:
    """Return what CuPy's pool has taken of the GPU: it gives nothing back unless it is told to."""
    xp: Any = device.xp
    with xp.cuda.Device(device.ordinal):
        return int(xp.get_default_memory_pool().total_bytes())


def _resident_bytes() -> int:
    """Return the most memory that this process has had, with Python, libraries and data."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024
