"""Optimizers, clipping, averages and schedules at any n, each against a float64 formula on the whole batch."""

import tempfile

import numpy as np

import mpdp
from mpdp import autodiff, data, nn, optim
from mpdp.errors import DisagreementError

world = mpdp.init(device="cpu", timeout=30)
rank, size = world.rank, world.size
random = np.random.default_rng(6)
X, Y = random.standard_normal((26, 4)), random.integers(0, 3, 26)
START = {"weight": random.standard_normal((3, 4)), "bias": random.standard_normal(3)}


def bounds(total, r=rank):
    """Shares as unequal as can be; the first is empty."""
    cuts = np.floor(np.cumsum([0, *range(size)]) * total / max(1, size * (size - 1) // 2)).astype(int)
    return (0, total) if size == 1 else (int(cuts[r]), int(cuts[r + 1]))


def model_of(dtype="float64"):
    model = nn.Linear(4, 3, dtype=dtype)
    for name, parameter in model.named_parameters():
        parameter.data = START[name].astype(dtype)
    return model


def close(found, expected, tolerance=1e-11):
    error = np.abs(np.asarray(found, float) - expected).max() / np.abs(expected).max()
    assert error <= tolerance, f"relative difference {error}"


def same_on_all_ranks(value):
    texts = world.comm.all_gather_bytes(repr(value).encode())
    assert len(set(texts)) == 1, texts
    return value


def gradients(p, x, y):
    """Of the mean cross-entropy of x @ weight.T + bias."""
    z = x @ p["weight"].T + p["bias"]
    e = np.exp(z - z.max(1, keepdims=True))
    e /= e.sum(1, keepdims=True)
    e[np.arange(len(y)), y] -= 1
    return {"weight": e.T @ x / len(y), "bias": e.sum(0) / len(y)}


def lamb(p, g, state, t, lr, name):
    state[name] = m, v = [b * a + (1 - b) * d for b, a, d in zip((0.9, 0.99), state[name], (g, g * g))]
    decay = 0.0 if name == "bias" else 0.2
    u = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-6) + decay * p
    return p - lr * np.linalg.norm(p) / np.linalg.norm(u) * u


def lion(p, g, state, t, lr, name):
    m = state[name][0]
    decay = 0.0 if name == "bias" else 0.2
    state[name][0] = 0.99 * m + 0.01 * g
    return p - lr * (np.sign(0.9 * m + 0.1 * g) + decay * p)


GROUPS = [optim.Group("bias", weight_decay=0.0)]
RULES = {
    lamb: lambda: optim.LAMB(lr=0.05, betas=(0.9, 0.99), weight_decay=0.2, groups=GROUPS),
    lion: lambda: optim.Lion(lr=0.02, betas=(0.9, 0.99), weight_decay=0.2, groups=GROUPS),
}


def rules_average_and_clipping_equal_their_formulas():
    """Unequal shares and micro-batches; the norm is clipped first, then elements, then decay acts."""
    clip_norm, clip_value, ema = 0.6, 0.1, 0.7
    for rule, make in RULES.items():
        trainer = mpdp.Trainer(
            model_of(), nn.cross_entropy, make(), precision="float64", accumulate=2, ema=ema,
            clip_norm=clip_norm, clip_value=clip_value, schedule=optim.Warmup(2, optim.StepLR(2, gamma=0.5)),
        )  # fmt: skip
        p = {name: value.copy() for name, value in START.items()}
        state, average = {name: [0.0, 0.0] for name in p}, dict(p)
        start, stop = bounds(len(Y))
        for t, factor in enumerate([0.5, 1.0, 1.0, 1.0, 0.5], start=1):
            trainer.step((X[start:stop], Y[start:stop]))
            g = gradients(p, X, Y)
            norm = np.sqrt(sum((d**2).sum() for d in g.values()))
            g = {
                n: np.clip(d * min(1, clip_norm / (norm + 1e-6)), -clip_value, clip_value)
                for n, d in g.items()
            }
            p = {n: rule(p[n], g[n], state, t, trainer.optimizer.lr * factor, n) for n in p}
            average = {n: ema * average[n] + (1 - ema) * p[n] for n in p}
            for name, parameter in trainer.parallel.parameters.items():
                close(parameter.data, p[name])
        with trainer.averaged():
            for name, parameter in trainer.parallel.parameters.items():
                close(parameter.data, average[name])
        trainer.check_replicas()


class Branches(nn.Module):
    """`one` is used on the last rank only, `none` nowhere."""

    def __init__(self):
        self.all = autodiff.Parameter(np.full((4, 300), 0.5))
        self.one = autodiff.Parameter(np.full((4, 300), 0.25))
        self.none = autodiff.Parameter(np.full((4, 5000), 2.0))

    def forward(self, x):
        out = (x @ self.all).sum(axis=1)
        return out + (x @ self.one).sum(axis=1) if rank == size - 1 else out


def parameters_that_few_ranks_use():
    """LAMB's norms are of a parameter's own gradient, wherever that comes from."""
    trainer = mpdp.Trainer(
        Branches(), lambda output, _: (output.sum(), len(output)), optim.LAMB(lr=0.1, weight_decay=0.0),
        precision="float64",
    )  # fmt: skip
    start, stop = bounds(26)
    before = {name: p.data.copy() for name, p in trainer.parallel.parameters.items()}
    trainer.step((X[start:stop], Y[start:stop]))
    own = bounds(26, size - 1)
    expected = {"all": X.sum(0) / 26, "one": X[own[0] : own[1]].sum(0) / 26}
    for name, parameter in trainer.parallel.parameters.items():
        if name == "none":
            assert (parameter.data == before[name]).all()
            continue
        g = np.repeat(expected[name][:, None], 300, axis=1)
        u = g / (np.abs(g) + 1e-6)  # the first step of Adam
        ratio = np.linalg.norm(before[name]) / np.linalg.norm(u)
        close(parameter.data, before[name] - 0.1 * ratio * u)
    trainer.check_replicas()


class Rates(mpdp.Callback):
    def __init__(self):
        self.rates = []

    def on_step(self, trainer):
        self.rates.append(trainer.last_lr)


def a_plateau_is_seen_alike_and_survives_a_restart():
    def trainer_of(folder):
        plateau = optim.ReduceOnPlateau(patience=0, factor=0.5, threshold=0.02)
        return mpdp.Trainer(
            model_of("float32"), nn.cross_entropy, optim.LAMB(lr=0.3), run_dir=folder, save_every=1, keep=99,
            schedule=optim.Product(plateau, optim.StepLR(10, gamma=0.9)), ema=0.8, precision="bfloat16",
            callbacks=[Rates()],
        )  # fmt: skip

    train = data.ArrayDataset(X[:20].astype("float32"), Y[:20])
    test = data.ArrayDataset(X[20:].astype("float32"), Y[20:])
    options = {"epochs": 6, "global_batch_size": 7, "validation": test, "progress": False}
    folder = tempfile.TemporaryDirectory() if rank == 0 else None
    shared = world.comm.broadcast_bytes(None if folder is None else folder.name.encode()).decode()
    whole = trainer_of(f"{shared}/whole")
    history = whole.fit(train, **options)
    best, factor, expected = None, 1.0, []
    for epoch, row in enumerate(history):
        expected += [0.3 * factor * 0.9 ** ((3 * epoch + i) // 10) for i in range(3)]
        better = best is None or row["validation_loss"] < best * 0.98
        best, factor = (row["validation_loss"], factor) if better else (best, factor * 0.5)
    close(same_on_all_ranks(whole.callbacks[0].rates), np.array(expected), 1e-14)
    assert factor < 1.0, "the plateau has come"
    by_average = same_on_all_ranks(whole.evaluate(test, ema=True))
    state = [whole.parallel.weights.tobytes(), whole.parallel._replica.average.array.tobytes()]
    for stop in (1, 9, 12):  # inside an epoch, and at the end of one
        (path,) = (p for p in whole.folder.checkpoints.iterdir() if int(p.name.split("-")[1]) == stop)
        again = trainer_of(f"{shared}/again-{stop}")
        assert again.resume(path)
        assert again.fit(train, **options) == history
        assert again.callbacks[0].rates == whole.callbacks[0].rates[stop:]
        assert [again.parallel.weights.tobytes(), again.parallel._replica.average.array.tobytes()] == state
        assert again.evaluate(test, ema=True) == by_average
    averaged = trainer_of(f"{shared}/averaged")
    by_it = averaged.fit(train, **options, ema=True)
    assert (
        same_on_all_ranks(by_it[-1]["validation_loss"])
        == averaged.evaluate(test, global_batch_size=options["global_batch_size"], ema=True)["loss"]
    )
    assert by_it[0]["validation_loss"] != history[0]["validation_loss"]
    world.comm.barrier()
    if folder is not None:
        folder.cleanup()


def ranks_that_ask_for_different_things():
    for name, mine in (("ema", 0.9), ("clip_value", 0.5)):
        given = {name: mine if rank == 0 else None}
        try:
            mpdp.Trainer(model_of(), nn.cross_entropy, optim.Lion(lr=0.1), precision="float64", **given)
        except DisagreementError as error:
            assert f"trainer: expected the same {name} on all ranks, got {mine} on rank 0" in str(error), (
                error
            )
        else:
            assert size == 1
    train = data.ArrayDataset(X, Y)
    trainer = mpdp.Trainer(model_of(), nn.cross_entropy, optim.Lion(lr=0.1), precision="float64", ema=0.9)
    try:
        trainer.fit(train, epochs=1, global_batch_size=8, validation=train, ema=rank == 0, progress=False)
    except DisagreementError as error:
        assert "fit: expected the same ema on all ranks, got True on rank 0" in str(error), error
    else:
        assert size == 1


for case in (
    rules_average_and_clipping_equal_their_formulas,
    parameters_that_few_ranks_use,
    a_plateau_is_seen_alike_and_survives_a_restart,
    ranks_that_ask_for_different_things,
):
    case()
    if rank == 0:
        print(f"passed {case.__name__}", flush=True)
print(f"all passed on rank {rank} of {size}", flush=True)
