"""Taking a checkpoint up again, on any number of ranks.

One rank reads and decides; the others get what it decided and the bytes themselves, so a checkpoint needs to be visible
to rank 0 only, and a directory that one node does not see yet cannot send ranks different ways. What a checkpoint says
is checked before anything is changed. ``snapshot`` is the way there.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import kernels
from ..autodiff import Tensor
from ..comm.agreement import on_root
from ..comm.base import Communicator
from ..errors import CheckpointError
from ..parallel import averaging
from ..parallel.record import Kind, exchange
from . import checkpoint, snapshot
from .calling import told
from .manifest import dtype_of, unpack
from .position import Position

if TYPE_CHECKING:
    from .trainer import Trainer


def resume(trainer: Trainer, path: Path | None) -> bool:
    """Take up the newest complete checkpoint of the run folder, or the one at ``path``. **Collective.**"""
    comm = trainer.world.axis("data")
    exchange(comm, Kind.RESUME, trainer.step_count)
    trainer.saves.finish()

    def find() -> tuple[Any, list[str]]:
        taken: tuple[checkpoint.Checkpoint, dict[str, np.ndarray]] | None
        reasons: list[str] = []
        if path is None:
            taken, reasons = checkpoint.newest(trainer.folder.checkpoints)
        else:
            found = checkpoint.read(path)
            taken = found, checkpoint.load(found)
        if taken is not None:
            check(trainer, taken[0].path, taken[0].state, taken[1])
        return taken, reasons

    result = on_root(comm, find)
    found, reasons = result if result is not None else (None, [])
    for reason in reasons:
        trainer.world.log("warning", f"resume: passed over a checkpoint: {reason}")
    text = json.dumps(None if found is None else found[0].state).encode()
    state = json.loads(comm.broadcast_bytes(text if comm.rank == 0 else None))
    if state is None:
        return False
    _restore(trainer, state, found[1] if found is not None else None)
    return True


def check(trainer: Trainer, path: Path, state: dict[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Refuse a checkpoint that is not of this model and trainer, or whose state is not as mpdp writes it.

    **Local.** Nothing is changed.

    Raises:
        CheckpointError: with all differences.
    """
    try:
        problems = _differences(trainer, state)
        if not problems:
            problems = _missing(trainer, state, tensors)
            _try_out(trainer, unpack(state, tensors))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {path}: expected the state of a run as mpdp writes it, got another "
            f"({type(error).__name__}: {error}); nothing was loaded"
        ) from error
    if problems:
        raise CheckpointError(
            f"checkpoint: expected one of the same model and trainer, got {len(problems)} differences: "
            f"{'; '.join(problems)}; nothing was loaded"
        )


def _differences(trainer: Trainer, state: dict[str, Any]) -> list[str]:
    """Return in what a checkpoint and this trainer differ."""
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
    return problems


def _missing(trainer: Trainer, state: dict[str, Any], tensors: Mapping[str, np.ndarray]) -> list[str]:
    """Return which tensors are not there, or not in the form that the state says."""
    kinds = _dtypes(trainer, state)
    expected = {
        f"{kind}/{name}": (tuple(shape), dtype)
        for kind, dtype in kinds.items()
        for name, (shape, _, trainable) in state["parameters"].items()
        if trainable or kind in snapshot.WHOLE
    }
    for name, (shape, dtype) in state["buffers"].items():
        expected[f"buffers/{name}"] = tuple(shape), dtype_of(dtype)
    return [
        f"tensor {name} is not {dtype}{list(shape)} there"
        for name, (shape, dtype) in expected.items()
        if name not in tensors or (tensors[name].shape, tensors[name].dtype) != (shape, dtype)
    ]


def _dtypes(trainer: Trainer, state: Mapping[str, Any]) -> dict[str, np.dtype]:
    """Return the dtype of what this trainer takes up, by its name."""
    master = trainer.parallel.precision.master
    found = {"weights": master}
    found |= {f"optimizer/{slot}": flat.dtype for slot, flat in trainer.optimizer.state.items()}
    if state.get("average") is True and trainer.parallel._replica.average is not None:
        found["average"] = master
    return {kind: np.dtype(str(dtype)) for kind, dtype in found.items()}


def _try_out(trainer: Trainer, state: dict[str, Any]) -> None:
    """Raise what taking up the state would raise, while nothing is changed."""
    Position.of(state["position"])
    for number in (state["step"], state["exponent"], *state["updates"].values()):
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**62:
            raise ValueError(f"expected counts of 0 or more, got {number!r}")
    if state["exponent"] > 1023:
        raise ValueError(f"exponent is {state['exponent']}")
    trainable = [name for name, stored in state["parameters"].items() if stored[2]]
    if not all(isinstance(stored[2], bool) for stored in state["parameters"].values()) or not set(
        trainable
    ) <= set(state["updates"]):
        raise ValueError("updates or trainable flags of parameters are missing")
    if trainer.parallel.loss_scale is not None and state.get("loss_scale") is not None:
        copy.deepcopy(trainer.parallel.loss_scale).load_state(state["loss_scale"])
    if hasattr(trainer.schedule, "load_state"):
        with contextlib.suppress(ValueError):  # that of another schedule is left out
            copy.deepcopy(trainer.schedule).load_state(state.get("schedule"))
    for name, plan in state.get("plans", {}).items():
        if not isinstance(name, str) or not isinstance(plan, str):
            raise ValueError(f"plan {name!r} is {plan!r}")
    for stored in state.get("callbacks", []):
        stored["class"], stored["state"]


def _restore(trainer: Trainer, state: dict[str, Any], tensors: dict[str, np.ndarray] | None) -> None:
    """Put the state in place: tensors are read on rank 0 and broadcast. **Collective.**"""
    parallel, optimizer, comm = trainer.parallel, trainer.optimizer, trainer.world.axis("data")
    flags = {name: stored[2] for name, stored in state["parameters"].items()}
    changed = [name for name, flag in flags.items() if parallel.parameters[name].requires_grad != flag]
    if changed:
        parallel.thaw(*[name for name in changed if flags[name]])
        parallel.freeze(*[name for name in changed if not flags[name]])
    layout = parallel.layout
    on_device = kernels.for_device(trainer.world.device)
    whole: dict[str, np.ndarray | None] = dict.fromkeys(_dtypes(trainer, state))
    if tensors is not None:
        for kind, dtype in _dtypes(trainer, state).items():
            entries = layout.entries if kind in snapshot.WHOLE else layout.trainable
            full = whole[kind] = np.zeros(
                layout.size if kind in snapshot.WHOLE else layout.trainable_size, dtype
            )
            for entry in entries:
                layout.view(full, entry.name)[...] = tensors[f"{kind}/{entry.name}"]
        for name, buffer in parallel.buffers.items():
            buffer.data[...] = on_device.from_host(tensors[f"buffers/{name}"])
    parallel.load(whole["weights"], {slot: whole[f"optimizer/{slot}"] for slot in optimizer.slots})
    _restore_average(trainer, bool(state.get("average")), whole.get("average"))
    state = unpack(state, _small_arrays(comm, tensors))
    updates = np.array([state["updates"][entry.name] for entry in layout.trainable], dtype=np.int64)
    optimizer.load_state_arrays({**optimizer.state_arrays(), "updates": updates})
    parallel.step_count = trainer.world.activity.step = state["step"]
    parallel.exponent = state["exponent"]
    if parallel.loss_scale is not None and state.get("loss_scale") is not None:
        parallel.loss_scale.load_state(state["loss_scale"])
    _restore_schedule(trainer, state.get("schedule"))
    if state["step"] > 0:  # the products of all later steps are computed as they were going to be
        trainer.updates.time_plans(False)
        on_device.plan_book.load(state.get("plans", {}))
    if state["precision"] != trainer.precision:
        trainer.world.log(
            "info",
            f'resume: the checkpoint is of a run with precision="{state["precision"]}", going on with '
            f'"{trainer.precision}": weights and optimizer state are the same {parallel.precision.master} numbers',
        )
    trainer.position = Position.of(state["position"])
    _restore_callbacks(trainer, state.get("callbacks", []))


def _restore_schedule(trainer: Trainer, state: Any) -> None:
    """Take up what the schedule has learnt, unless the program's is another one now. **Local.**"""
    schedule: Any = trainer.schedule
    if not hasattr(schedule, "load_state"):
        return
    try:
        schedule.load_state(state)
    except ValueError as error:
        schedule.load_state(None)
        trainer.world.log("warning", f"resume: what the schedule had learnt is left out: {error}")


def _restore_average(trainer: Trainer, held: bool, whole: np.ndarray | None) -> None:
    """Take up the average of weights, which rank 0 has. **Collective.**"""
    replica = trainer.parallel._replica
    if replica.average is None:
        if held:
            trainer.world.log(
                "info", "resume: the checkpoint's average of weights is left out; ema= would take it"
            )
        return
    replica.average.started = False
    if held:
        averaging.load(replica, whole)
    else:
        trainer.world.log("info", "resume: the checkpoint has no average of weights; it starts from them")


def _small_arrays(comm: Communicator, tensors: dict[str, np.ndarray] | None) -> dict[str, np.ndarray]:
    """Give all ranks the arrays that stand in the state, as those of callbacks. **Collective.**"""
    arrays = {
        name: array for name, array in (tensors or {}).items() if name.startswith(("callbacks/", "state/"))
    }
    forms = [[name, array.dtype.name, array.shape] for name, array in arrays.items()]
    text = json.dumps(forms).encode() if comm.rank == 0 else None
    found = {}
    for name, dtype, shape in json.loads(comm.broadcast_bytes(text)):
        data = comm.broadcast_bytes(arrays[name].tobytes() if comm.rank == 0 else None)
        found[name] = np.frombuffer(data, dtype_of(dtype)).reshape(shape).copy()
    return found


def _restore_callbacks(trainer: Trainer, stored: list[dict[str, Any]]) -> None:
    """Hand each callback what it gave when the checkpoint was saved: the k-th of a class to the k-th of it."""
    left = [entry for entry in stored if entry["state"] is not None]
    for callback in trainer.callbacks:
        name = type(callback).__qualname__
        mine = next((entry for entry in stored if entry["class"] == name), None)
        if mine is None:
            continue
        stored = [entry for entry in stored if entry is not mine]
        if mine["state"] is not None and hasattr(callback, "load_state_dict"):
            left = [entry for entry in left if entry is not mine]
            with told(callback, "load_state_dict", trainer):
                callback.load_state_dict(mine["state"])
    for entry in left:
        trainer.world.log(
            "warning",
            f"resume: the checkpoint holds state of a callback {entry['class']} that this run has not",
        )
