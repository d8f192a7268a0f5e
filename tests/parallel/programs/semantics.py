"""Odd but legal training situations, each against a plain NumPy formula on the whole batch. Runs at any n."""

import sys
import tempfile

import numpy as np

import mpdp
from mpdp import autodiff, data, nn, optim

world = mpdp.init(timeout=20)
rank, size = world.rank, world.size
CASES = []


def case(function):
    CASES.append(function)
    return function


def bounds(total, r=rank):
    """Return the share of rank r: as unequal as can be, about r parts of the sum over ranks."""
    weights = np.arange(size)
    cuts = np.floor(np.cumsum(np.concatenate([[0], weights])) * total / max(1, weights.sum())).astype(int)
    if size == 1:
        cuts = np.array([0, total])
    cuts[-1] = total
    return int(cuts[r]), int(cuts[r + 1])


def close(a, b, tolerance=1e-12):
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    if b.size:
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-300)
        assert error <= tolerance, f"relative difference {error}"


def linear_data(total, features=4, classes=3):
    random = np.random.default_rng(5)
    return random.standard_normal((total, features)), random.integers(0, classes, total)


def softmax_gradient(w, b, x, y):
    z = x @ w.T + b
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[np.arange(len(y)), y]).sum()
    p[np.arange(len(y)), y] -= 1
    return loss, p.T @ x, p.sum(0)


def model_of(features=4, classes=3):
    model = nn.Linear(features, classes, dtype="float64")
    random = np.random.default_rng(1)
    model.weight.data = random.standard_normal((classes, features))
    model.bias.data = random.standard_normal(classes)
    return model


@case
def unequal_shares_weigh_by_samples():
    """A step of n ranks with 7 samples in all equals one process with 7 (B1)."""
    for loss in (nn.cross_entropy, lambda o, t: nn.cross_entropy(o, t) + 0.0, "pair"):
        x, y = linear_data(7)
        model = model_of()
        w, b = model.weight.data.copy(), model.bias.data.copy()
        if loss == "pair":
            function = lambda o, t: (nn.cross_entropy(o, t).sum, len(t))  # noqa: E731
        else:
            function = loss
        trainer = mpdp.Trainer(model, function, optim.SGD(lr=0.5), precision="float64")
        start, stop = bounds(7)
        value = trainer.step((x[start:stop], y[start:stop]))
        total, gw, gb = softmax_gradient(w, b, x, y)
        close(value, total / 7)
        close(model.weight.data, w - 0.5 * gw / 7)
        close(model.bias.data, b - 0.5 * gb / 7)
        trainer.check_replicas()


@case
def a_callback_of_one_rank_stops_all_at_the_same_point():
    """Wherever it asks, the run stops where one rank would have stopped."""
    x, y = linear_data(12)
    for method, steps in (("on_step", 2), ("on_validation", 3), ("on_epoch", 3), ("on_checkpoint", 2)):

        def ask(self, trainer, *_):
            if trainer.step_count >= 2 and rank == size - 1:
                trainer.should_stop = True

        callback = type("Stop", (mpdp.Callback,), {method: ask})()
        with tempfile.TemporaryDirectory() as folder:
            trainer = mpdp.Trainer(
                model_of(),
                nn.cross_entropy,
                optim.SGD(lr=0.1),
                precision="float64",
                callbacks=[callback],
                run_dir=folder,
                save_every=2,
            )
            dataset = data.ArrayDataset(x, y)
            trainer.fit(dataset, epochs=4, global_batch_size=4, validation=dataset)
        assert (trainer.step_count, trainer.should_stop) == (steps, True), (method, trainer.step_count)


@case
def mse_counts_elements():
    x, _ = linear_data(9)
    target = np.random.default_rng(2).standard_normal((9, 3))
    model = model_of()
    w, b = model.weight.data.copy(), model.bias.data.copy()
    trainer = mpdp.Trainer(model, nn.mse, optim.SGD(lr=0.1), precision="float64")
    start, stop = bounds(9)
    value = trainer.step((x[start:stop], target[start:stop]))
    d = x @ w.T + b - target
    close(value, (d**2).mean())
    close(model.weight.data, w - 0.1 * 2 * d.T @ x / d.size)


class Alternating(nn.Module):
    """`a` is used everywhere, `b` nowhere, `c` on rank 0 only, `d` on every second step."""

    def __init__(self):
        self.a = autodiff.Parameter(np.full((4, 2), 0.5))
        self.b = autodiff.Parameter(np.full((4, 2), 0.25))
        self.c = autodiff.Parameter(np.full((4, 2), -0.5))
        self.d = autodiff.Parameter(np.full((4, 2), 0.75))
        self.scalar = autodiff.Parameter(np.array(1.0))
        self.empty = autodiff.Parameter(np.zeros((0, 3)))
        self.turn = 0

    def forward(self, x):
        out = (x @ self.a) * self.scalar
        if rank == 0:
            out = out + x @ self.c
        if self.turn % 2 == 0:
            out = out + x @ self.d
        return out


@case
def parameters_that_some_or_all_ranks_do_not_use():
    """Momentum and decay never move what no rank used; what one rank used is averaged over all samples (C1)."""
    for make in (
        lambda: optim.SGD(lr=0.05, momentum=0.9, weight_decay=0.1),
        lambda: optim.AdamW(lr=0.05, weight_decay=0.1),
    ):
        model = Alternating()
        p = {k: v.data.copy() for k, v in model.named_parameters()}
        trainer = mpdp.Trainer(model, nn.mse, make(), precision="float64", chunk_bytes=1)
        slots = {k: [np.zeros_like(v), np.zeros_like(v), 0] for k, v in p.items()}
        random = np.random.default_rng(3)
        for step in range(20):
            model.turn = step
            x, t = random.standard_normal((11, 4)), random.standard_normal((11, 2))
            cuts = [bounds(11, r) for r in range(size)]
            grads = {k: np.zeros_like(v) for k, v in p.items()}
            used = {"a", "scalar"}
            for r, (start, stop) in enumerate(cuts):
                if stop == start:
                    continue
                xs, ts = x[start:stop], t[start:stop]
                out = (xs @ p["a"]) * p["scalar"]
                if r == 0:
                    out = out + xs @ p["c"]
                    used.add("c")
                if step % 2 == 0:
                    out = out + xs @ p["d"]
                    used.add("d")
                g = 2 * (out - ts) / (11 * 2)
                grads["a"] += xs.T @ g * p["scalar"]
                grads["scalar"] += (g * (xs @ p["a"])).sum()
                if r == 0:
                    grads["c"] += xs.T @ g
                if step % 2 == 0:
                    grads["d"] += xs.T @ g
            start, stop = cuts[rank]
            trainer.step((x[start:stop], t[start:stop]))
            for k in used:
                slot = slots[k]
                slot[2] += 1
                if trainer.optimizer.slots == ("momentum",):
                    slot[0] = 0.9 * slot[0] + grads[k] + 0.1 * p[k]
                    p[k] = p[k] - 0.05 * slot[0]
                else:
                    p[k] = p[k] * (1 - 0.05 * 0.1)
                    slot[0] = 0.9 * slot[0] + 0.1 * grads[k]
                    slot[1] = 0.999 * slot[1] + 0.001 * grads[k] ** 2
                    m = slot[0] / (1 - 0.9 ** slot[2])
                    v = slot[1] / (1 - 0.999 ** slot[2])
                    p[k] = p[k] - 0.05 * m / (np.sqrt(v) + 1e-8)
            trainer.check_replicas()
        for k, v in model.named_parameters():
            close(v.data, p[k], 1e-10)
        assert np.array_equal(model.b.data, np.full((4, 2), 0.25))
        assert model.scalar.shape == () and model.empty.shape == (0, 3)


class Tied(nn.Module):
    def __init__(self):
        self.embed = nn.Embedding(6, 4, dtype="float64")
        self.embed.weight.data = np.random.default_rng(7).standard_normal((6, 4))
        self.out = nn.Linear(4, 6, bias=False, dtype="float64")
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.embed(x))


@case
def tied_weights_are_reduced_once_with_both_uses():
    model = Tied()
    assert [name for name, _ in model.named_parameters()] == ["embed.weight"]
    w = model.embed.weight.data.copy()
    trainer = mpdp.Trainer(model, nn.cross_entropy, optim.SGD(lr=0.3), precision="float64")
    random = np.random.default_rng(0)
    x, y = random.integers(0, 6, 10), random.integers(0, 6, 10)
    start, stop = bounds(10)
    trainer.step((x[start:stop], y[start:stop]))
    h = w[x]
    _, gw, _ = softmax_gradient(w, np.zeros(6), h, y)
    z = h @ w.T
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(10), y] -= 1
    np.add.at(gw, x, p @ w)
    close(model.embed.weight.data, w - 0.3 * gw / 10)
    assert model.out.weight is model.embed.weight


@case
def frozen_and_thawed_parameters():
    x, y = linear_data(12)
    model = nn.Sequential(nn.Linear(4, 5, dtype="float64"), nn.Tanh(), nn.Linear(5, 3, dtype="float64"))
    model[0].weight.requires_grad = False
    trainer = mpdp.Trainer(
        model, nn.cross_entropy, optim.SGD(lr=0.2, momentum=0.9, weight_decay=0.1), precision="float64"
    )
    start, stop = bounds(12)

    def plain(params, velocity, trainable):
        w1, b1, w2, b2 = params
        h = np.tanh(x @ w1.T + b1)
        z = h @ w2.T + b2
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(12), y] -= 1
        p /= 12
        g = (p @ w2) * (1 - h**2)
        for i, grad in enumerate((g.T @ x, g.sum(0), p.T @ h, p.sum(0))):
            if i in trainable:
                velocity[i] = 0.9 * velocity[i] + grad + 0.1 * params[i]
                params[i] = params[i] - 0.2 * velocity[i]

    params = [p.data.copy() for p in model.parameters()]
    velocity = [np.zeros_like(p) for p in params]
    for trainable, change in (((1, 2, 3), None), ((0, 1, 3), "swap"), ((0, 1, 2, 3), "all")):
        if change == "swap":
            trainer.thaw("0.weight")
            trainer.freeze("2.weight")
            velocity[0][:] = 0
        elif change == "all":
            trainer.thaw("2.weight")
            velocity[2][:] = 0
        for _ in range(3):
            trainer.step((x[start:stop], y[start:stop]))
            plain(params, velocity, trainable)
        for p, q in zip(model.parameters(), params):
            close(p.data, q, 1e-11)
        trainer.check_replicas()
    model[2].weight.requires_grad = False
    try:
        trainer.step((x[start:stop], y[start:stop]))
    except mpdp.errors.DisagreementError as error:
        assert "use freeze() and thaw() on every rank" in str(error)
        assert getattr(error, "agreed", False)
    else:
        raise AssertionError("a flag changed behind our back was not seen")


@case
def masked_tokens():
    """Counts are of what is not masked; a rank, or every rank, may have nothing to count."""
    x, y = linear_data(10)
    for masked in ("last rank", "every second", "all"):
        model = model_of()
        w, b = model.weight.data.copy(), model.bias.data.copy()
        t = y.copy()
        if masked == "last rank":
            start, stop = bounds(10, size - 1)
            t[start if size > 1 else 8 : stop] = -100
        elif masked == "every second":
            t[::2] = -100
        else:
            t[:] = -100
        trainer = mpdp.Trainer(
            model, nn.cross_entropy, optim.SGD(lr=0.5, weight_decay=0.1), precision="float64", accumulate=2
        )
        start, stop = bounds(10)
        value = trainer.step((x[start:stop], t[start:stop]))
        keep = t >= 0
        if keep.any():
            total, gw, _gb = softmax_gradient(w, b, x[keep], t[keep])
            close(value, total / keep.sum())
            close(model.weight.data, w - 0.5 * (gw / keep.sum() + 0.1 * w))
        else:
            assert value == 0.0
            assert np.array_equal(model.weight.data, w)
        assert trainer.step_count == 1


@case
def every_length_batch_and_remainder():
    """Each sample once an epoch, equal to one process, for short data sets and remainders (E1, E3, B2)."""
    for total in (1, 2, 3, 5, 8, 17):
        for batch in (1, 2, 4, 7):
            for drop_last in (False, True):
                for accumulate in (1, 3):
                    if batch < accumulate or (drop_last and total < batch):
                        continue
                    x, y = linear_data(total)
                    model = model_of()
                    w, b = model.weight.data.copy(), model.bias.data.copy()
                    seen = []

                    class Spy:
                        def __len__(self):
                            return total  # noqa: B023

                        def __getitem__(self, i):
                            seen.append(i)  # noqa: B023
                            return x[i], y[i]  # noqa: B023

                    trainer = mpdp.Trainer(
                        model,
                        nn.cross_entropy,
                        optim.SGD(lr=0.2),
                        precision="float64",
                        accumulate=accumulate,
                        seed=9,
                    )
                    trainer.fit(Spy(), epochs=2, global_batch_size=batch, drop_last=drop_last)
                    per_epoch = total // batch if drop_last else -(-total // batch)
                    assert trainer.step_count == 2 * per_epoch
                    counts = np.zeros(total, dtype=np.int64)
                    np.add.at(counts, np.array(seen, dtype=int), 1)
                    world.comm.all_reduce(counts)
                    assert counts.sum() == 2 * (per_epoch * batch if drop_last else total)
                    if not drop_last:
                        assert np.all(counts == 2)
                    orders = []
                    for epoch in range(2):
                        order = data.Order(total, 9, epoch, True).indices(0, total)
                        orders.append(tuple(order))
                        for first in range(0, per_epoch * batch, batch):
                            part = order[first : first + batch]
                            _, gw, gb = softmax_gradient(w, b, x[part], y[part])
                            w, b = w - 0.2 * gw / len(part), b - 0.2 * gb / len(part)
                    close(model.weight.data, w, 1e-11)
                    close(model.bias.data, b, 1e-11)
                    if total > 8:
                        assert orders[0] != orders[1]


@case
def evaluation_counts_every_sample_once():
    """21 samples with a wrong answer at index 0, any n and batch: 20 of 21 (B4); epoch loss by samples (B6)."""
    x = np.eye(3)[np.arange(21) % 3] * 5.0
    y = np.arange(21) % 3
    y[0] = 1
    model = nn.Linear(3, 3, dtype="float64")
    model.weight.data, model.bias.data = np.eye(3), np.zeros(3)
    trainer = mpdp.Trainer(model, nn.cross_entropy, optim.SGD(lr=0.0), precision="float64")
    for batch in (1, 4, 21, 100):
        result = trainer.evaluate(data.ArrayDataset(x, y), metrics=[nn.accuracy], global_batch_size=batch)
        assert result["accuracy"] == 20 / 21
        close(result["loss"], softmax_gradient(np.eye(3), np.zeros(3), x, y)[0] / 21)
    try:
        trainer.evaluate(data.ArrayDataset(x[:0], y[:0]), metrics=[nn.accuracy])
    except ValueError as error:
        assert "expected at least one sample to evaluate" in str(error) and (size == 1 or error.agreed)
    else:
        raise AssertionError("no error")
    ignored = trainer.evaluate(data.ArrayDataset(x[:2], np.full(2, -100)), metrics=[nn.accuracy])
    assert np.isnan(ignored["loss"]) and np.isnan(ignored["accuracy"]), "there are samples, and no targets"
    short = trainer.evaluate(data.ArrayDataset(x[:1], y[:1]), metrics=[nn.accuracy])
    assert short["accuracy"] == 0.0

    class Value(nn.Module):
        def __init__(self):
            self.p = autodiff.Parameter(np.zeros(1))

        def forward(self, x):
            return x + self.p * 0.0

    trainer = mpdp.Trainer(Value(), lambda o, t: o.mean(), optim.SGD(lr=0.0), precision="float64")
    values = np.zeros(9)
    values[8] = 9.0
    history = trainer.fit(data.ArrayDataset(values, values), epochs=1, global_batch_size=4, shuffle=False)
    close(history[0]["loss"], 1.0)


class Constant(nn.Module):
    """A model whose gradient is the mean of its input."""

    def __init__(self):
        self.p = autodiff.Parameter(np.zeros(2))

    def forward(self, x):
        return (x * self.p).sum(axis=1)


@case
def clipping_acts_on_the_averaged_global_gradient():
    """A norm of 0.8 stays, 8 becomes 1, for any number of ranks (B8)."""
    for length in (0.8, 8.0):
        model = Constant()
        trainer = mpdp.Trainer(
            model, lambda o, t: o.mean(), optim.SGD(lr=1.0), precision="float64", clip_norm=1.0
        )
        x = np.tile([0.6 * length, 0.8 * length], (6, 1))
        start, stop = bounds(6)
        trainer.step((x[start:stop], x[start:stop]))
        norm = float(np.sqrt((model.p.data**2).sum()))
        close(norm, length * min(1.0, 1.0 / (length + 1e-6)))


@case
def schedules_count_updates():
    """The column of learning rates does not depend on ranks or accumulation (B9)."""
    for schedule in (optim.StepLR(2), optim.WarmupCosine(3, 10)):
        columns = []
        for accumulate in (1, 2):
            rates = []

            class Rates(mpdp.Callback):
                def on_step(self, trainer):
                    rates.append(trainer.lr)  # noqa: B023

            trainer = mpdp.Trainer(
                model_of(),
                nn.cross_entropy,
                optim.SGD(lr=0.1),
                precision="float64",
                schedule=schedule,
                accumulate=accumulate,
                callbacks=[Rates()],
            )
            trainer.fit(data.ArrayDataset(*linear_data(8)), epochs=2, global_batch_size=2)
            columns.append(rates)
        expected = [0.1 * schedule(t) for t in range(1, 9)]
        assert columns == [expected, expected]


@case
def several_inputs_as_tuples_and_dicts():
    class Two(nn.Module):
        def __init__(self):
            self.left = nn.Linear(2, 3, dtype="float64")
            self.right = nn.Linear(2, 3, dtype="float64")

        def forward(self, left, right):
            return self.left(left) + self.right(right)

    x, y = linear_data(9)
    results = []
    for form in ("tuple", "nested", "dict"):
        mpdp.seed(4)
        trainer = mpdp.Trainer(Two(), nn.cross_entropy, optim.SGD(lr=0.1), precision="float64")
        items = {
            "tuple": data.ArrayDataset(x[:, :2].copy(), x[:, 2:].copy(), y),
            "nested": [((x[i, :2], x[i, 2:]), y[i]) for i in range(9)],
            "dict": [{"left": x[i, :2], "target": y[i], "right": x[i, 2:]} for i in range(9)],
        }[form]
        trainer.fit(items, epochs=1, global_batch_size=4)
        results.append(trainer.model.state_dict())
    for other in results[1:]:
        for name, value in results[0].items():
            assert np.array_equal(value, other[name]), name


@case
def gradients_by_hand():
    """GradientArena and Reducer, announced in another order on each rank; float16 and 0-d gradients too."""
    shapes = {"w": (40, 300), "b": (40,), "s": (), "none": (0, 4), "v": (5000,)}
    for dtype in ("float32", "float64", "float16"):
        arena = mpdp.GradientArena(shapes, dtype, "cpu")
        reducer = mpdp.Reducer(arena, chunk_bytes=1)
        for step in range(3):
            names = list(shapes)
            order = np.random.default_rng(100 * rank + step).permutation(len(names))
            for k, i in enumerate(order):
                arena[names[i]][...] = rank + i + step
                if k < 4:
                    reducer.ready(names[i])
            assert reducer.finish(count=rank + 1) == size * (size + 1) / 2
            for i, name in enumerate(names):
                total = size * (size - 1) / 2 + size * (i + step)
                close(arena[name], np.full(shapes[name], total / (size * (size + 1) / 2)), 2e-3)
        arena["s"][...] = 1.0
        assert reducer.finish() is None
        assert arena["s"] == size


@case
def an_own_loop():
    """DataParallel without a trainer, with accumulation and dropout keyed by position."""
    mpdp.seed(0)
    model = nn.Sequential(nn.Linear(4, 8, dtype="float64"), nn.Dropout(0.5), nn.Linear(8, 3, dtype="float64"))
    params = [p.data.copy() for p in model.parameters()]
    parallel = mpdp.DataParallel(model, seed=11)
    optimizer = optim.SGD(lr=0.1)
    x, y = linear_data(10)
    start, stop = bounds(10)
    parallel.backward(nn.cross_entropy(parallel(x[start:stop]), y[start:stop]), final=False)
    parallel.backward(nn.cross_entropy(parallel(x[start:stop]), y[start:stop]))
    value = parallel.step(optimizer)
    # The second micro-batch continues the positions of the first.
    mask = mpdp.random.dropout_mask(11, "1", 0, 0, (20, 8), 0.5)
    w1, b1, w2, b2 = params
    h = np.tile(x @ w1.T + b1, (2, 1)) * mask / 0.5
    total, gw2, _ = softmax_gradient(w2, b2, h, np.tile(y, 2))
    close(value, total / 20)
    close(model[2].weight.data, w2 - 0.1 * gw2 / 20)


@case
def one_rank_asks_all_to_stop():
    """All ranks stop after the same step, in fit and in a loop of the program's own."""

    class Stop(mpdp.Callback):
        def on_step(self, t):
            if rank == size - 1 and t.step_count == 2:
                t.should_stop = True

    x, y = linear_data(12)
    trainer = mpdp.Trainer(
        model_of(), nn.cross_entropy, optim.SGD(lr=0.1), precision="float64", callbacks=[Stop()]
    )
    trainer.fit(data.ArrayDataset(x, y), epochs=9, global_batch_size=4)
    assert trainer.step_count == 2 and trainer.should_stop
    trainer.fit(data.ArrayDataset(x, y), updates=4, global_batch_size=4)
    assert trainer.step_count == 4
    trainer = mpdp.Trainer(model_of(), nn.cross_entropy, optim.SGD(lr=0.1), precision="float64")
    while not trainer.should_stop:
        if rank == 0 and trainer.step_count == 2:
            trainer.should_stop = True
        trainer.step((x[:2], y[:2]))
    assert trainer.step_count == 3


@case
def long_chaotic_training_keeps_replicas_equal():
    x, y = linear_data(64)
    trainer = mpdp.Trainer(
        nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)),
        nn.cross_entropy,
        optim.SGD(lr=3.0, momentum=0.9),
        clip_norm=5.0,
    )
    for step in range(300):
        start, stop = bounds(64)
        trainer.step((x[start:stop].astype("float32"), y[start:stop]))
        if step % 50 == 0:
            trainer.check_replicas()
    trainer.check_replicas()


only = sys.argv[1:]
for function in CASES:
    if not only or function.__name__ in only:
        function()
        if rank == 0:
            print(f"passed {function.__name__}", flush=True)
print(f"all passed on rank {rank} of {size}", flush=True)
