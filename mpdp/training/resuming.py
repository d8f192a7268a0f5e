"""Saving a trainer's state and taking it up again, on any number of ranks.

One rank reads and decides; the others get what it decided and the bytes themselves, so a checkpoint needs to be visible
to rank 0 only, and a directory that one node does not see yet cannot send ranks different ways.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import kernels
from ..autodiff import Tensor
from ..comm.agreement import agree, on_root
from ..errors import CheckpointError
from ..optim import Schedule
from ..parallel import averaging
from ..parallel.record import Kind, exchange
from . import arguments, checkpoint
from .position import Position

if TYPE_CHECKING:
    from .trainer import Trainer


def save(trainer: Trainer) -> Path:
    """Write a checkpoint and return its directory. **Collective.**"""
    comm = trainer.world.axis("data")
    root = trainer.folder.checkpoints
    tensors = _tensors(trainer)

    def write() -> Path:
        try:
            trainer.folder.flush()
        except OSError as error:
            raise CheckpointError(
                f"checkpoint: expected to write the log of {root.parent}, got {error}; free or mend the disk"
            ) from error
        path = checkpoint.write(root, trainer.step_count, tensors, _state(trainer))
        try:
            checkpoint.prune(root, trainer.keep)
        except OSError as error:
            trainer.world.log("warning", f"save: an old checkpoint stays, it could not be removed: {error}")
        return path

    path = on_root(comm, write)
    return Path(os.fsdecode(comm.broadcast_bytes(None if path is None else os.fsencode(path))))


def resume(trainer: Trainer, path: Path | None) -> bool:
    """Take up the newest complete checkpoint of the run folder, or the one at ``path``. **Collective.**"""
    comm = trainer.world.axis("data")
    exchange(comm, Kind.RESUME, trainer.step_count)

    def find() -> tuple[Any, list[str]]:
        if path is not None:
            found = checkpoint.read(path)
            return (found, checkpoint.load(found)), []
        return checkpoint.newest(trainer.folder.checkpoints)

    result = on_root(comm, find)
    found, reasons = result if result is not None else (None, [])
    for reason in reasons:
        trainer.world.log("warning", f"resume: passed over a checkpoint: {reason}")
    text = json.dumps(None if found is None else found[0].state).encode()
    state = json.loads(comm.broadcast_bytes(text if comm.rank == 0 else None))
    if state is None:
        return False
    agree(comm, _misfit(trainer, state))
    _restore(trainer, state, found[1] if found is not None else None)
    return True


def _tensors(trainer: Trainer) -> dict[str, np.ndarray]:
    """Return the state's arrays by name on rank 0, each parameter once; nothing elsewhere. **Collective.**"""
    parallel = trainer.parallel
    weights, state = parallel.collect()
    average = averaging.collect(parallel._replica)
    if weights is None:
        return {}
    layout = parallel.layout
    tensors = {f"weights/{name}": layout.view(weights, name) for name in parallel.parameters}
    for slot, flat in state.items():
        for entry in layout.trainable:
            tensors[f"optimizer/{slot}/{entry.name}"] = layout.view(flat, entry.name)
    host = kernels.for_device(trainer.world.device).to_numpy
    for name, buffer in parallel.buffers.items():
        tensors[f"buffers/{name}"] = host(buffer.data)
    if average is not None:
        tensors |= {f"average/{name}": layout.view(average, name) for name in parallel.parameters}
    return tensors


def _state(trainer: Trainer) -> dict[str, Any]:
    parallel = trainer.parallel
    return {
        "step": trainer.step_count,
        "position": trainer.position.state()
        | {"saved_step": trainer.step_count, "log_rows": trainer.folder.rows},
        "seed": trainer.seed,
        "exponent": parallel.exponent,
        "precision": trainer.precision,
        "loss_scale": None if parallel.loss_scale is None else parallel.loss_scale.state(),
        "average": parallel._replica.average is not None and parallel._replica.average.started,
        "schedule": trainer.schedule.state() if isinstance(trainer.schedule, Schedule) else None,
        "plans": kernels.for_device(trainer.world.device).plan_book.plans(),
        "optimizer": arguments.describe(trainer.optimizer),
        "slots": list(trainer.optimizer.slots),
        "updates": {
            entry.name: int(count)
            for entry, count in zip(parallel.layout.trainable, trainer.optimizer.updates)
        },
        "parameters": {
            name: [list(p.shape), str(parallel.precision.master), bool(p.requires_grad)]
            for name, p in parallel.parameters.items()
        },
        "buffers": {name: [list(b.shape), str(b.dtype)] for name, b in parallel.buffers.items()},
        "accumulate": trainer.accumulate,
        "world_size": trainer.world.size,
    }


def _misfit(trainer: Trainer, state: dict[str, Any]) -> CheckpointError | None:
    """Return the error that lists all differences between a checkpoint and this trainer, or None."""
    problems = []
    held: dict[str, Mapping[str, Tensor]] = {
        "parameter": trainer.parallel.parameters,
        "buffer": trainer.parallel.buffers,
    }
    for kind, tensors in held.items():
        stored = state[f"{kind}s"]
        problems += [f"missing {kind} {name}" for name in tensors if name not in stored]
        problems += [f"unexpected {kind} {name}" for name in stored if name not in tensors]
        for name, tensor in tensors.items():
            dtype = trainer.parallel.precision.master if kind == "parameter" else tensor.dtype
            mine = [list(tensor.shape), str(dtype)]
            if name in stored and stored[name][:2] != mine:
                problems.append(
                    f"{kind} {name} is {stored[name][1]}{stored[name][0]} there, {mine[1]}{mine[0]} here"
                )
    for what, number in (("seed", trainer.seed), ("accumulate", trainer.accumulate)):
        if state[what] != number:
            problems.append(f"{what} is {state[what]} there, {number} here")
    there, here = state["optimizer"].get("class"), trainer.optimizer.describe().get("class")
    if there != here:
        problems.append(f"optimizer is {there} there, {here} here")
    if state["slots"] != list(trainer.optimizer.slots):
        problems.append(f"optimizer keeps {state['slots']} there, {list(trainer.optimizer.slots)} here")
    if not problems:
        return None
    return CheckpointError(
        f"checkpoint: expected one of the same model and trainer, got {len(problems)} differences: "
        f"{'; '.join(problems)}; nothing was loaded"
    )


def _restore(trainer: Trainer, state: dict[str, Any], tensors: dict[str, np.ndarray] | None) -> None:
    """Put the state in place: tensors are read on rank 0 and broadcast into the arenas. **Collective.**"""
    parallel, optimizer = trainer.parallel, trainer.optimizer
    flags = {name: stored[2] for name, stored in state["parameters"].items()}
    changed = [name for name, flag in flags.items() if parallel.parameters[name].requires_grad != flag]
    if changed:
        parallel.thaw(*[name for name in changed if flags[name]])
        parallel.freeze(*[name for name in changed if not flags[name]])
    layout = parallel.layout
    weights = None
    slots: dict[str, np.ndarray | None] = dict.fromkeys(optimizer.slots)
    if tensors is not None:
        weights = np.zeros(layout.size, parallel.precision.master)
        for name in parallel.parameters:
            layout.view(weights, name)[...] = tensors[f"weights/{name}"]
        for slot in slots:
            full = slots[slot] = np.zeros(layout.trainable_size, optimizer.state[slot].dtype)
            for entry in layout.trainable:
                layout.view(full, entry.name)[...] = tensors[f"optimizer/{slot}/{entry.name}"]
        there = kernels.for_device(trainer.world.device).from_host
        for name, buffer in parallel.buffers.items():
            buffer.data[...] = there(tensors[f"buffers/{name}"])
    parallel.load(weights, slots)
    _restore_average(trainer, bool(state.get("average")), tensors)
    updates = np.array([state["updates"][entry.name] for entry in layout.trainable], dtype=np.int64)
    optimizer.load_state_arrays({**optimizer.state_arrays(), "updates": updates})
    parallel.step_count = trainer.world.activity.step = state["step"]
    parallel.exponent = state["exponent"]
    if parallel.loss_scale is not None and state.get("loss_scale") is not None:
        parallel.loss_scale.load_state(state["loss_scale"])
    if isinstance(trainer.schedule, Schedule):
        _restore_schedule(trainer, trainer.schedule, state.get("schedule"))
    if state["step"] > 0:  # the products of all later steps are computed as they were going to be
        trainer.updates.time_plans(False)
        kernels.for_device(trainer.world.device).plan_book.load(state.get("plans", {}))
    if state["precision"] != trainer.precision:
        trainer.world.log(
            "info",
            f'resume: the checkpoint is of a run with precision="{state["precision"]}", going on with '
            f'"{trainer.precision}": weights and optimizer state are the same {parallel.precision.master} numbers',
        )
    trainer.position = Position(**state["position"])


def _restore_schedule(trainer: Trainer, schedule: Schedule, state: Any) -> None:
    """Take up what the schedule has learnt, unless the program's is another one now. **Local.**"""
    try:
        schedule.load_state(state)
    except ValueError as error:
        schedule.load_state(None)
        trainer.world.log("warning", f"resume: what the schedule had learnt is left out: {error}")


def _restore_average(trainer: Trainer, held: bool, tensors: dict[str, np.ndarray] | None) -> None:
    """Take up the average of weights, read on rank 0. **Collective.**"""
    replica = trainer.parallel._replica
    if replica.average is None:
        if held:
            trainer.world.log(
                "info", "resume: the checkpoint's average of weights is left out; ema= would take it"
            )
        return
    replica.average.started = False
    if not held:
        trainer.world.log("info", "resume: the checkpoint has no average of weights; it starts from them")
        return
    whole = None
    if tensors is not None:
        whole = np.zeros(replica.layout.size, replica.dtype)
        for name in replica.parameters:
            replica.layout.view(whole, name)[...] = tensors[f"average/{name}"]
    averaging.load(replica, whole)
