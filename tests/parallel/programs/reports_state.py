"""What models and optimizers hold, against the reports of kinds C, D, E, G, J and M; argv[1] is the ranks' folder."""

import copy
import pickle
import sys
import time
from pathlib import Path

import numpy as np
from launching import record
from safetensors.numpy import load_file

import mpdp
from mpdp import autodiff, data, nn, optim

world = mpdp.init(timeout=20)
rank, size = world.rank, world.size
last = rank == size - 1
folder = Path(sys.argv[1])
CASES = []


def case(function):
    CASES.append(function)
    return function


def everywhere(values):
    """Return the rows of all ranks."""
    rows = np.zeros((size, *np.shape(values)))
    rows[rank] = values
    world.comm.all_reduce(rows.reshape(-1))
    return rows


def digits(count=32, features=6):
    random = np.random.default_rng(2)
    x = random.standard_normal((count, features)).astype("float32")
    return x, (x[:, 0] > 0).astype("int64")


@case
def statistics_of_plain_batch_norm_are_one_state():
    """C6: each rank normalises by its own share; evaluation and file have one mean of all, on every rank."""
    mpdp.seed(0)

    def build():
        return nn.Sequential(
            nn.Linear(6, 4), nn.BatchNorm1d(4, global_stats=False), nn.ReLU(), nn.Linear(4, 2)
        )

    run = mpdp.Trainer(build(), nn.cross_entropy, optim.SGD(lr=0.1), run_dir=folder / f"norm-{size}")
    x, y = digits()
    for step in range(3):  # data that depend on the rank: without care, each would have statistics of its own
        run.step((x[:8] + rank + step, y[:8]))
    run.check_replicas()
    run.save()
    model = run.model.eval()
    with mpdp.no_grad():
        output = model(x).data
    assert (everywhere(output) == output).all()
    tensors = load_file(next((folder / f"norm-{size}" / "checkpoints").glob("*/part-*.safetensors")))
    fresh = build()
    fresh.load_state_dict(
        {name.split("/", 1)[1]: a for name, a in tensors.items() if name.startswith(("w", "b"))}
    )
    with mpdp.no_grad():
        assert np.array_equal(fresh.eval()(x).data, output)


@case
def the_loss_scale_goes_on_where_it_was():
    """D5: the scale, and how many good updates it has seen."""

    def build(name):
        mpdp.seed(0)
        scale = optim.LossScale(initial=256.0, interval=4)
        options = {"precision": "float16", "loss_scale": scale, "run_dir": folder / f"{name}-{size}"}
        return mpdp.Trainer(nn.Linear(6, 2), nn.cross_entropy, optim.AdamW(lr=0.01), **options)

    x, y = digits(4)
    scales = []
    whole = build("whole")
    for _ in range(9):
        whole.step((x, y))
        scales.append(whole.parallel.loss_scale.value)
    assert scales[2] == scales[0] == 256 and 512 in scales and 1024 in scales
    first = build("stopped")
    for _ in range(3):
        first.step((x, y))
    first.save()
    second = build("stopped")
    assert second.resume() and second.step_count == 3
    for step in range(3, 9):
        second.step((x, y))
        assert second.parallel.loss_scale.value == scales[step], step
    assert np.array_equal(second.parallel.weights, whole.parallel.weights)


@case
def one_rank_prepares_and_the_others_wait():
    """E8: what one rank writes slowly is whole when the others read it."""
    path = folder / f"prepared-{size}.npy"
    if rank == 0:
        assert not path.exists()
        with path.open("wb") as file:
            time.sleep(0.3)
            np.save(file, np.arange(40.0, dtype="float32").reshape(20, 2))
    world.comm.barrier()
    dataset = data.ArrayDataset.from_npy(path, path)
    run = mpdp.Trainer(nn.Linear(2, 2), nn.mse, optim.SGD(lr=1e-4))
    assert run.fit(dataset, epochs=1, global_batch_size=7)[-1]["step"] == 3


@case
def models_with_batch_norm_can_be_copied():
    """G4: also behind a trainer, whose ranks the layer knows; names and shared layers stay."""
    shared = nn.BatchNorm1d(6)
    inner = nn.Sequential(shared, lambda x: x * 2.0, nn.Linear(6, 2))
    run = mpdp.Trainer(nn.Sequential(shared, nn.ReLU(), inner), nn.cross_entropy, optim.SGD(lr=0.1))
    x, y = digits()
    run.step((x, y))
    names = [name for name, _ in run.model.named_parameters()]
    twin = copy.deepcopy(run.model)
    assert twin[0] is twin[2][0] and [name for name, _ in twin.named_parameters()] == names
    assert all(
        not np.shares_memory(a.data, b.data) for a, b in zip(twin.parameters(), run.model.parameters())
    )
    plain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    run = mpdp.Trainer(plain, nn.cross_entropy, optim.SGD(lr=0.1))
    run.step((x, y))
    again = pickle.loads(pickle.dumps(run.model))
    with mpdp.no_grad():
        assert np.array_equal(again.eval()(x).data, run.model.eval()(x).data)
    own = mpdp.Trainer(again.train(), nn.cross_entropy, optim.SGD(lr=0.1))  # the copy trains by itself
    before = run.parallel.weights.copy()
    assert np.isfinite(float(own.step((x, y)))) and np.array_equal(run.parallel.weights, before)


class Limit(mpdp.Callback):
    """Stop after some seconds, by a clock that is fast on the last rank."""

    def __init__(self, seconds):
        self.end = time.monotonic() + seconds - (last * 2 * seconds)

    def on_step(self, trainer):
        if time.monotonic() > self.end:
            trainer.should_stop = True


@case
def all_ranks_stop_after_the_same_step():
    """J4: a limit that the clock of one rank alone has reached."""
    x, y = digits()
    run = mpdp.Trainer(nn.Linear(6, 2), nn.cross_entropy, optim.SGD(lr=0.1), callbacks=[Limit(10.0)])
    run.fit(data.ArrayDataset(x, y), epochs=100, global_batch_size=4)
    assert 0 < run.step_count < 100 and (everywhere(run.step_count) == run.step_count).all()
    run.check_replicas()


@case
def parameters_without_axes():
    """M1: of shape (), whose gradient is a sum down to one number."""

    class Scaled(nn.Module):
        def __init__(self):
            self.scale = autodiff.Parameter(np.array(1.0))
            self.shift = autodiff.Parameter(np.array(0.5))

        def forward(self, x):
            return x * self.scale + self.shift

    random = np.random.default_rng(7)
    x, t = random.standard_normal((2, 4 * size, 3))
    mine = slice(4 * rank, 4 * rank + 4)
    run = mpdp.Trainer(Scaled(), nn.mse, optim.SGD(lr=0.1, momentum=0.9), precision="float64")
    p, v = np.array([1.0, 0.5]), np.zeros(2)
    for _ in range(4):
        run.step((x[mine], t[mine]))
        error = 2 * (p[0] * x + p[1] - t) / x.size
        v = 0.9 * v + [(error * x).sum(), error.sum()]
        p = p - 0.1 * v
    model = run.model
    assert model.scale.shape == model.scale.data.shape == ()
    np.testing.assert_allclose([float(model.scale.data), float(model.shift.data)], p, rtol=1e-12)


for function in CASES:
    function()
    world.comm.barrier()
record([function.__name__ for function in CASES])
