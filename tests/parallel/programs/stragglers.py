"""A run whose rank 1 is slow: argv[1] says in what, argv[2] is its run folder."""

import sys
import time

import numpy as np

import mpdp
from mpdp import nn, optim

world = mpdp.init(timeout=20)
KIND = sys.argv[1]


class Samples:
    def __len__(self):
        return 24

    def __getitem__(self, index):
        if KIND == "data" and world.rank == 1:
            time.sleep(0.01)
        return np.ones(4, "float32"), index % 3


class Net(nn.Module):
    def __init__(self):
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        if KIND == "compute" and world.rank == 1:
            time.sleep(0.03)
        return self.layer(x)


trainer = mpdp.Trainer(Net(), nn.cross_entropy, optim.SGD(lr=0.1), run_dir=sys.argv[2])
trainer.fit(Samples(), epochs=3, global_batch_size=6)
