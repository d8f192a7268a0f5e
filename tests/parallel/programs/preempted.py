"""A training that signals come to: `preempted.py FOLDER [HOW]`.

HOW is `fit` (default), `step` (a loop of its own), `evaluate` (a long validation after update 4) or `save` (one
takes a second). When a signal may come the rank writes its process id to FOLDER/pids/RANK; rank 0 writes its weights
to FOLDER/weights.npy at the end.

RESUMED=1 resumes, and takes no time. DEVICE=cuda has each step a captured graph there. FAULTS="kill:12 raise:27" lets
the last rank die after update 12 of the first start and raise after update 27 of the second; with "lost" it dies before
it has joined the others.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from launching import record

import mpdp
from mpdp import data, nn, optim
from mpdp.launch import announced
from mpdp.training import checkpoint

FOLDER = Path(sys.argv[1])
HOW = sys.argv[2] if len(sys.argv) > 2 else "fit"
FAULTS = os.environ.get("FAULTS", "").split()
if (
    FAULTS
    and int(os.environ["MPDP_RESTART"]) < len(FAULTS)
    and FAULTS[int(os.environ["MPDP_RESTART"])] == "lost"
):
    there = announced(os.environ)
    if there.rank == there.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
DEVICE = os.environ.get("DEVICE", "cpu")
world = mpdp.init(device=DEVICE, timeout=20)
RESUMED = os.environ.get("RESUMED") == "1"
random = np.random.default_rng(0)
X = random.standard_normal((48, 6)).astype("float32")
Y = (X[:, 0] > 0).astype("int64")


def ready():
    folder = FOLDER / "pids"
    folder.mkdir(exist_ok=True)
    part = folder / f"{world.rank}.part"
    part.write_text(str(os.getpid()))
    part.replace(folder / str(world.rank))


class Slow(mpdp.Callback):
    def on_step(self, trainer):
        if FAULTS:
            fail(trainer.step_count)
        elif not RESUMED:
            if trainer.step_count == (40 if HOW == "save" else 3) and (
                HOW in ("fit", "step") or (HOW == "save" and world.rank)
            ):
                ready()
            time.sleep(0.03)

    def on_checkpoint(self, trainer, path):
        record(trainer.step_count, world.rank)  # threads are ranks of one process


def fail(step):
    restart = int(os.environ["MPDP_RESTART"])
    fault, _, when = FAULTS[restart].partition(":") if restart < len(FAULTS) else ("", "", "0")
    if step == int(when) and world.rank == world.size - 1:
        if fault == "raise":
            raise ValueError("a bad sample")
        os.kill(os.getpid(), signal.SIGTERM if fault == "term" else signal.SIGKILL)


class Validation:
    """Samples of which each takes a while to read."""

    def __len__(self):
        return 200

    def __getitem__(self, index):
        if not RESUMED and HOW == "evaluate":
            ready()
            time.sleep(0.1)
        return X[index % 16], Y[index % 16]


def slowly(temporary, writer, slices):
    if not RESUMED and int(temporary.name.split("-")[2]) >= 40:
        ready()
        time.sleep(1)
    return write(temporary, writer, slices)


write = checkpoint.write_part
if HOW == "save":
    checkpoint.write_part = slowly
mpdp.seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
trainer = mpdp.Trainer(
    model,
    nn.cross_entropy,
    optim.Adam(lr=1e-2),
    run_dir=FOLDER / "run",
    save_every=20,
    keep=100,
    callbacks=[Slow()],
    graph=True if DEVICE == "cuda" else "auto",
)
found = trainer.resume()
assert found or not RESUMED
dataset = data.ArrayDataset(X, Y)
if HOW == "step":
    while trainer.step_count < 60:
        start = trainer.step_count * 8 % 48
        here = slice(start + world.rank, start + 8, world.size)
        trainer.step((X[here], Y[here]))
else:
    validation = Validation() if HOW == "evaluate" else None
    trainer.fit(dataset, updates=60, global_batch_size=12, validation=validation)
if DEVICE == "cuda":
    assert trainer.updates.graphs.captures, "the steps did not run as graphs"
if world.rank == 0:
    np.save(FOLDER / "weights.npy", np.concatenate([p.numpy().ravel() for p in model.parameters()]))
record([trainer.step_count, world.size, int(os.environ.get("MPDP_RESTART", "-1"))], world.rank)
