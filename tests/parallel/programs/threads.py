"""Train a small network and write the parameters: argv = folder, and what a rank does instead of the end."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import reference
from launching import fault as faulty

import mpdp
from mpdp import data, nn, optim

folder, fault = Path(sys.argv[1]), sys.argv[2]
world = mpdp.init(device="cpu", timeout=60)
assert __name__ == "__main__" and Path(__file__).name == "threads.py" and Path(sys.argv[0]) == Path(__file__)
x, y = reference.digits("float32")


class Fault(mpdp.Callback):
    def on_step(self, trainer):
        if trainer.step_count == 4 and fault == "stop" and world.rank == world.size - 1:
            trainer.should_stop = True
        if trainer.step_count == 4 and world.rank == 1:
            faulty()
            if fault == "raise":
                raise ValueError("a fault of rank 1")
            if fault == "exit":
                sys.exit(7)
            if fault == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(30)


trainer = mpdp.Trainer(
    nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 10)),
    nn.cross_entropy,
    optim.AdamW(lr=3e-3),
    clip_norm=0.5,
    accumulate=2,
    chunk_bytes=1 << 12,
    callbacks=[Fault()],
)
trainer.fit(data.ArrayDataset(x[:301].reshape(301, -1), y[:301]), updates=15, global_batch_size=53)
if world.rank == 0:
    np.savez(folder / f"{world.transport}-{world.size}.npz", *[p.numpy() for p in trainer.model.parameters()])
print(f"rank {world.rank} of {world.size} did {trainer.step_count}", flush=True)
