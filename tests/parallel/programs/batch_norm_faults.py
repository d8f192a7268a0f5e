"""Jobs in which ranks do not agree about a batch norm: argv = fault."""

import os
import signal
import sys

import numpy as np
from launching import fault

import mpdp
from mpdp import nn, optim

FAULT = sys.argv[1]
world = mpdp.init(device="cpu", timeout=60)
last = world.rank == world.size - 1


class Branches(nn.Module):
    """Takes the one norm or the other, by its input."""

    def __init__(self):
        self.left, self.right, self.last = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x):
        norm = self.right if x[:1].sum() > 100 else self.left
        if FAULT == "kill" and trainer.step_count == 2 and last:
            fault()
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "raise" and trainer.step_count == 2 and last:
            fault()
            raise ValueError("a bad sample")
        return self.last(norm(x))


def no_rows(output, target):
    if len(output) == 0:
        raise ValueError("no rows")
    return nn.cross_entropy(output, target)


loss = no_rows if FAULT == "zero rows" else nn.cross_entropy
trainer = mpdp.Trainer(Branches(), loss, optim.SGD(lr=0.1), world=world)
rows = 0 if FAULT == "zero rows" and last else 6
x, y = (
    np.random.default_rng(world.rank).standard_normal((6, 4)).astype("float32")[:rows],
    np.zeros(rows, "int64"),
)
if FAULT == "branch" and last:
    x += 1000
if FAULT not in ("kill", "raise"):
    fault()
if FAULT == "no loss":
    trainer.parallel(x)
    trainer.parallel.backward(None if last else nn.cross_entropy(trainer.parallel(x), y))
for _ in range(6):
    trainer.step((x, y))
