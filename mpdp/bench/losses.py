"""``mpdp bench train --losses``: the loss curve of the same weights and data in PyTorch and here.

PyTorch writes its initial weights, its data and the losses of N updates to a ``.npz`` file; we take up weights and
data, do as many updates, and compare. Neither side clips, since PyTorch's definition of a workload does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__, kernels, nn
from ..training import Trainer
from ..world import World
from .sides import Setting, start_peers
from .workloads import build

LIMITS = {"float32": 1e-4, "tf32": 1e-2, "bfloat16": 1e-2, "float16": 1e-2}
_CONVNET = {"0": "conv1", "2": "conv2", "6": "linear1", "8": "linear2"}
_GPT = (
    ("tok.", "tokens."),
    ("pos.", "positions."),
    (".qkv.", ".attention.qkv."),
    (".proj.", ".attention.projection."),
)


def updates(workload: str, precision: str) -> int:
    """Return how many updates a comparison has unless a number is asked for. **Local.**

    Example:
        >>> updates("mlp", "float32"), updates("gpt2", "float32"), updates("gpt2", "bfloat16")
        (50, 10, 50)
    """
    return 10 if precision == "float32" and workload != "mlp" else 50


def our_name(workload: str, name: str) -> str:
    """Return what the model of ``nn.models`` calls a parameter of the peer's. **Local.**

    Example:
        >>> our_name("gpt2", "blocks.3.proj.weight"), our_name("convnet", "6.bias"), our_name("mlp", "2.bias")
        ('blocks.3.attention.projection.weight', 'linear1.bias', '2.bias')
    """
    if workload == "convnet":
        return re.sub(r"^\d+", lambda match: _CONVNET.get(match[0], match[0]), name)
    if workload in ("chargpt", "gpt2"):
        for theirs, ours in _GPT:
            name = name.replace(theirs, ours)
    return name


def take_up(model: nn.Module, workload: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Set a model's parameters to those of the peer. **Local.**

    Raises:
        ValueError: a parameter is missing, left over or of another shape.
    """
    ours = dict(model.named_parameters())
    given = {our_name(workload, name): array for name, array in arrays.items()}
    if set(ours) != set(given):
        differing = ", ".join(sorted(set(ours) ^ set(given))[:5])
        raise ValueError(
            f"weights: expected the parameters of {workload}, got differences in {differing}; "
            "write the file with --peers torch"
        )
    for name, parameter in ours.items():
        if parameter.shape != given[name].shape:
            raise ValueError(
                f"weights: expected shape {parameter.shape} for {name}, got {given[name].shape}; "
                "write the file with --peers torch"
            )
        parameter.data = given[name].astype(np.float32)


def curve(world: World, setting: Setting, path: str | Path, count: int) -> tuple[list[float], list[float]]:
    """Return our losses and the peer's, of ``count`` updates from the weights in a file. **Collective**, on one rank.

    Raises:
        ValueError: the file holds other weights, or fewer losses.
    """
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    theirs = arrays.pop("losses", np.zeros(0)).tolist()
    if len(theirs) < count:
        raise ValueError(
            f"weights: expected {count} losses or more in {path}, got {len(theirs)}; write it with --peers torch"
        )
    x, y = arrays.pop("x"), arrays.pop("y")
    workload = build(setting.workload, world.rank, len(x), world.device.kind, setting.global_stats)
    take_up(workload.model, setting.workload, arrays)
    if setting.workload in ("chargpt", "gpt2"):
        y = y.reshape(x.shape)
    trainer = Trainer(
        workload.model,
        workload.loss,
        workload.optimizer,
        world=world,
        precision=setting.precision,
        graph=setting.graph,
        plans=setting.plans,
    )
    batch: tuple[Any, Any] = (kernels.move(x, world.device), kernels.move(y, world.device))
    return [float(trainer.step(batch)) for _ in range(count)], theirs[:count]


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest ``|a - b| / |b|``; NaN where a loss is not finite. **Local.**

    Example:
        >>> largest_difference([1.0, 2.2], [1.0, 2.0])  # doctest: +ELLIPSIS
        0.1...
    """
    a, b = np.array(ours, dtype=np.float64), np.array(theirs, dtype=np.float64)
    return float(np.max(np.abs(a - b) / np.abs(b)))


def compare(
    world: World, what: Setting, peers: Sequence[str], python: str | None, count: int, path: str | None
) -> dict[str, Any]:
    """Return how far our losses are from those of PyTorch from the same weights, as JSON-able data. **Collective.**

    Args:
        world: one rank.
        what: the workload.
        peers: if torch is among them, it writes the file first; of its modes those that are not captured.
        python: an interpreter that has torch (default: this one).
        count: of updates; 0 is the default number.
        path: of the file.

    Raises:
        ValueError: several ranks, no file, or a file that does not fit.
    """
    if world.size > 1:
        raise ValueError(f"losses: expected one rank, got {world.size}; start it without mpirun")
    if path is None:
        raise ValueError("losses: expected a file of weights, got none; pass --weights F.npz")
    count = count or updates(what.workload, what.precision)
    name = next((name for name in peers if name.startswith("torch")), None)
    version = None
    if name is not None:
        (side,) = start_peers(world, what, [name.removesuffix("-graph")], python)
        try:
            side.losses(count, str(path))
            version = side.version
        finally:
            side.close()
    ours, theirs = curve(world, what, path, count)
    difference = largest_difference(ours, theirs)
    limit = LIMITS[what.precision]
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
