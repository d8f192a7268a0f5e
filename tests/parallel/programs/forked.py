"""Every rank forks children that end as Python programs do, not by os._exit, and trains on."""

import os
import sys

import numpy as np

import mpdp
from mpdp import nn, optim

world = mpdp.init(timeout=20)
trainer = mpdp.Trainer(nn.Linear(4, 3), nn.cross_entropy, optim.SGD(lr=0.1))
batch = (np.ones((4, 4), "float32"), np.zeros(4, int))
for how in ("exit", "raise"):
    trainer.step(batch)
    child = os.fork()
    if child == 0:
        if how == "exit":
            sys.exit(5)
        raise ValueError("of the child")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (5 if how == "exit" else 1), status
trainer.step(batch)
print(f"rank {world.rank} of {world.size} finished", flush=True)
