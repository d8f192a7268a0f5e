"""``mpdp bench placements``: memory a rank, bytes sent and time of a step for each place of the optimizer's state.

The placements train the same model on the same data, in turns, a block each; a figure is the median of the blocks, a
ratio that of the ratios of blocks of one turn. Bytes sent are counted by a spy in the place of the communicator's calls
(``traffic``) during the first step, for the largest rank and all together; the ranks' state is read from the trainers.
On GPUs ``sharded in fit`` is the step that ``fit`` does, whose weights arrive beside the next forward pass.
"""

from __future__ import annotations

import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..parallel.placement import PLACEMENTS
from ..world import World, init
from . import turns
from .sides import OwnSide, Setting, largest, setting
from .traffic import Traffic
from .workloads import precision_of

BLOCKS, QUICK_BLOCKS = 5, 2
BLOCK_SECONDS, QUICK_SECONDS = 2.0, 0.2


class _PlacedSide(OwnSide):
    """Our step with one placement, whose first step is counted."""

    def __init__(self, world: World, setting: Setting) -> None:
        super().__init__(world, setting)
        self.name = setting.placement
        self.sent = 0

    def _first_step(self) -> None:
        with Traffic(self._comm) as traffic:
            super()._first_step()
        self.sent = traffic.sent["bulk"]


class _LateSide(_PlacedSide):
    """The same as ``fit`` does it: a step ends while its weights are under way."""

    def __init__(self, world: World, setting: Setting) -> None:
        super().__init__(world, setting)
        self.name += " in fit"

    def _steps(self, count: int) -> None:
        parallel = self.trainer.parallel
        parallel.gives_late = True
        super()._steps(count)
        parallel.gives_late = False
        parallel.arrive()


def run(
    workload: str,
    *,
    device: str,
    precision: str | None = None,
    batch: int | None = None,
    quick: bool = False,
    json_path: str | None = None,
) -> int:
    """Measure all placements; rank 0 prints a table and writes the JSON object. **Collective.**

    Args:
        workload: one of ``bench.WORKLOADS``.
        device: of the ranks.
        precision: default: ``workloads.precision_of``.
        batch: samples a rank (default: the workload's).
        quick: fewer and shorter blocks.
        json_path: file of the JSON object; ``-`` is stdout.

    Returns:
        the exit status.
    """
    world = init(device=device)
    chosen = precision or precision_of(workload, world.device.kind)
    what = setting(workload, world.device.kind, precision=chosen, batch=batch)
    result = measure(
        world, what, QUICK_BLOCKS if quick else BLOCKS, QUICK_SECONDS if quick else BLOCK_SECONDS
    )
    if world.rank == 0:
        lines = "\n".join(table(result))
        print(lines, file=sys.stderr if json_path == "-" else sys.stdout, flush=True)
        text = json.dumps(result)
        if json_path == "-":
            print(text, flush=True)
        elif json_path is not None:
            Path(json_path).write_text(text + "\n", encoding="utf-8")
    return 0


def measure(world: World, what: Setting, blocks: int, seconds: float) -> dict[str, Any]:
    """Return what each placement takes, as JSON-able data. **Collective.**"""
    comm = world.axis("data")
    sides = [_PlacedSide(world, setting_with(what, placement)) for placement in PLACEMENTS]
    if comm.size > 1 and comm.independent:
        sides.append(_LateSide(world, setting_with(what, "sharded")))
    for side in sides:
        world.log("info", f"bench: {side.name} prepares")
        side.prepare()

    def block(side: OwnSide, warm_up: int, count: int) -> float:
        return largest(comm, side.block(warm_up, count))

    steps = [turns.steps_of(seconds, block(side, 1, 1)) for side in sides]
    times = turns.alternate([partial(block, side) for side in sides], blocks, steps)
    rows = []
    for side, own in zip(sides, times):
        memory = side.trainer.memory()
        totals = np.array([side.sent, memory["optimizer"], memory["parameters"]], dtype=np.int64)
        most = totals.copy()
        comm.all_reduce(totals, lane="urgent")
        comm.all_reduce(most, op="max", lane="urgent")
        rows.append(
            {
                "placement": side.name,
                "step_us": statistics.median(own) * 1e6,
                "block_step_us": [value * 1e6 for value in own],
                "ratio": turns.ratio(own, times[0]),
                "sent_bytes": {"largest": int(most[0]), "mean": int(totals[0]) / world.size},
                "optimizer_bytes": {"largest": int(most[1]), "sum": int(totals[1])},
                "parameter_bytes": int(most[2]),
                "gradient_bytes": memory["gradients"],
            }
        )
    return {
        "workload": what.workload,
        "device": str(world.device),
        "ranks": world.size,
        "transport": world.transport,
        "precision": what.precision,
        "batch_per_rank": what.batch,
        "elements": sides[0].trainer.parallel.layout.trainable_size,
        "rows": rows,
    }


def setting_with(what: Setting, placement: str) -> Setting:
    """Return a setting with another placement. **Local.**"""
    return Setting(**{**vars(what), "placement": placement})


def table(result: dict[str, Any]) -> list[str]:
    """Return the lines that people read. **Local.**"""
    title = (
        f"{result['workload']} on {result['ranks']} x {result['device']} ({result['transport']}), "
        f"{result['precision']}, {result['elements']:,} parameters"
    )
    header = (
        f"{'placement':<15}{'step us':>10}{'ratio':>7}{'optimizer MB':>14}{'weights MB':>12}{'sent MB':>10}"
        f"{'sent MB, mean':>15}"
    )
    lines = [title, header]
    for row in result["rows"]:
        lines.append(
            f"{row['placement']:<15}{row['step_us']:>10,.0f}{row['ratio']:>7.2f}"
            f"{row['optimizer_bytes']['largest'] / 1e6:>14.2f}{row['parameter_bytes'] / 1e6:>12.2f}"
            f"{row['sent_bytes']['largest'] / 1e6:>10.2f}{row['sent_bytes']['mean'] / 1e6:>15.2f}"
        )
    return lines
