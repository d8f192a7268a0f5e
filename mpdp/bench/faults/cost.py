"""``mpdp bench faults --cost``: what the checks of a step cost, against a step without them.

Both are the step of one trainer, in turns. What is left out: the ring's heartbeats; the equality of calls, steps,
layouts, used parameters and rates (counts and losses are still added up); the notes of what a rank waits in; the look
for NaN; the comparison of replicas.
"""

from __future__ import annotations

import json
import statistics
import sys
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import numpy as np

from ... import __version__, guard
from ...comm.tuned import processor
from ...world import init
from ..sides import OwnSide, largest, setting
from ..turns import alternate, ratio, steps_of

BLOCKS, QUICK_BLOCKS = 81, 3
BLOCK_SECONDS, QUICK_SECONDS = 0.25, 0.1


class _Trusting:
    """Kernels that take every gradient for finite."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def all_finite(self, array: Any) -> bool:
        return True


class WithoutChecks:
    """While entered, this rank's steps check nothing. **Local.** Every rank enters it, between two steps.

    Args:
        trainer: of CPU ranks.
        ring: what watches over the ranks, or None.
    """

    def __init__(self, trainer: Any, ring: Any = None) -> None:
        self._parallel, self._ring = trainer.parallel, ring
        self._replica = trainer.parallel._replica
        self._kernels = self._replica.kernels
        self._sums = np.zeros(2)
        self._own: list[tuple[Any, str, Any]] = [
            (trainer, "check_replicas", lambda: None),
            (trainer.parallel, "_exchange_record", self._add_up),
            (trainer.parallel.comm, "_enter", lambda call, lane: None),
        ]

    def __enter__(self) -> None:
        for holder, name, function in self._own:
            getattr(holder, name)  # it is there under this name
            setattr(holder, name, function)
        self._replica.kernels = _Trusting(self._kernels)
        if self._ring is not None:
            self._ring.hold()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._ring is not None:
            self._ring.release()
        self._replica.kernels = self._kernels
        for holder, name, _ in self._own:
            delattr(holder, name)

    def _add_up(self, plan: Any, stop: bool) -> None:
        parallel = self._parallel
        self._sums[:] = parallel._count, parallel._loss_sum
        parallel.comm.all_reduce(self._sums, lane="urgent")
        parallel._used, parallel._agreed = None, tuple(self._sums.tolist())


class _Side(OwnSide):
    """Blocks of a trainer's steps, with or without checks."""

    checked = True

    def _kind_of_step(self) -> AbstractContextManager[None]:
        return nullcontext() if self.checked else WithoutChecks(self.trainer, guard.current.ring)


def run(quick: bool = False, json_path: str | None = None, workload: str = "mlp") -> int:
    """Measure, and print one line on rank 0. **Collective.**

    Returns:
        the exit status, 0.
    """
    world = init(device="cpu")
    comm = world.axis("data")
    side = _Side(world, setting(workload, "cpu", precision="float32"))
    side.prepare()

    def block(checked: bool) -> Any:
        def one(warm_up: int, steps: int) -> float:
            side.checked = checked
            return float(largest(comm, side.block(warm_up, steps)))

        return one

    blocks = [block(True), block(False)]
    once = blocks[0](1, 3)
    steps = steps_of(QUICK_SECONDS if quick else BLOCK_SECONDS, once)
    checked, unchecked = alternate(blocks, QUICK_BLOCKS if quick else BLOCKS, [steps, steps])
    cost = ratio(checked, unchecked) - 1
    result = {
        "workload": workload,
        "device": "cpu",
        "ranks": world.size,
        "step_us": 1e6 * statistics.median(checked),
        "unchecked_step_us": 1e6 * statistics.median(unchecked),
        "cost_percent": 100 * cost,
        "checked_blocks_us": [round(1e6 * s, 2) for s in checked],
        "unchecked_blocks_us": [round(1e6 * s, 2) for s in unchecked],
        "steps": steps[1],
        "transport": world.transport,
        "processor": processor(),
        "mpdp": __version__,
    }
    if world.rank == 0:
        line = (
            f"{workload}, {world.size} ranks: {result['step_us']:.1f} us a step, {result['unchecked_step_us']:.1f} us "
            f"without checks; they cost {100 * cost:.2f} % (median of {len(checked)} pairs of blocks)"
        )
        print(line, file=sys.stderr if json_path == "-" else sys.stdout, flush=True)
        if json_path == "-":
            print(json.dumps(result), flush=True)
        elif json_path is not None:
            with open(json_path, "w", encoding="utf-8") as file:
                file.write(json.dumps(result, indent=1) + "\n")
    return 0
