"""The workloads that comparisons use: one definition for the product and for each peer.

Data are random and made once; these measure the training step, not the loader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import nn, optim
from ..nn import models

NAMES = ("mlp", "convnet", "chargpt")


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


def build(name: str, rank: int, batch: int | None = None, device: str = "cpu") -> Workload:
    """Return a workload with this rank's own random batch. **Local.**

    ``mlp``: 784-512-512-10 with ReLU and biases, 128 x 784 float32 a rank, cross-entropy, SGD with lr 0.01 and
    momentum 0.9. ``convnet``: ``nn.models.convnet``, 64 images of 1 x 28 x 28 float32 a rank, trained likewise.
    ``chargpt``: a GPT of 6 layers, 384 wide, 6 heads, context 256, vocabulary 128, tied head, 64 sequences a rank on
    a GPU and 4 on the CPU, AdamW with lr 1e-4 and decay 0.01.

    Raises:
        ValueError: no workload of that name.
    """
    if name not in NAMES:
        raise ValueError(f"workload: expected one of {', '.join(NAMES)}, got {name!r}; choose one")
    random = np.random.default_rng(rank)
    data: tuple[Any, Any]
    if name == "chargpt":
        count, context = batch or (4 if device == "cpu" else 64), 256
        data = random.integers(0, 128, (count, context)), random.integers(0, 128, (count, context))
        optimizer: optim.Optimizer = optim.AdamW(lr=1e-4, weight_decay=0.01)
        return Workload(
            name, models.gpt("chargpt"), nn.cross_entropy, optimizer, data, count * context, "tokens"
        )
    count, sample = (batch or 128, (784,)) if name == "mlp" else (batch or 64, (1, 28, 28))
    model: nn.Module = models.mlp() if name == "mlp" else models.convnet()
    data = random.standard_normal((count, *sample), dtype=np.float32), random.integers(0, 10, count)
    optimizer = optim.SGD(lr=0.01, momentum=0.9)
    return Workload(name, model, nn.cross_entropy, optimizer, data, count, "samples")
