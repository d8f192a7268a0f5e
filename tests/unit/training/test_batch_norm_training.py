"""Batch norm in a trainer of one rank: precision, resuming, and what a device of its own changes."""

import numpy as np
import pytest
from on_device import host, world

import mpdp
from mpdp import data, nn, optim

pytestmark = pytest.mark.usefixtures("device")
random = np.random.default_rng(21)
X, Y = random.standard_normal((30, 2, 6, 6)).astype("float32"), random.integers(0, 3, 30)


def build(run_dir=None, **options):
    mpdp.seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.BatchNorm1d(5),
        nn.Linear(5, 3),
    )
    return mpdp.Trainer(
        model, nn.cross_entropy, optim.SGD(lr=0.1, momentum=0.9), world=world(), run_dir=run_dir, **options
    )


def test_it_learns_and_evaluates():
    trainer = build()
    history = trainer.fit(data.ArrayDataset(X, Y), epochs=30, global_batch_size=10, metrics=[nn.accuracy])
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    assert trainer.evaluate(data.ArrayDataset(X, Y), metrics=[nn.accuracy])["accuracy"] > 0.8


def test_widening_takes_the_running_statistics_along():
    trainer = build(precision="float64")
    assert all(buffer.dtype == "float64" for _, buffer in trainer.model.named_buffers())
    trainer.fit(data.ArrayDataset(X.astype("float64"), Y), epochs=1, global_batch_size=10)
    assert trainer.evaluate(data.ArrayDataset(X.astype("float64"), Y))["loss"] > 0


def test_a_resumed_run_has_the_running_statistics(tmp_path):
    dataset = data.ArrayDataset(X, Y)
    whole = build()
    whole.fit(dataset, epochs=4, global_batch_size=8)
    first = build(tmp_path / "run")
    first.fit(dataset, epochs=2, global_batch_size=8)
    first.save()
    second = build(tmp_path / "run")
    assert second.resume()
    second.fit(dataset, epochs=4, global_batch_size=8)
    for (name, one), (_, other) in zip(whole.model.named_buffers(), second.model.named_buffers()):
        assert np.array_equal(host(one), host(other)), name
    for (name, one), (_, other) in zip(whole.model.named_parameters(), second.model.named_parameters()):
        assert np.array_equal(host(one), host(other)), name


def test_one_rank_has_no_peers():
    trainer = build()
    assert not trainer.parallel.communicates and trainer.model[1].peers is None
    loss = trainer.step((X[:0], Y[:0]))
    assert loss == 0.0 and host(trainer.model[1].running_mean).tolist() == [0] * 4


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_statistics_are_not_kept_in_16_bits(precision):
    """Of samples far from zero: their squares would not fit float16, nor their variance survive one pass (F4)."""
    x = np.random.default_rng(0).normal(300, 1, (64, 3)).astype("float32")
    norm = nn.BatchNorm1d(3)
    trainer = mpdp.Trainer(
        norm,
        lambda o, t: o.astype("float32").mean(),
        optim.SGD(lr=0.0),
        world=world(),
        precision=precision,
        graph=False,
    )
    seen = []
    forward = norm.forward
    norm.forward = lambda value: seen.append(host(value)) or forward(value)
    trainer.step((x, np.zeros(64)))
    given = seen[0].astype("float64")  # what the precision leaves of the samples
    assert norm.running_mean.dtype == norm.running_var.dtype == np.float32
    np.testing.assert_allclose(host(norm.running_mean.data), 0.1 * given.mean(0), rtol=1e-5)
    np.testing.assert_allclose(host(norm.running_var.data), 0.9 + 0.1 * given.var(0, ddof=1), rtol=1e-4)
