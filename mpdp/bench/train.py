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
from .peer_process import find_python
from .plot import plot_train, plotting
from .sides import OwnSide, PeerSide, Setting, Side, free_bytes, largest, setting
from .workloads import precision_of

BLOCKS, QUICK_BLOCKS = 5, 3
BLOCK_SECONDS, QUICK_SECONDS = 2.0, 0.3
TRACED_STEPS = 2 * STEPS  # of which the timeline keeps the second half
PROFILED_STEPS = 5


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
        result = compare_losses(world, what, plan, losses_count, weights_path)
        lines = [_losses_line(result)]
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
    peers = _peers(world, what, plan)
    try:
        sides: list[Side] = [own, *peers]
        memory = [_prepare(world, side) for side in sides]
        ceiling = _ceiling(world, what.precision)
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
            }
        )
    silent = _without_collectives(world, own, what, plan)
    timeline = _timeline(own, trace_path)
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


def _peers(world: World, what: Setting, plan: Plan) -> list[PeerSide]:
    """Start the processes of all peers, so that they import their modules at the same time. **Collective.**"""
    sides = []
    for name in plan.peers:
        if world.device.kind == "cpu" and "graph" in name:
            raise ValueError(f"peers: expected no {name} on the CPU, got it; CUDA graphs need --device cuda")
        module = name.partition("-")[0]
        python = find_python(world, module, plan.peer_python, True, "--peer-python")
        sides.append(PeerSide(world, name, what, str(python)))
    try:
        for side in sides:
            side.start()
        for side in sides:
            side.meet()
    except BaseException:
        for side in sides:
            side.close()
        raise
    return sides


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


def _ceiling(world: World, precision: str) -> float:
    """Return what large products reach, on the slowest rank; they take turns. **Collective.**"""
    comm = world.axis("data")
    rates = np.zeros(world.size)
    for rank in range(world.size):
        comm.barrier()
        if rank == world.rank:
            rates[rank] = product_rate(world.device, precision)
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


def _timeline(own: OwnSide, trace_path: str | None) -> dict[str, Any]:
    """Return the figures of a timeline, None where a captured step shows it nothing. **Collective.**"""
    with Timeline(own.trainer.parallel) as timeline:  # in a block of its own: the others run without it
        own.block(0, TRACED_STEPS)
    if trace_path is not None:
        timeline.write(trace_path)
    figures = timeline.figures()
    return {name: value if timeline.steps else None for name, value in figures.items()}


def _processor(world: World) -> str:
    if world.device.kind == "cpu":
        return processor()
    return next(gpu.name for gpu in devices() if gpu.device == world.device)


def compare_losses(world: World, what: Setting, plan: Plan, count: int, path: str | None) -> dict[str, Any]:
    """Return how far our losses are from those of the peer that starts from the same weights. **Collective.**"""
    if world.size > 1:
        raise ValueError(f"losses: expected one rank, got {world.size}; start it without mpirun")
    if path is None:
        raise ValueError("losses: expected a file of weights, got none; pass --weights F.npz")
    count = count or losses.updates(what.workload, what.precision)
    name = next((name for name in plan.peers if name.startswith("torch")), None)
    version = None
    if name is not None:
        eager = [name.replace("-graph", "") if "graph" in name else name]
        (side,) = _peers(world, what, Plan(eager, plan.peer_python))
        try:
            side.losses(count, str(path))
            version = side.version
        finally:
            side.close()
    ours, theirs = losses.curve(world, what, path, count)
    difference = losses.largest_difference(ours, theirs)
    limit = losses.LIMITS[what.precision]
    return {
        "system": f"mpdp-{__version__}",
        "peer": version,
        "workload": what.workload,
        "device": str(world.device),
        "precision": what.precision,
        "graph": what.graph,
        "updates": count,
        "losses": ours,
        "peer_losses": theirs,
        "largest_relative_difference": difference,
        "limit": limit,
        "within": difference <= limit,
    }


def _losses_line(result: dict[str, Any]) -> str:
    return (
        f"{result['workload']} on {result['device']}, {result['precision']}: the losses of {result['updates']} updates "
        f"from the same weights differ by {result['largest_relative_difference']:.2e} at most, relative "
        f"(limit {result['limit']:.0e}): {'within' if result['within'] else 'TOO FAR'}"
    )


def report(result: dict[str, Any]) -> list[str]:
    """Return the lines that people read. **Local.**"""
    exposed = result["exposed_communication_us"]
    communication = (
        ""
        if exposed is None
        else (f"; communication {result['communication_us']:.0f} us, of which {exposed:.0f} us not hidden")
    )
    first = (
        f"{result['workload']} on {result['ranks']} x {result['device']}: {result['step_us']:.0f} us a step, "
        f"{result['items_per_second']:,.0f} {result['unit']}/s "
        f"(blocks {min(result['block_step_us']):.0f} to {max(result['block_step_us']):.0f} us){communication}"
    )
    lines = [first]
    if result["ranks"] > 1:
        lines.append(
            f"the collectives cost {result['communication_cost_us']:.0f} us: a step without them takes "
            f"{result['silent_step_us']:.0f} us"
        )
    lines.append(
        f"{result['precision']}, {result['batch_per_rank']} samples a rank; {result['flops'] / 1e9:,.2f} GFLOP of "
        f"products a step and rank; large products reach {result['ceiling_flops_per_second'] / 1e12:,.3f} TFLOP/s here"
    )
    unit = f"{result['unit']}/s"
    lines.append(
        f"{'system':<22}{'step us':>12}{'quartiles':>22}{unit:>14}{'ratio':>8}{'of ceiling':>12}{'peak MB':>10}"
        f"{'device MB':>11}"
    )
    for row in result["sides"]:
        low, high = row["quartiles_us"]
        taken = "" if row["device_bytes"] is None else f"{row['device_bytes'] / 1e6:,.0f}"
        lines.append(
            f"{row['name']:<22}{row['step_us']:>12,.1f}{f'{low:,.1f} .. {high:,.1f}':>22}"
            f"{row['items_per_second']:>14,.0f}{row['ratio']:>8.2f}{row['utilisation']:>12.1%}"
            f"{row['peak_bytes'] / 1e6:>10,.0f}{taken:>11}"
        )
    for row in result["sides"]:
        if row["breakdown_us"]:
            parts = ", ".join(f"{kind} {value:,.0f}" for kind, value in row["breakdown_us"].items())
            lines.append(f"{row['name']}, us by kind of work: {parts}")
    return lines
