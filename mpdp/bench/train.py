"""``mpdp bench train``: the time of a training step, forward to update, all ranks together, beside that of peers.

Each side prepares alone and warms up. Then the sides take turns, a block each; a figure is the median of its blocks, a
ratio that of the ratios of blocks of one turn. A block starts behind a barrier, and its time is the largest over ranks.
Behind the turns, on our side: a step without its collectives in turns with one that has them, a timeline (how much of
the communication was not hidden), and what kinds of work the step's time goes to.

What is compared: ``workloads`` and ``peers/torch_models.py`` define the same model, data, loss and optimizer. Our step
also clips the gradient and checks it for NaN, and its kernels are deterministic; the peers' step does and is neither,
as their users run it (``--clip both`` lets them clip). So a ratio leans to the peer.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__, kernels
from ..comm.agreement import on_root
from ..comm.tuned import processor
from ..device_memory import devices
from ..errors import DeviceError, MissingDependencyError
from ..report.timeline import STEPS, Timeline
from ..training import Trainer
from ..world import World, blas_threads, init
from . import losses, turns
from .breakdown import CallClock, by_class, class_of_call
from .ceiling import product_rate
from .flops import step_flops
from .plot import plot_train, plotting
from .sides import OwnSide, Setting, Side, free_bytes, largest, setting, start_peers
from .tables import losses_line, report
from .workloads import precision_of

BLOCKS, QUICK_BLOCKS = 5, 3
BLOCK_SECONDS, QUICK_SECONDS = 2.0, 0.3
TRACED_STEPS = 2 * STEPS  # of which the timeline keeps the second half
PROFILED_STEPS = 5
LISTED_KERNELS = 20
CEILING_SECONDS = 0.3  # for each size of product, or as long as a block


@dataclass(frozen=True)
class Plan:
    """What to compare, and how long.

    Attributes:
        peers: other systems, some of ``bench.PEERS``.
        peer_python: an interpreter that has them (default: this one).
        blocks: of each side.
        seconds: of a block.
    """

    peers: Sequence[str] = ()
    peer_python: str | None = None
    blocks: int = BLOCKS
    seconds: float = BLOCK_SECONDS


def run(
    workload: str,
    *,
    device: str,
    plan: Plan,
    precision: str | None = None,
    json_path: str | None = None,
    trace_path: str | None = None,
    plot_path: str | None = None,
    losses_count: int | None = None,
    weights_path: str | None = None,
    **options: Any,
) -> int:
    """Measure one workload; rank 0 prints and writes the JSON object, the trace and the plot. **Collective.**

    Args:
        workload: one of ``bench.WORKLOADS``.
        device: of the ranks.
        plan: what to compare with.
        precision: default: ``workloads.precision_of``.
        json_path: file of the JSON object; ``-`` is stdout.
        trace_path: file of the trace.
        plot_path: file of the plot.
        losses_count: compare the losses of so many updates instead; 0 is the default number.
        weights_path: file of the peer's weights, data and losses.
        options: see ``sides.Setting``.

    Returns:
        the exit status: 1 where losses differ by more than they may.
    """
    if plot_path is not None:
        plotting()  # an error before time is spent
    world = init(device=device)
    for path in (None if json_path == "-" else json_path, trace_path, plot_path):
        if path is not None:
            on_root(world.axis("data"), partial(_touch, str(path)))
    chosen = precision or precision_of(workload, world.device.kind)
    what = setting(workload, world.device.kind, precision=chosen, **options)
    say = sys.stderr if json_path == "-" else sys.stdout
    status = 0
    if losses_count is None:
        result = measure(world, workload, what=what, plan=plan, trace_path=trace_path)
        lines = report(result)
        if plot_path is not None and world.rank == 0:
            plot_train(result, plot_path)
    else:
        result = losses.compare(world, what, plan.peers, plan.peer_python, losses_count, weights_path)
        lines = [losses_line(result)]
        status = 0 if result["within"] else 1
    if world.rank == 0:
        print("\n".join(lines), file=say, flush=True)
        text = json.dumps(result)
        if json_path == "-":
            print(text, flush=True)
        elif json_path is not None:
            Path(json_path).write_text(text + "\n", encoding="utf-8")
    return status


def _touch(path: str) -> None:
    with open(path, "a", encoding="utf-8"):
        pass


def measure(
    world: World,
    workload: str,
    *,
    what: Setting | None = None,
    plan: Plan | None = None,
    trace_path: str | None = None,
) -> dict[str, Any]:
    """Return the measured step of a workload, and of the peers, as JSON-able data. **Collective.**"""
    plan = plan or Plan()
    kind = world.device.kind
    what = what or setting(workload, kind, precision=precision_of(workload, kind))
    own = OwnSide(world, what)
    peers = start_peers(world, what, plan.peers, plan.peer_python)
    try:
        sides: list[Side] = [own, *peers]
        memory = [_prepare(world, side) for side in sides]
        ceiling = _ceiling(world, what.precision, plan)
        seconds = _turns(world, sides, plan)
        profiles = [_profile(world, side) for side in sides]
    finally:
        for peer in peers:
            peer.close()
    flops = step_flops(workload, what.batch)
    rows: list[dict[str, Any]] = []
    for side, device_bytes, blocks, kernel_seconds in zip(sides, memory, seconds, profiles):
        step = statistics.median(blocks)
        rows.append(
            {
                "name": side.name,
                "version": side.version,
                "step_us": step * 1e6,
                "quartiles_us": [value * 1e6 for value in turns.quartiles(blocks)],
                "block_step_us": [value * 1e6 for value in blocks],
                "items_per_second": own.items * world.size / step,
                "ratio": turns.ratio(blocks, seconds[0]),
                "flops_per_second": flops / step,
                "utilisation": flops / step / ceiling,
                "peak_bytes": int(largest(world.axis("data"), side.peak_bytes)),
                "device_bytes": device_bytes,
                "breakdown_us": _breakdown(step, kernel_seconds),
                "kernels_us": _longest(kernel_seconds),
            }
        )
    silent = _without_collectives(world, own, what, plan)
    graphs = own.trainer.updates.graphs
    captures = 0 if graphs is None else graphs.captures  # before a timeline: it runs steps eagerly
    timeline = _timeline(own, plan, trace_path)
    if kind == "cpu":
        rows[0]["breakdown_us"] = _calls(own, rows[0]["step_us"] / 1e6)
    trainer: Trainer = own.trainer
    return {
        "system": f"mpdp-{__version__}",
        "workload": workload,
        "device": str(world.device),
        "ranks": world.size,
        "ranks_per_gpu": world.ranks_per_device,
        "precision": what.precision,
        "graph": what.graph,
        "captures": captures,
        "plans": what.plans,
        "clip_norm": what.clip_norm,
        "peers_clip": what.peers_clip,
        "transport": world.transport,
        "batch_per_rank": what.batch,
        **{name: rows[0][name] for name in ("step_us", "block_step_us", "items_per_second")},
        **timeline,
        **silent,
        "unit": own.unit,
        "flops": flops,
        "ceiling_flops_per_second": ceiling,
        "memory": trainer.memory(),
        "sides": rows,
        "blas_threads": blas_threads(),
        "loss": float(trainer.loss),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "processor": _processor(world),
    }


def _prepare(world: World, side: Side) -> int | None:
    """Prepare a side; return by how much the GPU's free memory fell meanwhile, a rank. **Collective.**"""
    comm = world.axis("data")
    world.log("info", f"bench: {side.name} prepares")
    comm.barrier()
    before = free_bytes(world.device)
    comm.barrier()
    side.prepare()
    comm.barrier()
    after = free_bytes(world.device)
    comm.barrier()
    if before is None or after is None:
        return None
    return int(largest(comm, before - after)) // world.ranks_per_device


def _ceiling(world: World, precision: str, plan: Plan) -> float:
    """Return what large products reach, on the slowest rank; they take turns. **Collective.**"""
    comm = world.axis("data")
    rates = np.zeros(world.size)
    for rank in range(world.size):
        comm.barrier()
        if rank == world.rank:
            rates[rank] = product_rate(world.device, precision, min(CEILING_SECONDS, plan.seconds))
    comm.all_reduce(rates, op="max", lane="urgent")
    return float(rates.min())


def _turns(world: World, sides: Sequence[Side], plan: Plan) -> list[list[float]]:
    """Return the seconds a step of each side's blocks. **Collective.**"""
    comm = world.axis("data")

    def block(side: Side, warm_up: int, count: int) -> float:
        return largest(comm, side.block(warm_up, count))

    steps = []
    for side in sides:
        once = block(side, 0, 1)
        once = block(side, 0, max(1, min(10, int(plan.seconds / once))))
        steps.append(turns.steps_of(plan.seconds, once))
    return turns.alternate([partial(block, side) for side in sides], plan.blocks, steps)


def _profile(world: World, side: Side) -> dict[str, float] | None:
    try:
        return side.kernels(PROFILED_STEPS)
    except (MissingDependencyError, DeviceError) as error:
        world.log("warning", f"bench: no breakdown of {side.name}: {error}")
        return None


def _breakdown(step: float, seconds: dict[str, float] | None) -> dict[str, float] | None:
    """Return microseconds by class of kernels, and the gaps: what is left of the step."""
    if not seconds:
        return None
    found = by_class(seconds)
    found["gaps"] = max(0.0, step - sum(found.values()))
    return {name: value * 1e6 for name, value in found.items()}


def _longest(seconds: dict[str, float] | None) -> dict[str, float] | None:
    """Return microseconds of the kernels that take longest, by name."""
    if not seconds:
        return None
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:LISTED_KERNELS]
    return {name[:120]: value * 1e6 for name, value in longest}


def _calls(own: OwnSide, step: float) -> dict[str, float]:
    """Return microseconds a step by class of the kernels' calls, and the rest. **Collective.**"""
    calls = CallClock(kernels.for_device(own.trainer.world.device))
    with calls:
        own.block(0, PROFILED_STEPS)
    found = by_class({name: value / PROFILED_STEPS for name, value in calls.seconds.items()}, class_of_call)
    found["rest"] = max(0.0, step - sum(found.values()))
    return {name: value * 1e6 for name, value in found.items()}


def _without_collectives(world: World, own: OwnSide, what: Setting, plan: Plan) -> dict[str, Any]:
    """Return what the collectives of a step cost: with and without them in turns. **Collective.**"""
    if world.size == 1:
        return {"communication_cost_us": 0.0, "silent_step_us": None}
    silent = OwnSide(world, what, silent=True)
    silent.prepare()
    with_them, without = _turns(world, [own, silent], plan)
    cost = statistics.median(a - b for a, b in zip(with_them, without))
    return {"communication_cost_us": cost * 1e6, "silent_step_us": statistics.median(without) * 1e6}


def _timeline(own: OwnSide, plan: Plan, trace_path: str | None) -> dict[str, float]:
    """Return the figures of a timeline, whose steps are eager; no communication for one rank. **Collective.**"""
    world = own.trainer.world
    once = largest(world.axis("data"), own.block(0, 1))
    with Timeline(own.trainer.parallel) as timeline:  # in a block of its own: the others run without it
        own.block(0, max(1, min(TRACED_STEPS, int(plan.seconds / once))))
    if trace_path is not None:
        timeline.write(trace_path)
    figures = timeline.figures()
    if world.size == 1:  # what it saw then is the host's time for chunks that go nowhere
        figures |= {"communication_us": 0.0, "exposed_communication_us": 0.0}
    return figures


def _processor(world: World) -> str:
    if world.device.kind == "cpu":
        return processor()
    return next(gpu.name for gpu in devices() if gpu.device == world.device)
