"""What a checkpoint holds of a trainer: tensors by name, cut where ranks hold parts of them, and the rest as JSON.

Weights and optimizer state are read in ranges of the layout's index space: each rank gives what it is the one to write
(:func:`written_ranges`), so nothing here depends on the number of ranks or on where optimizer state lives. ``resuming``
is the way back.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import kernels
from ..comm.agreement import agree
from ..nn.models import describe_model
from ..optim.held import HeldArray
from ..parallel import averaging
from . import arguments
from .calling import told
from .checkpoint import Slice
from .manifest import pack

if TYPE_CHECKING:
    from ..parallel.layout import Layout
    from .trainer import Trainer


WHOLE = {"weights", "average"}  # these lie over the frozen zone too


def flats(trainer: Trainer) -> dict[str, Any]:
    """Return what lies over the layout and belongs to the run's state, by its name.

    **Local.** Arrays, or a HeldArray of the ranges that this rank has.
    """
    replica = trainer.parallel._replica
    found = {"weights": replica.weights}
    found |= {f"optimizer/{slot}": flat for slot, flat in trainer.optimizer.state.items()}
    if replica.average is not None and replica.average.started:
        found["average"] = replica.average.array
    return found


def in_parts(trainer: Trainer) -> bool:
    """Return whether ranks hold parts of the state; the same on all ranks. **Local.**"""
    return trainer.parallel._replica.placement.held is not None


def written_ranges(trainer: Trainer) -> list[tuple[int, int]]:
    """Return the ranges of the trainable zone whose :func:`flats` this rank writes; those of all ranks cover it once.

    **Local.** Each rank writes what it updates; of equal replicas rank 0 writes all.
    """
    held = trainer.parallel._replica.placement.held
    if held is None:
        rank = trainer.world.axis("data").rank
        return [(0, trainer.parallel.layout.trainable_size)] if rank == 0 else []
    joined: list[tuple[int, int]] = []
    for start, stop in held:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined


def tensors(trainer: Trainer, copy: bool, collect: bool = False) -> list[Slice]:
    """Return what this rank writes, in host memory.

    **Local**, or **Collective** with ``collect``. One pass over the memory.

    Args:
        trainer: whose state.
        copy: take a copy that later updates do not change; else only a GPU's arrays are copied.
        collect: rank 0 writes all, also what other ranks hold.
    """
    parallel = trainer.parallel
    layout, rank = parallel.layout, trainer.world.axis("data").rank
    found: list[Slice] = []
    if collect:
        for kind, full in _collected(trainer).items():
            found += [] if full is None else cut(layout, kind, 0, _on_host(full, copy))
    else:
        for kind, flat in flats(trainer).items():
            for start, stop in written_ranges(trainer):
                found += cut(layout, kind, start, _on_host(_part(flat, start, stop), copy))
    if rank:
        return found
    for kind, flat in flats(trainer).items():
        nothing = np.empty(0, np.dtype(str(flat.dtype)))
        empty = [entry for entry in layout.trainable if entry.start == entry.stop]
        found += [Slice(f"{kind}/{entry.name}", entry.shape, 0, nothing) for entry in empty]
    done = {piece.name for piece in found}
    for kind in WHOLE & flats(trainer).keys():
        for entry in layout.entries[len(layout.trainable) :]:
            if f"{kind}/{entry.name}" not in done:
                array = _on_host(flats(trainer)[kind][entry.start : entry.stop], copy)
                found.append(Slice(f"{kind}/{entry.name}", entry.shape, 0, array))
    for name, buffer in parallel.buffers.items():
        array = _on_host(buffer.data, copy)
        found.append(Slice(f"buffers/{name}", array.shape, 0, array))
    return found


def _collected(trainer: Trainer) -> dict[str, np.ndarray | None]:
    """Return on rank 0 the whole of what ranks hold parts of, by its name; None each elsewhere. **Collective.**"""
    replica = trainer.parallel._replica
    weights, slots = trainer.parallel.collect()
    found: dict[str, np.ndarray | None] = {"weights": weights}
    found |= {f"optimizer/{slot}": full for slot, full in slots.items()}
    return found | {"average": averaging.collect(replica)}


def _part(flat: Any, start: int, stop: int) -> Any:
    """Return elements of an array, or of a HeldArray, whose ranges lie one behind the other in its memory."""
    if not isinstance(flat, HeldArray):
        return flat[start:stop]
    place = sum(last - first for first, last in flat.ranges if last <= start)
    return flat.array[place : place + stop - start]


def cut(layout: Layout, kind: str, start: int, part: np.ndarray) -> list[Slice]:
    """Return the tensors, or pieces of them, that lie in a part of a flat array over the index space. **Local.**"""
    found = []
    stop = start + len(part)
    for entry in layout.entries:
        first, last = max(start, entry.start), min(stop, entry.stop)
        if first < last:
            piece = part[first - start : last - start]
            found.append(Slice(f"{kind}/{entry.name}", entry.shape, first - entry.start, piece))
    return found


def _on_host(array: Any, copy: bool) -> np.ndarray:
    host: np.ndarray = kernels.of(array).to_numpy(array)
    return np.array(host) if copy and host is array else np.ascontiguousarray(host).reshape(host.shape)


def state(trainer: Trainer) -> tuple[dict[str, Any], list[Slice]]:
    """Return the rest of the run's state for the manifest, and the arrays of its callbacks.

    **Collective**, since a callback's ``state_dict`` may be.

    Raises:
        TypeError: a callback's state that a checkpoint cannot hold, on all ranks.
    """
    arrays: dict[str, np.ndarray] = {}
    callbacks = _callbacks(trainer, arrays)
    parallel, optimizer, schedule = trainer.parallel, trainer.optimizer, trainer.schedule
    average = parallel._replica.average
    found = {
        "step": trainer.step_count,
        "position": trainer.position.state()
        | {"saved_step": trainer.step_count, "log_rows": trainer.folder.rows},
        "seed": trainer.seed,
        "exponent": parallel.exponent,
        "precision": trainer.precision,
        "loss_scale": None if parallel.loss_scale is None else parallel.loss_scale.state(),
        "schedule": schedule.state() if hasattr(schedule, "state") else None,
        "average": average is not None and average.started,
        "ema": None if average is None else average.decay,
        "plans": kernels.for_device(trainer.world.device).plan_book.plans(),
        "optimizer": arguments.describe(optimizer),
        "slots": list(optimizer.slots),
        "updates": {
            entry.name: int(count) for entry, count in zip(parallel.layout.trainable, optimizer.updates)
        },
        "parameters": {
            name: [list(p.shape), str(parallel.precision.master), bool(p.requires_grad)]
            for name, p in parallel.parameters.items()
        },
        "buffers": {name: [list(b.shape), str(b.dtype)] for name, b in parallel.buffers.items()},
        "accumulate": trainer.accumulate,
        "world_size": trainer.world.size,
        "model": describe_model(trainer.model),
        "keep_best": None if trainer.keep_best is None else [trainer.keep_best, trainer.best_mode],
    }
    packed = pack(found, "checkpoint", arrays, "state") | {"callbacks": callbacks}
    return packed, [Slice(name, array.shape, 0, array) for name, array in arrays.items()]


def _callbacks(trainer: Trainer, arrays: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    found, wrong = [], None
    for i, callback in enumerate(trainer.callbacks):
        own = None
        if hasattr(callback, "state_dict"):  # it need not be derived from Callback
            with told(callback, "state_dict", trainer):
                own = callback.state_dict()
            try:
                own = pack(own, f"{type(callback).__name__}.state_dict", arrays, f"callbacks/{i}")
            except TypeError as error:
                wrong = wrong or error
        found.append({"class": type(callback).__qualname__, "state": own})
    agree(trainer.world.axis("data"), wrong)
    return found


def metrics(trainer: Trainer) -> dict[str, float]:
    """Return the finite numbers of the epoch that has just been closed; none in the middle of one. **Local.**"""
    position = trainer.position
    rows = position.history
    if position.batch or not rows or rows[-1]["step"] != trainer.step_count:
        return {}
    return {
        name: float(value)
        for name, value in rows[-1].items()
        if name not in ("epoch", "step") and math.isfinite(value)
    }
