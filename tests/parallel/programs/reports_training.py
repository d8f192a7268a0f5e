"""Training against the reports of kinds B, E, F, L and M, with any number of ranks."""

import hashlib
import os
import sys
import time

import numpy as np
from launching import record

import mpdp
from mpdp import autodiff, data, nn, optim
from mpdp.errors import DisagreementError, NonFiniteError

world = mpdp.init(timeout=20)
rank, size = world.rank, world.size
last = rank == size - 1
CASES = []
TOTAL = 13


def case(function):
    CASES.append(function)
    return function


def share(r=rank):
    """Return the share of rank r of 13 samples: unequal, and of any rank but the last one smaller."""
    cuts = [TOTAL * i // (size + 1) for i in range(size)] + [TOTAL]
    return slice(cuts[r], cuts[r + 1])


def close(a, b, tolerance=1e-12):
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    if b.size:
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-300)
        assert error <= tolerance, f"relative difference {error}"


def raises(call, kind, *texts):
    """Check that a call raises the same kind of error on all ranks, agreed on, with all the texts in it."""
    try:
        call()
    except kind as error:
        assert size == 1 or error.agreed
        for text in texts:
            assert text in str(error), (text, str(error))
    else:
        raise AssertionError("no error")
    world.comm.barrier()


def samples(features=4, outputs=3):
    random = np.random.default_rng(5)
    return random.standard_normal((TOTAL, features)), random.standard_normal((TOTAL, outputs))


def trainer(model, loss=nn.mse, optimizer=None, **options):
    options = {"precision": "float64", **options}
    return mpdp.Trainer(model, loss, optimizer or optim.SGD(lr=0.1), **options)


class Crossed(nn.Module):
    """Two equal layers that odd ranks run in the other order."""

    def __init__(self):
        random = np.random.default_rng(1)
        self.first = nn.Linear(4, 4, bias=False, dtype="float64")
        self.second = nn.Linear(4, 4, bias=False, dtype="float64")
        self.first.weight.data = random.standard_normal((4, 4))
        self.second.weight.data = random.standard_normal((4, 4))

    def forward(self, x):
        return self.second(self.first(x)) if rank % 2 == 0 else self.first(self.second(x))


@case
def layers_that_run_in_another_order_on_each_rank():
    """B11: gradients are summed by name."""
    model = Crossed()
    x, t = samples(4, 4)
    a, b = model.first.weight.data.copy(), model.second.weight.data.copy()
    ga, gb = np.zeros_like(a), np.zeros_like(b)
    for r in range(size):
        xs, ts = x[share(r)], t[share(r)]
        one, two = (a, b) if r % 2 == 0 else (b, a)
        h = xs @ one.T
        g = 2 * (h @ two.T - ts) / t.size
        g_one, g_two = (g @ two).T @ xs, g.T @ h
        ga += g_one if r % 2 == 0 else g_two
        gb += g_two if r % 2 == 0 else g_one
    t_ = trainer(model, chunk_bytes=1)
    t_.step((x[share()], t[share()]))
    close(model.first.weight.data, a - 0.1 * ga)
    close(model.second.weight.data, b - 0.1 * gb)
    t_.check_replicas()


@case
def models_built_from_a_set():
    """B11: the order of a set differs between ranks."""
    names = {f"layer_{i}" for i in range(12)}

    class Set(nn.Module):
        def __init__(self):
            self.layers = {nn.Linear(4, 4), nn.Linear(4, 4)}

    class FromSet(nn.Module):
        def __init__(self):
            for name in names:
                setattr(self, name, nn.Linear(4, 4))

    raises(lambda: trainer(Set(), precision="float32"), TypeError, "layers", "the order of a set differs")
    if size > 1 and os.environ.get("PYTHONHASHSEED") is None:
        raises(
            lambda: trainer(FromSet(), precision="float32"),
            DisagreementError,
            "model: expected the same entry",
        )


@case
def scaled_gradients_meet_decay_and_clipping_unscaled():
    """B7: the power of two that gradients are scaled by while they travel changes no bit."""
    results = []
    for nominal in (1, 1024, 2**40):
        mpdp.seed(0)
        model = nn.Linear(4, 3, dtype="float64")
        parallel = mpdp.DataParallel(model, nominal_count=nominal)
        optimizer = optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.1)
        x, t = samples()
        for _ in range(3):
            parallel.backward(nn.mse(parallel(x[share()]), t[share()]))
            parallel.step(optimizer, clip_norm=0.5)
        results.append(parallel.weights.copy())
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


@case
def unequal_numbers_of_batches_with_empty_ones():
    """E1: a rank whose own generator ends early brings empty batches, and nothing is lost or hangs."""
    model = nn.Linear(4, 3, dtype="float64")
    x, t = samples()
    w, b = model.weight.data.copy(), model.bias.data.copy()
    t_ = trainer(model)
    counts = [5 if r == 0 else 3 for r in range(size)]
    for step in range(5):
        mine = slice(rank, rank + 2) if step < counts[rank] else slice(0, 0)
        t_.step((x[mine], t[mine]))
        rows = [i for r in range(size) if step < counts[r] for i in (r, r + 1)]
        d = x[rows] @ w.T + b - t[rows]
        w, b = w - 0.1 * 2 * d.T @ x[rows] / d.size, b - 0.1 * 2 * d.sum(0) / d.size
    close(model.weight.data, w)
    t_.check_replicas()


@case
def seeds_that_differ_between_ranks():
    """E4: from the clock and the rank, or none at all."""
    if size > 1:
        raises(
            lambda: trainer(nn.Linear(4, 3, dtype="float64"), seed=time.time_ns() * 100 + rank),
            DisagreementError,
            "expected the same",
            "seed on all ranks",
        )
    raises(
        lambda: trainer(nn.Linear(4, 3, dtype="float64"), seed=None),
        ValueError,
        "seed: expected an integer, got None",
    )


@case
def empty_validation_data():
    """E7: an error on all ranks before anything is trained, also where the data are empty on one rank alone."""
    x, t = samples()
    t_ = trainer(nn.Linear(4, 3, dtype="float64"))
    nothing = data.ArrayDataset(x[:0], t[:0])
    raises(
        lambda: t_.fit(data.ArrayDataset(x, t), epochs=1, global_batch_size=4, validation=nothing),
        ValueError,
        "validation: expected at least one sample, got an empty data set; check where it comes from",
    )
    assert t_.step_count == 0 and t_.history == []
    raises(
        lambda: t_.evaluate(nothing, metrics=[nn.Gather(lambda o, t: 0.0, name="all")]),
        ValueError,
        "dataset: expected at least one sample to evaluate, got an empty data set; check where it comes from",
    )
    for sharded in (False, True):
        raises(
            lambda: t_.evaluate(data.Stream(lambda *_: (), sharded=sharded)),  # noqa: B023
            ValueError,
            "dataset: expected at least one sample to evaluate, got a stream that has ended; let it begin anew",
        )
    # A rank without a sample is no rank without data.
    one = t_.evaluate(data.ArrayDataset(x[:1], t[:1]))
    alone = data.Stream(lambda epoch, r, n: [(x[0], t[0])] if r == n - 1 else [], sharded=True)
    close(t_.evaluate(alone)["loss"], one["loss"])
    if size > 1:
        mine = 0 if last else TOTAL
        raises(
            lambda: t_.evaluate(data.ArrayDataset(x[:mine], t[:mine])),
            DisagreementError,
            f"evaluate: expected the same length of the data set on all ranks, got {TOTAL} on rank 0",
        )
        raises(
            lambda: t_.fit(data.ArrayDataset(x[:mine], t[:mine]), epochs=2, global_batch_size=4),
            ValueError,
            "expected at least one sample, got an empty data set",
            f"(on rank {size - 1} of {size})",
        )


class Root(nn.Module):
    """A finite loss with a gradient that is NaN wherever the input is zero."""

    def __init__(self):
        self.first = autodiff.Parameter(np.ones(4))
        self.w = autodiff.Parameter(np.ones(4))

    def forward(self, x):
        return (x * self.first).sum(axis=1) + (self.w * x).sum(axis=1).sqrt()


@case
def numbers_that_are_not_finite_on_the_last_rank_alone():
    """F1: an error on all ranks that names rank or parameter; no weight moves."""
    x, _ = samples()
    for value in (np.nan, np.inf, -np.inf):
        model = nn.Linear(4, 3, dtype="float64")
        t_ = trainer(model, lambda o, t: o.mean())
        before = t_.parallel.weights.copy()
        bad = x.copy()
        bad[-1, 0] = value
        with np.errstate(invalid="ignore"):
            raises(
                lambda: t_.step((bad[share()], bad[share()])),  # noqa: B023
                NonFiniteError,
                "loss: expected a finite sum at step 0",
                f"from rank {size - 1}",
            )
        assert np.array_equal(t_.parallel.weights, before) and t_.step_count == 0
        t_.step((x[share()], x[share()]))  # a program may catch it on every rank and go on
        t_.check_replicas()
    t_ = trainer(Root(), lambda o, t: o.mean())
    before = t_.parallel.weights.copy()
    bad = np.abs(x) + 0.1
    bad[-1] = 0
    with np.errstate(divide="ignore", invalid="ignore"):
        raises(
            lambda: t_.step((bad[share()], bad[share()])),
            NonFiniteError,
            "gradient: expected finite values at step 0, got NaN or infinity first in w",
            f"in w (from rank {size - 1}); nothing was updated" if size > 1 else "nothing was updated",
        )
    assert np.array_equal(t_.parallel.weights, before)
    t_.step((np.abs(x[share()]) + 0.1, x[share()]))  # what was computed again has left nothing behind
    t_.check_replicas()


class Masks(nn.Module):
    """Dropout of ones; what comes out is kept."""

    def __init__(self):
        self.scale = autodiff.Parameter(np.ones(64))
        self.dropout = nn.Dropout(0.5)
        self.seen = []

    def forward(self, x):
        out = self.dropout(x * self.scale)
        self.seen.append(out.data != 0)
        return out


@case
def masks_differ_between_ranks_that_see_the_same_input():
    """L3: a mask is that of the sample's place in the global batch; the order of samples is one for all."""
    model = Masks()
    t_ = trainer(model, lambda o, t: o.mean(), seed=3)
    for step in range(2):
        t_.step((np.ones((2, 64)), np.ones(2)))
        whole = mpdp.random.dropout_mask(3, "dropout", step, 0, (2 * size, 64), 0.5)
        assert np.array_equal(model.seen[step], whole[2 * rank : 2 * rank + 2])
        assert len({row.tobytes() for row in whole}) == 2 * size
    seen = np.zeros((size, TOTAL), dtype=np.int64)

    class Spy:
        def __len__(self):
            return TOTAL

        def __getitem__(self, i):
            seen[rank, i] += 1
            return np.ones(64), 1.0

    t_.fit(Spy(), epochs=1, global_batch_size=5)
    world.comm.all_reduce(seen.reshape(-1))
    assert np.all(seen.sum(axis=0) == 1)


def digits_of(chunk_bytes, seed=0):
    """Train a network of 17 spans for some steps and return its weights."""
    mpdp.seed(seed)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 64))
    t_ = mpdp.Trainer(model, nn.mse, optim.AdamW(lr=0.01), chunk_bytes=chunk_bytes)
    random = np.random.default_rng(0)
    x = random.standard_normal((50, 64)).astype("float32")
    t_.fit(data.ArrayDataset(x, x), epochs=2, global_batch_size=11)
    return t_.parallel.weights.copy()


@case
def results_repeat_and_depend_on_chunks_by_rounding_alone():
    """L1: twice the same bits; L2: also in another process, with another hash seed, on two threads."""
    small, large = digits_of(1024), digits_of(25 << 20)
    assert np.array_equal(small, digits_of(1024)) and np.array_equal(large, digits_of(25 << 20))
    close(small, large, 1e-5)
    return hashlib.sha256(small.tobytes() + large.tobytes()).hexdigest()


@case
def parameters_without_elements():
    """M2: also as the only parameter; batches of no rows on every rank."""

    class Empty(nn.Module):
        def __init__(self):
            self.none = autodiff.Parameter(np.zeros((3, 0)))

        def forward(self, x):
            return x * self.none.sum()

    x, t = samples(3, 3)
    t_ = trainer(Empty(), optimizer=optim.AdamW(lr=0.1))
    t_.fit(data.ArrayDataset(x, t), epochs=2, global_batch_size=4)
    assert t_.model.none.shape == (3, 0) and t_.step_count > 0
    model = nn.Linear(3, 3, dtype="float64")
    t_ = trainer(model, optimizer=optim.AdamW(lr=0.1))
    before = t_.parallel.weights.copy()
    assert t_.step((x[:0], t[:0])) == 0.0
    assert np.array_equal(t_.parallel.weights, before)
    t_.check_replicas()


@case
def nothing_to_train():
    """M3: everything frozen, or a model without parameters: it evaluates, and training says so on all ranks."""

    class Function(nn.Module):
        def forward(self, x):
            return x

    x, t = samples(3, 3)
    frozen = nn.Linear(3, 3, dtype="float64").freeze()
    for model, precision in ((frozen, "float64"), (Function(), "float64"), (Function(), "float32")):
        t_ = trainer(model, precision=precision)
        assert np.isfinite(t_.evaluate(data.ArrayDataset(x, t))["loss"])
        raises(
            lambda: t_.fit(data.ArrayDataset(x, t), epochs=1, global_batch_size=4),  # noqa: B023
            ValueError,
            "nothing to train",
        )
        raises(lambda: t_.step((x, t)), ValueError, "nothing to train")  # noqa: B023


@case
def sums_and_means():
    """M6: a mean, a mean of nn and a pair (sum, count) are one loss, also with micro-batches."""
    x, t = samples()
    results = []
    for loss in (
        nn.mse,
        lambda o, t: ((o - t) * (o - t)).mean(),
        lambda o, t: (((o - t) * (o - t)).sum(), t.size),
    ):
        for accumulate in (1, 2):
            mpdp.seed(0)
            t_ = trainer(nn.Linear(4, 3, dtype="float64"), loss, accumulate=accumulate)
            value = t_.step((x[share()], t[share()]))
            results.append(np.append(t_.parallel.weights, value))
    for result in results[1:]:
        close(result, results[0])


@case
def a_number_that_the_last_rank_gets_wrong():
    """Each is an error on all ranks, and training goes on."""
    raises(
        lambda: trainer(nn.Linear(4, 3, dtype="float64"), chunk_bytes=-1),
        ValueError,
        "chunk_bytes: expected a positive number of bytes, got -1",
    )
    t = trainer(nn.Linear(4, 3, dtype="float64"))
    raises(
        lambda: t.evaluate(data.ArrayDataset(*samples()), global_batch_size=0),
        ValueError,
        "global_batch_size: expected 1 or more, got 0",
    )
    arena = mpdp.GradientArena({"w": (3,)})
    reducer = mpdp.Reducer(arena)
    raises(
        lambda: reducer.finish(count=-1 if last else 1),
        ValueError,
        "count: expected a number of samples of 0 or more, got -1",
        f"on rank {size - 1}" if size > 1 else "",
    )
    raises(lambda: reducer.finish(count=0), ValueError, "count: expected a global count above 0, got 0")
    if size > 1:
        raises(
            lambda: reducer.finish(count=None if last else 1),
            ValueError,
            f"count: expected one on every rank or on none, got none on 1 of {size}",
        )
    arena["w"][...] = 1.0
    assert reducer.finish(count=1) == size and float(arena["w"][0]) == 1.0


only = sys.argv[1:]
passed, digest = [], None
for function in CASES:
    if not only or function.__name__ in only:
        digest = function() or digest
        world.comm.barrier()
        passed.append(function.__name__)
record([passed, digest])
