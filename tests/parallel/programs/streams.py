"""Training on streams against training on the same data as arrays. Runs at any n; argv[1] is a folder."""

import sys
from pathlib import Path

import numpy as np
from launching import record

import mpdp
from mpdp import data, nn, optim

world = mpdp.init(timeout=20)
rank, size = world.rank, world.size
FOLDER = Path(sys.argv[1])
random = np.random.default_rng(0)
N = 23
X, Y = random.standard_normal((N, 4)), random.integers(0, 3, N)
ARRAYS = data.ArrayDataset(X, Y)


def trainer(seed=0, dropout=False, **options):
    mpdp.seed(0)
    layers = [nn.Linear(4, 8, dtype="float64"), nn.Tanh(), *([nn.Dropout(0.5)] if dropout else [])]
    model = nn.Sequential(*layers, nn.Linear(8, 3, dtype="float64"))
    optimizer = optim.SGD(lr=0.1, momentum=0.9)
    return mpdp.Trainer(model, nn.cross_entropy, optimizer, precision="float64", seed=seed, **options)


def weights(t):
    return np.concatenate([p.numpy().reshape(-1) for p in t.model.parameters()])


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


def elements(epoch):
    """A generator: nothing knows its length."""
    yield from zip(X, Y)


def counted(t):
    """Return the list that this rank's sample numbers go to."""
    seen, forward = [], t.eager.forward

    def note(part):
        if t.model.training:
            seen.append((part.epoch, part.indices.tolist()))
        return forward(part)

    t.eager.forward = note
    return seen


# -- the same updates as from arrays, for any batch, accumulation, rest and dropout
for batch, accumulate, drop_last, dropout in (
    (4, 1, False, False),
    (6, 2, False, True),
    (6, 1, True, True),
    (40, 3, False, False),
):
    if drop_last and batch > N:
        continue
    results = []
    for source in (ARRAYS, data.Stream(elements)):
        t = trainer(accumulate=accumulate, dropout=dropout)
        history = t.fit(
            source,
            epochs=3,
            global_batch_size=batch,
            shuffle=False,
            drop_last=drop_last,
            metrics=[nn.accuracy],
        )
        results.append(
            (weights(t), [row["loss"] for row in history], [row["step"] for row in history], t.epoch)
        )
    assert np.array_equal(results[0][0], results[1][0]), "equal bits"
    assert results[0][1:] == results[1][1:]

# -- validation, evaluation and predictions on a stream
t = trainer()
history = t.fit(
    ARRAYS,
    epochs=1,
    global_batch_size=5,
    validation=data.Stream(elements),
    metrics=[nn.accuracy, nn.Gather(lambda o, t: (t == Y).all(), name="ordered")],
)
assert history[0]["ordered"] == 1.0
close(history[0]["validation_loss"], t.evaluate(ARRAYS)["loss"])
close(t.predict(data.Stream(elements), global_batch_size=4), t.predict(ARRAYS))

# -- windows: each element once an epoch, another order each epoch, the same for any number of ranks
t = trainer(seed=3)
seen = counted(t)
t.fit(data.Stream(elements, window=8), epochs=2, global_batch_size=6)
mine = [[number for e, ids in seen if e == epoch for number in ids] for epoch in (0, 1)]
record([mine, weights(t).tolist()])

# -- resumed in the middle of an epoch: the same bits
run = FOLDER / f"run-{size}"
whole = trainer(dropout=True)
whole.fit(data.Stream(elements, window=8), epochs=3, global_batch_size=6)
first = trainer(dropout=True, run_dir=run, save_every=2)
first.fit(data.Stream(elements, window=8), updates=6, global_batch_size=6)
second = trainer(dropout=True, run_dir=run)
assert second.resume() and second.step_count == 6 and second.epoch == 1
second.fit(data.Stream(elements, window=8), epochs=3, global_batch_size=6)
assert np.array_equal(weights(second), weights(whole)) and second.epoch == 3

# -- elements of each rank's own, of which ranks have different numbers (E1)
own = {
    r: [
        i for i in range(N) if i % (size * (size + 1) // 2) in range(r * (r + 1) // 2, (r + 1) * (r + 2) // 2)
    ]
    for r in range(size)
}
assert sorted(i for ids in own.values() for i in ids) == list(range(N))


def of_rank(epoch, r, n):
    assert (r, n) == (rank, size)
    return ((X[i], Y[i]) for i in own[r])


t = trainer(dropout=True)
history = t.fit(data.Stream(of_rank, sharded=True), epochs=2, global_batch_size=2 * size)
assert t.step_count == 2 * max(-(-len(ids) // 2) for ids in own.values()), t.step_count
assert t.position.batch == 0 and t.epoch == 2
t.check_replicas()
results = t.evaluate(data.Stream(of_rank, sharded=True), metrics=[nn.accuracy], global_batch_size=3 * size)
close(results["loss"], t.evaluate(ARRAYS)["loss"])
plain = trainer()
plain.fit(
    data.Stream(of_rank, sharded=True), epochs=1, global_batch_size=N * size
)  # one update of all samples
once = trainer()
once.fit(ARRAYS, epochs=1, global_batch_size=N, shuffle=False)
close(weights(plain), weights(once))
normed = mpdp.Trainer(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), nn.cross_entropy, optim.SGD(lr=0.1))
normed.fit(data.Stream(of_rank, sharded=True), epochs=1, global_batch_size=2 * size)
sums = []
for source in (ARRAYS, data.Stream(elements)):  # fewer samples than ranks in a batch: zero rows take part
    mpdp.seed(0)
    normed = nn.Sequential(nn.Linear(4, 3, dtype="float64"), nn.BatchNorm1d(3, dtype="float64"))
    t = mpdp.Trainer(normed, nn.cross_entropy, optim.SGD(lr=0.1), precision="float64")
    t.fit(source, epochs=1, global_batch_size=3, shuffle=False)
    sums.append(weights(t))
close(*sums)

# -- what cannot work is one error on every rank
for source, error, words in (
    (data.Stream(lambda epoch: iter(())), ValueError, "dataset: expected at least one batch in an epoch"),
    (
        (pair for pair in zip(X, Y)),
        TypeError,
        "source: expected something that begins anew each epoch, got a generator",
    ),
    (5, TypeError, "dataset: expected an object with __len__ and __getitem__"),
):
    try:
        trainer().fit(source, epochs=1, global_batch_size=4)
        raise AssertionError("accepted")
    except error as caught:
        assert words in str(caught), caught
if size > 1:
    shorter = data.Stream(lambda epoch: list(zip(X, Y))[: 23 - 4 * (rank == 1)])
    for call in (
        lambda: trainer().fit(shorter, epochs=1, global_batch_size=4),
        lambda: trainer().evaluate(shorter),
    ):
        try:
            call()
            raise AssertionError("accepted")
        except mpdp.errors.DisagreementError as caught:
            assert "of the stream on all ranks" in str(caught) or "the same stream on all ranks" in str(
                caught
            ), caught
    try:
        trainer().predict(data.Stream(of_rank, sharded=True))
        raise AssertionError("accepted")
    except ValueError as caught:
        assert "got a sharded stream" in str(caught)
print(f"all passed on rank {rank}", flush=True)
