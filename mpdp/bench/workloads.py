"""The workloads that comparisons use: one definition for the product and for each peer.

Data are random and made once; these measure the training step, not the loader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import nn, optim


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


def build(name: str, rank: int, batch: int | None = None) -> Workload:
    """Return a workload with this rank's own random batch. **Local.**

    ``mlp``: 784-512-512-10 with ReLU and biases, 128 x 784 float32 a rank, cross-entropy, SGD with lr 0.01 and
    momentum 0.9.
    """
    if name != "mlp":
        raise ValueError(f"workload: expected mlp, got {name!r}")
    count = batch or 128
    random = np.random.default_rng(rank)
    x = random.standard_normal((count, 784), dtype=np.float32)
    y = random.integers(0, 10, count)
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return Workload(name, model, nn.cross_entropy, optim.SGD(lr=0.01, momentum=0.9), (x, y), count, "samples")
