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
from . import arguments
from .calling import told
from .checkpoint import Slice
from .manifest import pack

if TYPE_CHECKING:
    from ..parallel.layout import Layout
    from .trainer import Trainer


def flats(trainer: Trainer) -> dict[str, Any]:
    """Return what lies over the trainable zone of the layout and belongs to the run's state, by its name. **Local.**"""
    optimizer = {f"optimizer/{slot}": flat for slot, flat in trainer.optimizer.state.items()}
    return {"weights": trainer.parallel.weights[: trainer.parallel.layout.trainable_size], **optimizer}


def written_ranges(trainer: Trainer) -> list[tuple[int, int]]:
    """Return the ranges of the trainable zone whose :func:`flats` this rank writes; those of all ranks cover it once.

    **Local.** With equal replicas rank 0 writes all.
    """
    rank = trainer.world.axis("data").rank
    return [(0, trainer.parallel.layout.trainable_size)] if rank == 0 else []


def put(flat: Any, start: int, values: Any) -> None:
    """Write the part of ``values``, from element ``start`` of the index space on, that this rank holds. **Local.**"""
    flat[start : start + len(values)] = values


def tensors(trainer: Trainer, copy: bool) -> list[Slice]:
    """Return what this rank writes, in host memory.

    **Local.** One pass over the memory.

    Args:
        trainer: whose state.
        copy: take a copy that later updates do not change; else only a GPU's arrays are copied.
    """
    parallel = trainer.parallel
    layout = parallel.layout
    found: list[Slice] = []
    ranges = written_ranges(trainer)
    for kind, flat in flats(trainer).items():
        for start, stop in ranges:
            found += cut(layout, kind, start, _on_host(flat[start:stop], copy))
    if trainer.world.axis("data").rank == 0:
        for kind, flat in flats(trainer).items():
            nothing = np.empty(0, np.dtype(str(flat.dtype)))
            empty = [entry for entry in layout.trainable if entry.start == entry.stop]
            found += [Slice(f"{kind}/{entry.name}", entry.shape, 0, nothing) for entry in empty]
        for entry in layout.entries[len(layout.trainable) :]:
            array = _on_host(parallel.weights[entry.start : entry.stop], copy)
            found.append(Slice(f"weights/{entry.name}", entry.shape, 0, array))
        for name, buffer in parallel.buffers.items():
            array = _on_host(buffer.data, copy)
            found.append(Slice(f"buffers/{name}", array.shape, 0, array))
    return found


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
    found = {
        "step": trainer.step_count,
        "position": trainer.position.state()
        | {"saved_step": trainer.step_count, "log_rows": trainer.folder.rows},
        "seed": trainer.seed,
        "exponent": parallel.exponent,
        "precision": trainer.precision,
        "loss_scale": None if parallel.loss_scale is None else parallel.loss_scale.state(),
        "schedule": schedule.state() if hasattr(schedule, "state") else None,
        "plans": kernels.for_device(trainer.world.device).plan_book.plans(),
        "optimizer": arguments.describe(optimizer),
        "slots": list(optimizer.slots),
        "updates": {
            entry.name: int(count) for entry, count in zip(parallel.layout.trainable, optimizer.updates)
        },
        "parameters": {
            name: [list(p.shape), str(p.dtype), bool(p.requires_grad)]
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
