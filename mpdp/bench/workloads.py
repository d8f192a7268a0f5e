"""The workloads that comparisons use: one definition for the product and for each peer.

Data are random and made once; these measure the training step, not the loader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import nn, optim
from ..nn.models import GPT

NAMES = ("mlp", "chargpt")


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
    momentum 0.9. ``chargpt``: a GPT of 6 layers, 384 wide, 6 heads, context 256, vocabulary 128, tied head, 64
    sequences a rank on a GPU and 4 on the CPU, AdamW with lr 1e-4 and decay 0.01.

    Raises:
        ValueError: no workload of that name.
    """
    if name not in NAMES:
        raise ValueError(f"workload: expected one of {', '.join(NAMES)}, got {name!r}; choose one")
    random = np.random.default_rng(rank)
    data: tuple[Any, Any]
    if name == "mlp":
        count = batch or 128
        layers = [nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
        data = random.standard_normal((count, 784), dtype=np.float32), random.integers(0, 10, count)
        return Workload(
            name,
            nn.Sequential(*layers),
            nn.cross_entropy,
            optim.SGD(lr=0.01, momentum=0.9),
            data,
            count,
            "samples",
        )
    count, context = batch or (4 if device == "cpu" else 64), 256
    model = GPT(layers=6, width=384, heads=6, context=context, vocabulary=128)
    data = random.integers(0, 128, (count, context)), random.integers(0, 128, (count, context))
    return Workload(
        name,
        model,
        nn.cross_entropy,
        optim.AdamW(lr=1e-4, weight_decay=0.01),
        data,
        count * context,
        "tokens",
    )
