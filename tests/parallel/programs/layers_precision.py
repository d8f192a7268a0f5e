"""A small convolutional network with every norm, trained in the precision that argv names; records its losses.

With `again` as the last word its first layers run again in backward.
"""

import sys

import numpy as np
from launching import record

import mpdp
from mpdp import nn, optim

SAMPLES = 10


def network():
    nn.seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 16),
        nn.RMSNorm(16),
        nn.Linear(16, 10),
    )


def main(precision, *words):
    world = mpdp.init()
    random = np.random.default_rng(0)
    x = random.standard_normal((SAMPLES, 1, 12, 12)).astype(np.float32)
    y = random.integers(0, 10, SAMPLES)
    model = network()
    if "again" in words:
        for layer in (model[0], model[1], model[4]):
            nn.checkpoint(layer)
    trainer = mpdp.Trainer(model, nn.cross_entropy, optim.SGD(lr=0.004), precision=precision)
    first = SAMPLES * world.rank // world.size
    last = SAMPLES * (world.rank + 1) // world.size
    losses = [trainer.step((x[first:last], y[first:last])) for _ in range(10)]
    trainer.parallel.check_replicas()
    statistics = trainer.model[1]
    record(
        {
            "losses": losses,
            "dtypes": sorted({str(p.data.dtype) for p in trainer.parallel.parameters.values()}),
            "running": [statistics.running_mean.data.tolist(), statistics.running_var.data.tolist()],
        }
    )


main(*sys.argv[1:])
