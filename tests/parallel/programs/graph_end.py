"""A program of one's own whose last update fails, as graphs: `graph_end.py cuda|cpu kept|dropped`.

It asks for no loss, so nobody looks at that update before the program is at its end. On a GPU rank 1 brings a label out
of range, on the CPU, which would see that at once, a number that is not finite.
"""

import gc
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from called_again import capture

import mpdp
from mpdp import nn, optim

mode, what = sys.argv[1:]
world = mpdp.init(device=mode, timeout=60)
trainer = mpdp.Trainer(nn.Linear(4, 3), nn.cross_entropy, optim.SGD(lr=0.1), graph=mode == "cuda")
if mode == "cpu":
    capture(trainer)
for step in range(6):
    x, y = np.ones((3, 4), dtype="float32"), np.array([0, 1, 2])
    if step == 5 and world.rank == world.size - 1:
        if mode == "cuda":
            y[1] = 7
        else:
            x[0] = np.nan
    trainer.step((x, y))
assert trainer.updates.graphs.captures and trainer.updates.graphs.under_way
if what == "dropped":
    del trainer
    gc.collect()
print("at the end")
