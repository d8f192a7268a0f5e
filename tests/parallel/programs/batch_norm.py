"""Train networks with batch norm and write what came out: argv = case, folder. Each case says what it is for."""

import json
import sys
from pathlib import Path

import numpy as np

import mpdp
from mpdp import data, nn, optim


class Images(nn.Module):
    """Convolution, batch norm, pooling, and a batch norm of vectors; float64."""

    def __init__(self, **options):
        self.conv = nn.Conv2d(2, 3, 3, padding=1, dtype="float64")
        self.norm = nn.BatchNorm2d(3, dtype="float64", **options)
        self.pool = nn.MaxPool2d(2)
        self.first = nn.Linear(12, 5, dtype="float64")
        self.second = nn.BatchNorm1d(5, dtype="float64", **options)
        self.last = nn.Linear(5, 3, dtype="float64")

    def forward(self, x):
        x = self.pool(self.norm(self.conv(x)).relu())
        return self.last(self.second(self.first(x.reshape(x.shape[0], 12))).tanh())


class Pairs:
    """A data set of single samples, which tells nothing of their shape before one is read."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def samples(count):
    random = np.random.default_rng(4)
    x = 3.0 + random.standard_normal((count, 2, 4, 4)) * np.array([1.0, 5.0]).reshape(2, 1, 1)
    return x, random.integers(0, 3, count)


def plain_mean(output, target):
    """A loss without a count of its own: the mean over the samples that this rank has."""
    return nn.cross_entropy(output, target) + 0.0


# case: (samples, global batch, accumulate, loss, data set)
CASES = {
    "uneven": (29, 11, 1, nn.cross_entropy, data.ArrayDataset),
    "accumulate": (31, 13, 3, nn.cross_entropy, data.ArrayDataset),
    "fewer than ranks": (9, 3, 1, nn.cross_entropy, data.ArrayDataset),
    "one": (5, 2, 1, plain_mean, data.ArrayDataset),
    "single samples": (7, 2, 1, plain_mean, Pairs),
    "own loop": (10, 0, 3, nn.cross_entropy, None),
    "local": (29, 11, 2, nn.cross_entropy, data.ArrayDataset),
}


def own_loop(model, world):
    """Train by DataParallel on shares as unequal as can be, most of them empty; return the losses."""
    parallel = mpdp.DataParallel(model, world, chunk_bytes=1 << 12)
    optimizer = optim.SGD(lr=0.05, momentum=0.9)
    count, _, micro_batches, loss, _ = CASES["own loop"]
    x, y = samples(count)
    losses = []
    for step in range(6):
        for i in range(micro_batches):
            start, stop = (i * count) // micro_batches, ((i + 1) * count) // micro_batches
            holder = (step + i) % world.size
            # The holder has all samples but the last, which the next rank has; of one rank, it has all.
            cut = stop - 1 if world.size > 1 else stop
            part = slice(start, cut) if world.rank == holder else slice(0, 0)
            if world.size > 1 and world.rank == (holder + 1) % world.size:
                part = slice(cut, stop)
            output = parallel(x[part])
            parallel.backward(loss(output, y[part]), final=i + 1 == micro_batches)
        losses.append(parallel.step(optimizer))
        parallel.check_replicas()
    return losses


def main():
    case, folder = sys.argv[1], Path(sys.argv[2])
    world = mpdp.init(device="cpu", timeout=60)
    count, batch, accumulate, loss, kind = CASES[case]
    x, y = samples(count)
    mpdp.seed(2)
    model = Images(global_stats=case != "local")
    if case == "own loop":
        write(folder, world, model, own_loop(model, world), {})
        return
    losses = []

    class Watch(mpdp.Callback):
        def on_step(self, trainer):
            losses.append(trainer.loss)
            trainer.check_replicas()  # weights, moments, running statistics: every bit

    trainer = mpdp.Trainer(
        model,
        loss,
        optim.SGD(lr=0.05, momentum=0.9),
        precision="float64",
        accumulate=accumulate,
        chunk_bytes=1 << 12,
        callbacks=[Watch()],
    )
    trainer.fit(kind(x, y), epochs=4, global_batch_size=batch)
    result = trainer.evaluate(data.ArrayDataset(x, y), metrics=[nn.accuracy], global_batch_size=7)
    write(folder, world, model, losses, result)


def write(folder, world, model, losses, result):
    if world.rank == 0:
        np.savez(folder / f"n{world.size}.npz", **model.state_dict())
        (folder / f"n{world.size}.json").write_text(json.dumps({"losses": losses, "result": result}))


if __name__ == "__main__":
    main()
