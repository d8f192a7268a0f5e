"""The workloads that comparisons use: one definition for the product and for each peer.

Data are random and made once; these measure the training step, not the loader. The peers' twins of these are in
``peers/torch_models.py`` and ``peers/jax_train.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import nn, optim
from ..nn import models
from . import WORKLOADS as NAMES

_SAMPLES = {"mlp": (784,), "convnet": (1, 28, 28), "resnet50": (3, 224, 224)}
_BATCH = {"mlp": 128, "convnet": 64, "gpt2": 16, "resnet50": 256}


@dataclass(frozen=True)
class Workload:
    """A model, its loss and optimizer, and one rank's batch.

    Attributes:
        items: what a rank processes in a step, in ``unit``.
    """

    name: str
    model: nn.Module
    loss: Callable[[Any, Any], Any]
    optimizer: optim.Optimizer
    batch: tuple[Any, Any]
    items: int
    unit: str


def batch_of(name: str, device: str) -> int:
    """Return the samples of a rank on a kind of device. **Local.**

    Example:
        >>> batch_of("chargpt", "cpu"), batch_of("chargpt", "cuda"), batch_of("mlp", "cpu")
        (4, 64, 128)
    """
    return (4 if device == "cpu" else 64) if name == "chargpt" else _BATCH[name]


def precision_of(name: str, device: str) -> str:
    """Return the precision that a workload runs in unless one is asked for. **Local.**

    Example:
        >>> precision_of("mlp", "cuda"), precision_of("gpt2", "cuda"), precision_of("gpt2", "cpu")
        ('float32', 'bfloat16', 'float32')
    """
    return "bfloat16" if device == "cuda" and name != "mlp" else "float32"


def build(
    name: str, rank: int, batch: int | None = None, device: str = "cpu", global_stats: bool = False
) -> Workload:
    """Return a workload with this rank's own random batch. **Local.**

    ``mlp``: 784-512-512-10 with ReLU and biases, 128 x 784 float32 a rank, cross-entropy, SGD with lr 0.01 and
    momentum 0.9. ``convnet``: ``nn.models.convnet``, 64 images of 1 x 28 x 28 float32 a rank, trained likewise.
    ``resnet50``: ``nn.models.resnet50``, 256 images of 3 x 224 x 224 a rank, 1000 classes, trained likewise.
    ``chargpt``: a GPT of 6 layers, 384 wide, 6 heads, context 256, vocabulary 128, tied head, 64 sequences a rank on
    a GPU and 4 on the CPU, AdamW with lr 1e-4 and decay 0.01. ``gpt2``: the same with 12 layers, 768 wide, 12 heads,
    context 1024, vocabulary 50304, 16 sequences.

    Args:
        name: one of ``NAMES``.
        rank: this rank; it has data of its own.
        batch: samples (default: :func:`batch_of`).
        device: kind of the device.
        global_stats: whether batch norms take the statistics of all ranks; PyTorch's do not.

    Raises:
        ValueError: no workload of that name.
    """
    if name not in NAMES:
        raise ValueError(f"workload: expected one of {', '.join(NAMES)}, got {name!r}; choose one")
    random = np.random.default_rng(rank)
    count = batch or batch_of(name, device)
    data: tuple[Any, Any]
    if name in ("chargpt", "gpt2"):
        preset = models.transformer.PRESETS[name]
        context, vocabulary = preset["context"], preset["vocabulary"]
        tokens = random.integers(0, vocabulary, (2, count, context))
        data = tokens[0], tokens[1]
        adamw = optim.AdamW(lr=1e-4, weight_decay=0.01)
        return Workload(name, models.gpt(name), nn.cross_entropy, adamw, data, count * context, "tokens")
    model: nn.Module
    if name == "resnet50":
        model = models.resnet50(global_stats=global_stats)
    else:
        model = models.mlp() if name == "mlp" else models.convnet()
    classes = 1000 if name == "resnet50" else 10
    data = (
        random.standard_normal((count, *_SAMPLES[name]), dtype=np.float32),
        random.integers(0, classes, count),
    )
    unit = "images" if name == "resnet50" else "samples"
    return Workload(name, model, nn.cross_entropy, optim.SGD(lr=0.01, momentum=0.9), data, count, unit)
