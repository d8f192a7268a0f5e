"""A training in which the last rank fails as argv[1] says; argv[2] is a folder (kinds A, D1 and E of the reports)."""

import atexit
import os
import signal
import sys
from pathlib import Path

import numpy as np
from launching import fault, record

import mpdp
from mpdp import nn, optim
from mpdp.training import checkpoint

KIND, FOLDER = sys.argv[1], Path(sys.argv[2])
SAMPLES, BATCH, BAD_SAMPLE = 40, 8, 31  # sample 31 is the last rank's last one of update 3, in order
X = np.random.default_rng(0).standard_normal((SAMPLES, 4)).astype("float32")
Y = np.arange(SAMPLES) % 3


class Net(nn.Module):
    def __init__(self):
        announced = mpdp.guard.current.announcement
        if KIND == "constructor" and announced.rank == announced.size - 1:
            fault()
            raise ValueError("a bad width")
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)


class Samples:
    def __init__(self, bad=None, dtype="float32"):
        self.bad = bad
        self.x = X.astype(dtype)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        if i == self.bad:
            raise ValueError("a bad sample")
        return self.x[i], Y[i]


class Files:
    """One file a sample, in the reports' way."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return np.load(self.folder / f"{i}.npy"), Y[i]


class Fault(mpdp.Callback):
    def on_step(self, trainer):
        if KIND == "callback" and last and trainer.step_count == 3:
            raise ValueError("a bad callback")

    def on_epoch(self, trainer):
        if KIND == "clean_up":
            trainer.world.comm.barrier()
        if KIND == "vanished_file" and rank == 0:
            (FOLDER / "files" / "3.npy").unlink(missing_ok=True)


model = Net()
world = mpdp.init(timeout=20)
fault()  # it comes soon: what counts is not how long the start takes
rank, last = world.rank, world.rank == world.size - 1
if KIND == "before_trainer" and last:
    raise ValueError("a bad setting")
saves = KIND in ("clean_up", "vanished_file", "killed_save", "full_disk", "read_only", "unharmed")
trainer = mpdp.Trainer(
    model,
    nn.cross_entropy,
    optim.Adam(lr=0.1),
    run_dir=FOLDER / "run" if saves else None,
    save_every=1 if saves else None,
    callbacks=[Fault()],
)


def fit(dataset=None, epochs=2, **options):
    trainer.fit(dataset or Samples(), epochs=epochs, global_batch_size=BATCH, shuffle=False, **options)


class Evaluating:
    """A user's context that evaluates on its way out, as some programs do."""

    def __enter__(self):
        pass

    def __exit__(self, *_):
        trainer.evaluate(Samples())


def own_loop(until=5):
    for _ in range(until):
        trainer.step((X[:4], Y[:4]))


def out_of_memory():
    for step in range(5):
        try:
            if step == 2 and last:
                raise MemoryError("no room for this batch")
            parallel.backward(nn.cross_entropy(parallel(X[:4]), Y[:4]))
            parallel.step(optimizer)
        except MemoryError:
            continue


def caught_in_step():
    def loss(output, target):
        if trainer.step_count == 2 and last:
            raise MemoryError("no room for this batch")
        return nn.cross_entropy(output, target)

    trainer.eager.loss_function = loss
    for _ in range(5):
        try:
            trainer.step((X[:4], Y[:4]))
        except MemoryError:
            continue


if KIND == "getitem":
    fit(Samples(BAD_SAMPLE))
elif KIND == "evaluation":
    fit(validation=Samples(SAMPLES - 1))
elif KIND == "clean_up":
    atexit.register(world.comm.barrier)
    try:
        with Evaluating():
            fit(Samples(BAD_SAMPLE))
    finally:
        trainer.save()
elif KIND == "vanished_file":
    if rank == 0:
        (FOLDER / "files").mkdir()
        for i, row in enumerate(X):
            np.save(FOLDER / "files" / f"{i}.npy", row)
    world.comm.barrier()
    fit(Files(FOLDER / "files"), epochs=5)
elif KIND in ("return", "exit_0", "exit_3", "os_exit_0", "kill"):
    own_loop(2 if last else 5)
    if last and KIND != "return":
        {
            "exit_0": lambda: sys.exit(0),
            "exit_3": lambda: sys.exit(3),
            "os_exit_0": lambda: os._exit(0),
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        }[KIND]()
elif KIND == "uneven":
    own_loop(3 if last else 5)
    trainer.evaluate(Samples())
elif KIND == "out_of_memory":
    parallel, optimizer = mpdp.DataParallel(nn.Linear(4, 3)), optim.SGD(lr=0.1)
    out_of_memory()
elif KIND == "caught_in_step":
    caught_in_step()
elif KIND == "killed_save":
    # Rank 0 dies between the parts of its third checkpoint and the manifest.
    write, saved = checkpoint.save_file, []

    def save_file(*arguments):
        write(*arguments)
        saved.append(1)
        if len(saved) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save_file = save_file
    fit()
elif KIND == "unharmed":
    assert trainer.resume() is (os.environ.get("RESUMED") == "1")
    fit(Samples(dtype="float64"))
    if rank == 0:
        np.save(FOLDER / "weights.npy", trainer.parallel.weights)
else:
    if KIND == "full_disk":
        trainer.keep = 1000
    fit(epochs=1000 if KIND == "full_disk" else 2)
record(trainer.step_count)
