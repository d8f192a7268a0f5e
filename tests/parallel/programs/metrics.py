"""Metrics and predictions on n ranks against NumPy on the whole data. Runs at any n."""

import numpy as np
from launching import record

import mpdp
from mpdp import data, nn, optim

world = mpdp.init(timeout=20)
rank, size = world.rank, world.size
random = np.random.default_rng(3)
N, C = 21, 5
x = random.standard_normal((N, 4))
y = random.integers(0, C, N)
y[0] = 0
mpdp.seed(1)
model = nn.Linear(4, C, dtype="float64")
trainer = mpdp.Trainer(model, nn.cross_entropy, optim.SGD(lr=0.1), precision="float64")
test = data.ArrayDataset(x, y)
logits = x @ model.weight.data.T + model.bias.data


def half_range(output, target):
    """No sum over samples; it sees which row is which."""
    assert output.shape == (N, C) and (target == y).all() and rank == 0
    np.testing.assert_allclose(output, logits, rtol=1e-12)
    return (output.max() - output.min()) / 2


def losses():
    return np.log(np.exp(logits).sum(1)) - logits[np.arange(N), y]


# -- every number by a formula, for global batches that leave rests
seen = []
for batch in (4, 5, 21, 100):
    results = trainer.evaluate(
        test,
        metrics=[
            nn.accuracy,
            nn.top_k(2),
            nn.perplexity,
            nn.Gather(half_range),
            nn.mean(lambda o, t: o[:, 0], name="first"),
        ],
        global_batch_size=batch,
    )
    order = np.argsort(-logits, axis=1, kind="stable")
    assert results["accuracy"] == (order[:, 0] == y).sum() / N
    assert results["top_2"] == (order[:, :2] == y[:, None]).any(1).sum() / N
    assert abs(results["perplexity"] - np.exp(losses().mean())) < 1e-12 * results["perplexity"]
    assert abs(results["first"] - logits[:, 0].mean()) < 1e-12
    assert abs(results["half_range"] - np.ptp(logits) / 2) < 1e-12
    seen.append(results)

# -- outputs in the order of the data set, on every rank or on one
for batch in (1, 4, 21, None):
    found = trainer.predict(x, global_batch_size=batch)
    np.testing.assert_allclose(found, logits, rtol=1e-12, atol=1e-14)
    assert found.dtype == np.float64
    alone = trainer.predict(test, global_batch_size=batch, everywhere=False)
    assert (alone is None) == (rank > 0)
    if rank == 0:
        np.testing.assert_allclose(alone, logits, rtol=1e-12, atol=1e-14)
assert trainer.predict(data.ArrayDataset(x[:0], y[:0])) is None


class Two(nn.Module):
    def __init__(self):
        self.inner = nn.Linear(4, 2)

    def forward(self, x):
        out = self.inner(x)
        return {"a": out, "b": (out * 2.0, x[:, 0] > 0.0)}


two = mpdp.Trainer(Two(), lambda out, target: out["a"].sum(), optim.SGD(lr=0.1))
both = two.predict(x[:3].astype("float32"), global_batch_size=2)  # fewer samples than ranks
assert set(both) == {"a", "b"} and isinstance(both["b"], tuple)
np.testing.assert_array_equal(both["a"] * 2, both["b"][0])
assert both["b"][1].dtype == bool and (both["b"][1] == (x[:3, 0] > 0)).all()

# -- validation inside fit, and training metrics
history = trainer.fit(
    test,
    epochs=2,
    global_batch_size=8,
    validation=test,
    metrics=[nn.Gather(lambda o, t: len(t), name="rows"), nn.perplexity],
)
assert history[-1]["rows"] == N
assert abs(history[-1]["perplexity"] - np.exp(history[-1]["validation_loss"])) < 1e-9
history = trainer.fit(test, epochs=3, global_batch_size=8, metrics=[nn.perplexity])
assert abs(history[-1]["perplexity"] - np.exp(history[-1]["loss"])) < 1e-9

# -- what cannot work is one error on every rank
for metrics, error, words in (
    ([nn.Gather(lambda o, t: 1 / 0, name="broken")], ZeroDivisionError, "division by zero"),
    (
        [nn.Gather(lambda o, t: "many", name="text")],
        TypeError,
        "metrics: expected a number from text, got str",
    ),
):
    try:
        trainer.evaluate(test, metrics=metrics)
        raise AssertionError("accepted")
    except error as caught:
        assert words in str(caught) and (size == 1 or "on rank 0 of" in str(caught)), caught
try:
    trainer.evaluate(data.ArrayDataset(x[:0], y[:0]), metrics=[nn.Gather(half_range)])
    raise AssertionError("accepted")
except ValueError as caught:
    assert "dataset: expected at least one sample to evaluate, got an empty data set" in str(caught), caught
    assert size == 1 or caught.agreed
try:
    trainer.fit(test, epochs=4, global_batch_size=8, metrics=[nn.Gather(half_range)])
    raise AssertionError("accepted")
except ValueError as caught:
    assert "metrics: expected validation= beside half_range" in str(caught), caught

# -- so is a name that no row of the history will have, on whichever rank it is wrong, before anything is trained
wrong = [mpdp.EarlyStopping("loss" if rank < size - 1 else "accuracy", mode="max")]
for options, words in (
    (
        {"callbacks": wrong},
        "metric: expected one of loss, validation_loss in the history, got 'accuracy' for Early",
    ),
    ({"schedule": optim.ReduceOnPlateau("top_2", mode="max")}, "got 'top_2' for ReduceOnPlateau"),
):
    other = mpdp.Trainer(nn.Linear(4, C), nn.cross_entropy, optim.SGD(lr=0.1), **options)
    try:
        other.fit(test, epochs=1, global_batch_size=8, validation=test)
        raise AssertionError("accepted")
    except ValueError as caught:
        assert words in str(caught) and other.step_count == 0, caught
        assert size == 1 or caught.agreed
    world.comm.barrier()
record(seen)
print(f"all passed on rank {rank}", flush=True)
