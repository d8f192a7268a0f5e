"""``mpdp bench train``: the time of a training step, forward to update, all ranks together.

The figure is the median of five timed blocks after a warm-up; a block starts behind a barrier and its time is the
largest over ranks. One more block, behind them, is noted by a timeline: it gives the time of the communication in a
step, how much of that the computation did not hide, and the trace.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from functools import partial
from typing import Any

import numpy as np

from .. import __version__
from ..comm.agreement import on_root
from ..comm.tuned import processor
from ..report.timeline import STEPS, Timeline
from ..training import Trainer
from ..world import World, blas_threads, init
from .workloads import build

WARM_UP = 12  # steps
WARM_UP_SECONDS = 6.0  # fewer steps where they would take longer: the same number on all ranks
BLOCKS = 5
BLOCK_SECONDS = 2.0
QUICK_BLOCKS = 3
QUICK_SECONDS = 0.3
TRACED_STEPS = 2 * STEPS  # of which the timeline keeps the second half


def run(
    workload: str,
    *,
    device: str,
    batch: int | None,
    quick: bool,
    json_path: str | None,
    trace_path: str | None = None,
) -> int:
    """Measure one workload; rank 0 prints a line and writes the JSON object and the trace. **Collective.**"""
    world = init(device=device)
    for path in (None if json_path == "-" else json_path, trace_path):
        if path is not None:
            on_root(world.axis("data"), partial(_touch, str(path)))  # an error before time is spent
    result = measure(world, workload, batch=batch, quick=quick, trace_path=trace_path)
    if world.rank == 0:
        print(
            f"{result['workload']} on {result['ranks']} x {result['device']}: {result['step_us']:.0f} us a step, "
            f"{result['items_per_second']:,.0f} {result['unit']}/s "
            f"(blocks {min(result['block_step_us']):.0f} to {max(result['block_step_us']):.0f} us); "
            f"communication {result['communication_us']:.0f} us, "
            f"of which {result['exposed_communication_us']:.0f} us not hidden",
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


def _touch(path: str) -> None:
    with open(path, "a", encoding="utf-8"):
        pass


def measure(
    world: World,
    name: str,
    *,
    batch: int | None = None,
    quick: bool = False,
    trace_path: str | None = None,
) -> dict[str, Any]:
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
    with Timeline(trainer.parallel) as timeline:  # in a block of its own: the others run without it
        _block(trainer, workload.batch, min(steps, TRACED_STEPS), comm)
    if trace_path is not None:
        timeline.write(trace_path)
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
        **timeline.figures(),
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
