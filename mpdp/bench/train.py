"""``mpdp bench train``: the time of a training step, forward to update, all ranks together.

The figure is the median of five timed blocks after a warm-up; a block starts behind a barrier and its time is the
largest over ranks.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from typing import Any

import numpy as np

from .. import __version__
from ..comm.agreement import on_root
from ..training import Trainer
from ..world import World, blas_threads, init
from .workloads import build

WARM_UP = 12  # steps
WARM_UP_SECONDS = 6.0  # fewer steps where they would take longer: the same number on all ranks
BLOCKS = 5
BLOCK_SECONDS = 2.0
QUICK_BLOCKS = 3
QUICK_SECONDS = 0.3


def run(workload: str, *, device: str, batch: int | None, quick: bool, json_path: str | None) -> int:
    """Measure one workload; rank 0 prints a line and writes the JSON object. **Collective.**"""
    world = init(device=device)
    if json_path not in (None, "-"):
        on_root(
            world.axis("data"), lambda: open(str(json_path), "a").close()
        )  # an error before time is spent
    result = measure(world, workload, batch=batch, quick=quick)
    if world.rank == 0:
        print(
            f"{result['workload']} on {result['ranks']} x {result['device']}: {result['step_us']:.0f} us a step, "
            f"{result['items_per_second']:,.0f} {result['unit']}/s "
            f"(blocks {min(result['block_step_us']):.0f} to {max(result['block_step_us']):.0f} us)",
            file=sys.stderr if json_path == "-" else sys.stdout,
            flush=True,
        )
        text = json.dumps(result)
        if json_path == "-":
            print(text, flush=True)
        elif json_path is not None:
            with open(json_path, "w", encoding="utf-8") as file:
                file.write(text + "\n")
    return 0


def measure(world: World, name: str, *, batch: int | None = None, quick: bool = False) -> dict[str, Any]:
    """Return the measured step of a workload as JSON-able data. **Collective.**"""
    workload = build(name, world.rank, batch, world.device.kind)
    trainer = Trainer(workload.model, workload.loss, workload.optimizer, world=world)
    comm = world.axis("data")
    trainer.step(workload.batch)
    once = _block(trainer, workload.batch, 1, comm)
    _block(trainer, workload.batch, max(1, min(WARM_UP, int(WARM_UP_SECONDS / once))), comm)
    once = _block(trainer, workload.batch, max(1, min(10, int(BLOCK_SECONDS / once))), comm)
    steps = max(1, int((QUICK_SECONDS if quick else BLOCK_SECONDS) / once))
    blocks = [_block(trainer, workload.batch, steps, comm) for _ in range(QUICK_BLOCKS if quick else BLOCKS)]
    step = statistics.median(blocks)
    return {
        "system": f"mpdp-{__version__}",
        "workload": name,
        "device": str(world.device),
        "ranks": world.size,
        "precision": trainer.precision,
        "transport": world.transport,
        "batch_per_rank": len(workload.batch[1]),
        "step_us": step * 1e6,
        "block_step_us": [b * 1e6 for b in blocks],
        "steps_per_block": steps,
        "items_per_second": workload.items * world.size / step,
        "unit": workload.unit,
        "blas_threads": blas_threads(),
        "loss": trainer.loss,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "processor": processor(),
    }


def _block(trainer: Trainer, batch: tuple[Any, Any], steps: int, comm: Any) -> float:
    """Return the seconds a step of one block, the largest over ranks."""
    comm.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        trainer.step(batch)
    seconds = np.array([(time.perf_counter() - start) / steps])
    comm.all_reduce(seconds, op="max", lane="urgent")
    return float(seconds[0])


def processor() -> str:
    """Return the name of this machine's processor. **Local.**"""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
