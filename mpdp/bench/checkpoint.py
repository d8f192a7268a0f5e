"""``mpdp bench checkpoint``: how long a save holds training up, and what memory it leaves behind.

A model with AdamW whose checkpoint has a given size, most of it in one arena. In turns: one copy of that memory into
new memory, which is the least that a save in the background can do; ``save(wait=False)`` until it
returns, which is the pause of training; the same until the checkpoint is on the disk; and ``save()``, which waits. The
resident size is looked at before a save and after it. Given are medians, and the pause as a multiple of the copy.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__, nn, optim
from ..autodiff import Parameter
from ..comm.agreement import on_root
from ..training import Trainer, snapshot
from ..world import World, init
from .memory import resident_bytes

BYTES = 1 << 30
QUICK_BYTES = 64 << 20
ROUNDS = 7
_NUMBERS = 3  # that a checkpoint holds of a parameter: its weight and two moments
_LAYERS = 8


class _Layers(nn.Module):
    """Parameters of a given size in all, and nothing to compute."""

    def __init__(self, count: int) -> None:
        self.layers = [Parameter(np.ones((count // _LAYERS,), np.float32)) for _ in range(_LAYERS)]

    def forward(self, x: Any) -> Any:
        """Return the input."""
        return x


def run(*, quick: bool, nbytes: int | None, folder: str | None, json_path: str | None) -> int:
    """Measure; rank 0 prints a line and writes the JSON object. **Collective.**"""
    world = init(device="cpu")
    size = nbytes or (QUICK_BYTES if quick else BYTES)
    result = measure(world, size, folder, 3 if quick else ROUNDS)
    if world.rank == 0:
        out = sys.stderr if json_path == "-" else sys.stdout
        print(
            f"checkpoint of {result['checkpoint_bytes'] / 2**20:,.0f} MiB: one copy {result['copy_seconds']:.3f} s, "
            f"pause of a save in the background {result['pause_seconds']:.3f} s ({result['pause_ratio']:.2f} copies), "
            f"until it is on the disk {result['background_seconds']:.2f} s, a save that waits "
            f"{result['waiting_seconds']:.2f} s; {result['left_bytes'] / 2**20:,.1f} MiB more memory afterwards",
            file=out,
            flush=True,
        )
        if json_path == "-":
            print(json.dumps(result), flush=True)
        elif json_path is not None:
            Path(json_path).write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 0


def measure(world: World, nbytes: int, folder: str | None, rounds: int) -> dict[str, Any]:
    """Return the figures of saves of about ``nbytes``. **Collective.**"""
    comm = world.axis("data")
    made = on_root(comm, lambda: tempfile.TemporaryDirectory(dir=folder, prefix="mpdp-bench-"))
    name = comm.broadcast_bytes(None if made is None else made.name.encode()).decode()
    try:
        model = _Layers(max(_LAYERS, nbytes // (4 * _NUMBERS)))
        trainer = Trainer(
            model, nn.cross_entropy, optim.AdamW(lr=1e-3), world=world, run_dir=Path(name, "run"), keep=1
        )
        path = trainer.save()  # the first one makes folders
        taken = sum(file.stat().st_size for file in path.iterdir()) if world.rank == 0 else 0
        times: dict[str, list[float]] = {"copy": [], "pause": [], "background": [], "waiting": []}
        left: list[int] = []
        for _ in range(rounds):
            _copy(trainer)  # so that memory is free which files' contents have filled
            times["copy"].append(_seconds(comm, lambda: _copy(trainer)))
            before = resident_bytes()
            start = time.perf_counter()
            times["pause"].append(_seconds(comm, lambda: trainer.save(wait=False)))
            trainer.saves.finish()
            times["background"].append(time.perf_counter() - start)
            left.append(resident_bytes() - before)
            times["waiting"].append(_seconds(comm, trainer.save))
    finally:
        comm.barrier()
        if made is not None:
            made.cleanup()
    middle = {name: statistics.median(values) for name, values in times.items()}
    return {
        "system": f"mpdp-{__version__}",
        "ranks": world.size,
        "checkpoint_bytes": taken,
        "rounds": rounds,
        **{f"{name}_seconds": value for name, value in middle.items()},
        "pause_ratio": middle["pause"] / middle["copy"] if middle["copy"] else float("inf"),
        "left_bytes": int(statistics.median(left)),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _copy(trainer: Trainer) -> list[np.ndarray]:
    """Copy once, into new memory, what a save has to copy."""
    return [
        np.array(flat[start:stop])
        for start, stop in snapshot.written_ranges(trainer)
        for flat in snapshot.flats(trainer).values()
    ]


def _seconds(comm: Any, call: Callable[[], Any]) -> float:
    """Return how long a call takes, from when all ranks are there."""
    comm.barrier()
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    del result  # to give a copy back takes time too
    return seconds
