"""A run of 12 updates that may be killed at one of them: argv = folder, then "job STEP MOMENT RANK MODE" or a driver.

``job`` is one start of the run, which goes on where it can, and which ends itself by SIGKILL: after update STEP and
before it is saved ("step"), when the part is on the disk and the manifest is not ("part"), or when it is whole
("saved"); STEP 0 lives. MODE is "waits" or "background". Without a launcher, ``every`` starts such runs in forked
processes, for each update and moment, and ``random`` kills one that does nothing but save, at random moments.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

import mpdp
from mpdp import data, nn, optim
from mpdp.training import checkpoint

FOLDER, WHAT = Path(sys.argv[1]), sys.argv[2]
DEVICE = os.environ.get("KILLED_DEVICE", "cpu")
N, BATCH, EPOCHS = 22, 6, 3  # the last batch of an epoch is short
UPDATES = EPOCHS * -(-N // BATCH)
assert UPDATES == 12
generator = np.random.default_rng(0)
X, LABELS = generator.standard_normal((N, 6)).astype("float32"), generator.integers(0, 3, N)


def die():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


class Fault(mpdp.Callback):
    """Notes which samples each update saw, and ends the process where it is told to."""

    def __init__(self, step, moment, rank, note):
        self.step, self.moment, self.rank, self.note = step, moment, rank, note
        self.ids = []

    def loss(self, output, target):  # the targets are the samples' numbers
        self.ids += target.tolist()
        return nn.cross_entropy(output, LABELS[target])

    def on_step(self, trainer):
        row = {"step": trainer.step_count, "ids": self.ids, "loss": trainer.loss}
        with open(self.note, "a") as file:
            file.write(json.dumps(row) + "\n")
        self.ids = []
        if trainer.step_count == self.step and trainer.world.rank == self.rank:
            if self.moment == "step":
                die()
            own = checkpoint.save_file

            def save_file(arrays, path):
                own(arrays, path)
                if self.moment == "part":
                    die()

            checkpoint.save_file = save_file

    def on_checkpoint(self, trainer, path):
        saved = int(path.name.split("-")[1])
        if saved == self.step and self.moment == "saved" and trainer.world.rank == self.rank:
            die()


def train(run, step=0, moment="step", rank=0, mode="waits"):
    """Go on with the run in a folder; return what it is at its end."""
    mpdp.seed(0)
    world = mpdp.init(device=DEVICE, timeout=20)
    run.mkdir(parents=True, exist_ok=True)
    fault = Fault(step, moment, rank, run.parent / f"{run.name}-{world.rank}.jsonl")
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    # On a GPU the steps are graphs, in which a loss cannot look at the samples.
    loss, targets = (fault.loss, np.arange(N)) if DEVICE == "cpu" else (nn.cross_entropy, LABELS)
    trainer = mpdp.Trainer(
        model, loss, optim.Adam(lr=0.01), schedule=optim.WarmupCosine(2, UPDATES), accumulate=2, clip_norm=1.0,
        seed=5, run_dir=run, save_every=1, async_save=mode == "background", callbacks=[fault],
    )  # fmt: skip
    found = trainer.resume()
    start = trainer.step_count
    assert found == (start > 0)
    trainer.fit(data.ArrayDataset(X, targets), epochs=EPOCHS, global_batch_size=BATCH, progress=False)
    assert step == 0, "it should have been killed"
    return {
        "weights": [parameter.numpy().tobytes().hex() for parameter in model.parameters()],
        "state": {name: flat.tobytes().hex() for name, flat in trainer.optimizer.state.items()},
        "history": trainer.history,
        "log": logged(run) if world.rank == 0 else None,
    }


def logged(run):
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [[row["kind"], row["epoch"], row["step"], row["loss"]] for row in rows if "epoch" in row]


def noted(run, rank=0):
    return [json.loads(line) for line in (run.parent / f"{run.name}-{rank}.jsonl").read_text().splitlines()]


def check_notes(run, whole, rank=0):
    """Every update of a run that was stopped and resumed saw what it saw in the one that was not."""
    expected = {row["step"]: row for row in noted(whole, rank)}
    rows = noted(run, rank)
    assert {row["step"] for row in rows} == set(expected) == set(range(1, UPDATES + 1))
    other = [(row, expected[row["step"]]) for row in rows if row != expected[row["step"]]]
    assert not other, other


def forked(call):
    """Run something in a forked process; return its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call()
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def every(mode):
    def run_to_the_end(run):
        (run.parent / f"{run.name}.json").write_text(json.dumps(train(run, mode=mode)))

    whole = FOLDER / "whole"
    assert forked(lambda: run_to_the_end(whole)) == 0
    kills = 0
    for step in range(1, UPDATES + 1):
        for moment in ("step", "part", "saved"):
            run = FOLDER / f"{moment}-{step}"
            assert forked(lambda: train(run, step, moment, 0, mode)) == -signal.SIGKILL  # noqa: B023
            kills += 1
            assert forked(lambda: run_to_the_end(run)) == 0  # noqa: B023
            check_notes(run, whole)
            assert json.loads((FOLDER / f"{run.name}.json").read_text()) == json.loads(
                (FOLDER / "whole.json").read_text()
            )
    print(f"{kills} kills, each resumed to the same bits")


def save_for_ever(run):
    """Save in the background, again and again, weights that are the number of the save."""
    model = nn.Linear(300, 700)
    trainer = mpdp.Trainer(model, nn.cross_entropy, optim.Adam(lr=0.1), run_dir=run, keep=2)
    trainer.resume()
    number = int(model.bias.data[0]) if (run / "checkpoints").exists() else 0
    while True:
        number += 1
        for parameter in model.parameters():
            parameter.data[...] = number
        trainer.save(wait=False)


def names(run):
    folder = run / "checkpoints"
    return [path.name for path in folder.glob("step-*")] if folder.exists() else []


def at_random(times):
    chance = random.Random(time.time_ns())
    last, run = 0, FOLDER / "run"
    for _ in range(times):
        child = os.fork()
        if child == 0:
            save_for_ever(run)
        before, deadline = names(run), time.monotonic() + 20
        while names(run) == before:  # until it has saved once, however busy the machine is
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found, reasons = checkpoint.newest(run / "checkpoints")
        assert found is not None and reasons == []
        tensors = found[1]
        number = int(tensors["weights/bias"][0])
        assert number > last and all((tensors[f"weights/{n}"] == number).all() for n in ("weight", "bias"))
        last = number
    print(f"{times} kills during {last} saves, the newest was whole each time")


if WHAT == "job":
    step, moment, rank, mode = int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), sys.argv[6]
    result = train(FOLDER / "run", step, moment, rank, mode)
    for rank in range(mpdp.init().size):
        if (FOLDER / "whole").exists() and rank == mpdp.init().rank:
            check_notes(FOLDER / "run", FOLDER / "whole" / "run", rank)
    if mpdp.init().rank == 0:
        (FOLDER / "run.json").write_text(json.dumps(result))
elif WHAT == "every":
    every(sys.argv[3])
else:
    at_random(int(sys.argv[3]))
