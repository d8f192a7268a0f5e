"""Rank 1 brings a label out of range to the third update."""

import numpy as np

import mpdp
from mpdp import nn, optim

world = mpdp.init(device="cuda", timeout=60)
trainer = mpdp.Trainer(nn.Linear(4, 3), nn.cross_entropy, optim.SGD(lr=0.1))
for step in range(4):
    y = np.array([0, 1, 2])
    if step == 2 and world.rank == 1:
        y[1] = 7
    trainer.step((np.ones((3, 4), dtype="float32"), y))
