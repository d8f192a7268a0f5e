"""A job on a run folder where another one writes, until that gives way: argv[1] is the folder, argv[2] a word to it."""

import sys
import time
from pathlib import Path

import numpy as np
from launching import record

import mpdp
from mpdp import nn, optim

world = mpdp.init(device="cpu", timeout=20)
mpdp.seed(0)
t = mpdp.Trainer(nn.Linear(4, 3), nn.cross_entropy, optim.SGD(lr=0.1), run_dir=sys.argv[1])
batch = (np.ones((6, 4), "float32"), np.arange(6) % 3)
seen = []
for call in (lambda: t.step(batch), t.save):
    try:
        call()
    except ValueError as error:
        seen.append([str(error), t.step_count, world.size == 1 or error.agreed])
world.comm.barrier()
if world.rank == 0:
    Path(sys.argv[2]).touch()
while Path(sys.argv[2]).exists():
    time.sleep(0.05)
t.step(batch)
t.save()
record([seen, t.step_count, (Path(sys.argv[1]) / "lock").read_text()])
world.comm.barrier()  # rank 0, that holds it, is there until all have read it
