"""Train one small network in several ways and write the weights and losses of each: argv = file to write (.npz)."""

import sys
import tempfile
from pathlib import Path

import numpy as np

import mpdp
from mpdp import data, nn, optim

world = mpdp.init(timeout=20)
random = np.random.default_rng(0)
X = random.standard_normal((101, 40)).astype("float32")
Y = random.integers(0, 5, 101)
ARRAYS = data.ArrayDataset(X, Y)
PAIRS = list(zip(X, Y))


class Watch(mpdp.Callback):
    def __init__(self):
        self.losses = []

    def on_step(self, trainer):
        self.losses.append(trainer.loss)


def train(dataset=ARRAYS, calls=(3,), validation=None, **options):
    """Return the weights and losses of three epochs, done in one call of fit for each end in ``calls``."""
    mpdp.seed(1)
    model = nn.Sequential(
        nn.Linear(40, 300), nn.LayerNorm(300), nn.ReLU(), nn.Dropout(0.2), nn.Linear(300, 5)
    )
    watch = Watch()
    trainer = mpdp.Trainer(
        model,
        nn.cross_entropy,
        optim.SGD(lr=0.05, momentum=0.9, weight_decay=1e-3),
        schedule=optim.WarmupCosine(3, 20),
        clip_norm=1.0,
        seed=7,
        callbacks=[watch],
        **options,
    )
    for epochs in calls:
        trainer.fit(dataset, epochs=epochs, global_batch_size=32, validation=validation)
    trainer.check_replicas()
    return np.concatenate([p.data.reshape(-1) for p in model.parameters()]), np.array(watch.losses)


with tempfile.TemporaryDirectory() as folder:
    # Ranks write nothing there but rank 0, so each may have a folder of its own.
    ways = {
        "plain": {},
        "again": {},
        "chunk_bytes": {"chunk_bytes": 1},
        "accumulate": {"accumulate": 3},
        "validation": {"validation": ARRAYS},
        "run_dir": {"run_dir": Path(folder) / "run", "save_every": 2},
        "pairs": {"dataset": PAIRS},
        "calls": {"calls": (1, 2, 3)},
    }
    results = {name: train(**options) for name, options in ways.items()}
if world.rank == 0:
    arrays = {f"{name} weights": weights for name, (weights, _) in results.items()}
    arrays |= {f"{name} losses": losses for name, (_, losses) in results.items()}
    np.savez(sys.argv[1], **arrays)
