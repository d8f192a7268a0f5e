"""Data of this script, read by workers beside MPI; argv[1] says what happens, argv[2] is a folder."""

import os
import sys
from pathlib import Path

import numpy as np
from launching import fault, record

import mpdp
from mpdp import data, nn, optim

KIND, FOLDER = sys.argv[1], Path(sys.argv[2])


class Samples:
    """Samples of the script itself."""

    def __len__(self):
        return 37

    def __getitem__(self, index):
        if KIND == "worker killed" and index == 17:
            os.kill(os.getpid(), 9)
        if KIND == "sample" and index == 17:
            raise ValueError("a bad sample")
        return np.array([index, index % 5, index % 7, 1.0], "float32"), index % 3


class Marks(Samples):
    """Samples that say who has read them."""

    def __getitem__(self, index):
        return np.array([os.environ.get("MPDP_LOADER_WORKER") == "1", "mpi4py" in sys.modules])


def augment(sample, random):
    return sample[0] * random.uniform(0.5, 1.5), sample[1]


class Watch(mpdp.Callback):
    def on_step(self, trainer):
        if KIND == "rank killed" and trainer.step_count == 2 and trainer.world.rank == trainer.world.size - 1:
            os.kill(os.getpid(), 9)


def main():
    world = mpdp.init(timeout=20)
    fault()
    mpdp.seed(0)
    trainer = mpdp.Trainer(nn.Linear(4, 3), nn.cross_entropy, optim.SGD(lr=1e-3), callbacks=[Watch()])
    if KIND == "listing":
        names = ["a", "b"] if world.rank == 0 else ["a", "b", "c"]
        for i in names:
            folder = FOLDER / str(world.rank) / "cat"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{i}.png").write_bytes(b"")
        trainer.fit(data.ImageFolder(FOLDER / str(world.rank)), epochs=1, global_batch_size=2)
    samples = data.Transform(Samples(), augment, random=True)
    read = (
        samples
        if KIND == "none"
        else data.Workers(samples, 2, kind="threads" if KIND == "threads" else "processes")
    )
    history = trainer.fit(read, epochs=2, global_batch_size=10, validation=read, metrics=[nn.accuracy])
    outputs = trainer.predict(data.Workers(Samples(), 1))
    assert len(outputs) == 37
    marks = data.take(
        data.Workers(Marks(), 2, kind="threads" if KIND == "threads" else "processes"), np.arange(4)
    )
    in_worker, with_mpi = marks.all(axis=0)
    record([history, float(np.abs(trainer.model.weight.data).sum()), bool(in_worker), bool(with_mpi)])


if __name__ == "__main__" or KIND == "unguarded":
    main()
