"""Save at every update, resume from each: argv = "save" | "resume", folder, size and device that saved, device.

The uninterrupted run records what each update saw and its weights; a resumed run must repeat both.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

import mpdp
from mpdp import data, nn, optim

mode, folder, saved_size, saved_device, device = (
    sys.argv[1],
    Path(sys.argv[2]),
    int(sys.argv[3]),
    *sys.argv[4:6],
)
PLACEMENT = os.environ.get("PLACEMENT", "replicated")
world = mpdp.init(device=device, timeout=60)
N, BATCH, EPOCHS = 10, 4, 3
UPDATES = EPOCHS * -(-N // BATCH)
random = np.random.default_rng(0)
X, Y = random.standard_normal((N, 6)).astype("float32"), random.integers(0, 3, N)
VALIDATION = data.ArrayDataset(X[:5], Y[:5])


class Noted:
    """A data set that notes which samples were taken."""

    def __init__(self):
        self.taken = []

    def __len__(self):
        return N

    def __getitem__(self, i):
        self.taken.append(int(i))
        return X[i], Y[i]


class Watch(mpdp.Callback):
    def __init__(self):
        self.losses = {}

    def on_step(self, trainer):
        self.losses[trainer.step_count] = trainer.loss


def run(run_dir, path=None, resume=True):
    mpdp.seed(0)
    dataset, watch = Noted(), Watch()
    model = nn.Sequential(nn.Linear(6, 1000), nn.ReLU(), nn.Dropout(0.3), nn.Linear(1000, 3))
    trainer = mpdp.Trainer(
        model,
        nn.cross_entropy,
        optim.Adam(lr=0.01),
        schedule=optim.WarmupCosine(2, UPDATES),
        accumulate=2,
        clip_norm=1.0,
        seed=5,
        placement=PLACEMENT,
        run_dir=run_dir,
        save_every=1,
        keep=100,
        callbacks=[watch],
    )
    if resume:
        assert trainer.resume(path)
    start = trainer.step_count
    history = trainer.fit(
        dataset, epochs=EPOCHS, global_batch_size=BATCH, validation=VALIDATION, metrics=[nn.accuracy]
    )
    # Which samples this rank took depends on its share; all ranks together take each once.
    taken = np.zeros(N, dtype=np.int64)
    np.add.at(taken, np.array(dataset.taken, dtype=int), 1)
    world.comm.all_reduce(taken)
    return {
        "start": start,
        "losses": watch.losses,
        "history": history,
        "taken": taken.tolist(),
        "params": [p.numpy().tobytes().hex() for p in model.parameters()],
        "state": {k: v.tobytes().hex() for k, v in trainer.optimizer.state_arrays().items()},
        "updates": trainer.optimizer.updates.tolist(),
    }


def close(a, b):
    return np.allclose(a, b, rtol=1e-5, atol=1e-7)


def off(a, b):
    """Return how far two arrays differ, as a part of the largest magnitude in the second."""
    return float(np.max(np.abs(np.subtract(a, b, dtype=float))) / np.max(np.abs(b)))


if mode == "save":
    result = run(folder / "run", resume=False)
    if world.rank == 0:
        (folder / "whole.json").write_text(json.dumps(result))
        log = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
        assert [row["step"] for row in log if row["kind"] == "step"] == list(range(1, UPDATES + 1))
else:
    whole = json.loads((folder / "whole.json").read_text())
    exact = world.size == saved_size and device == saved_device
    order = [data.Order(N, 5, epoch, True).indices(0, N) for epoch in range(EPOCHS)]
    for path in sorted((folder / "run" / "checkpoints").iterdir()):
        step = int(path.name.split("-")[1])
        # Only rank 0 is told where it lies: the others have nothing to read.
        result = run(
            folder / f"resumed-n{world.size}-{path.name}", path if world.rank == 0 else "/nonexistent"
        )
        assert result["start"] == step
        left = {int(k): v for k, v in whole["losses"].items() if int(k) > step}
        assert result["losses"].keys() == left.keys()
        expected = np.zeros(N, dtype=np.int64)
        for update in range(step, UPDATES):
            epoch, batch = divmod(update, -(-N // BATCH))
            np.add.at(expected, order[epoch][batch * BATCH : (batch + 1) * BATCH], 1)
        assert result["taken"] == expected.tolist(), (step, result["taken"], expected)
        assert result["updates"] == whole["updates"]
        if exact:
            same_ranges = os.environ.get("SAVED_PLACEMENT", PLACEMENT) == PLACEMENT
            whole_ranges = same_ranges and (world.rank == 0 or PLACEMENT == "replicated")
            for key in ("params", "history", *(["state"] if whole_ranges else [])):
                assert result[key] == whole[key], (step, key)
            assert result["losses"] == left
        else:
            assert close(list(result["losses"].values()), list(left.values()))
            for both in zip(result["params"], whole["params"]):
                a, b = (np.frombuffer(bytes.fromhex(h), dtype="float32") for h in both)
                if device == saved_device:
                    assert close(a, b)
                else:  # as of float32 in test_exactness; Adam magnifies roundings where a gradient nearly cancels
                    assert off(a, b) <= 1e-4, (step, off(a, b))
            assert [r["accuracy"] for r in result["history"]] == [r["accuracy"] for r in whole["history"]]
    # A finished run has nothing left to do, and says so.
    result = run(folder / f"again-n{world.size}", path)
    assert result["start"] == UPDATES and result["losses"] == {}
if world.rank == 0:
    print(f"{mode} passed at n={world.size}", flush=True)
