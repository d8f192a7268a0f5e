"""The average of weights that a trainer keeps: its formula, its place in evaluation, checkpoints, frozen parameters."""

from __future__ import annotations

import numpy as np
import pytest
from on_device import host, put, world

import mpdp
import mpdp.threads
from mpdp import data, nn, optim

pytestmark = pytest.mark.usefixtures("device")
RANDOM = np.random.default_rng(4)
X = RANDOM.standard_normal((24, 4)).astype("float32")
Y = RANDOM.integers(0, 3, 24)


@pytest.fixture(autouse=True)
def _seed():
    yield
    mpdp.seed(0)


def trainer_of(ema=0.8, **options):
    mpdp.seed(2)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    options = {"optimizer": optim.SGD(lr=0.2, momentum=0.9), "world": world(), **options}
    return mpdp.Trainer(model, nn.cross_entropy, options.pop("optimizer"), ema=ema, **options)


def weights_of(trainer):
    trainer.settle()
    return {name: host(p).astype(float) for name, p in trainer.parallel.parameters.items()}


def averages_of(trainer):
    with trainer.averaged():
        return weights_of(trainer)


def close(found, expected, tolerance=1e-6):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance * np.abs(value).max())


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
def test_it_follows_the_formula(precision):
    trainer = trainer_of(precision=precision)
    x = X.astype("float64" if precision == "float64" else "float32")
    expected = weights_of(trainer)
    for i in range(6):
        close(averages_of(trainer), expected)
        rows = slice(4 * i, 4 * i + 4)
        trainer.step((put(x[rows]), put(Y[rows])))
        now = weights_of(trainer)
        expected = {name: 0.8 * value + 0.2 * now[name] for name, value in expected.items()}
    close(averages_of(trainer), expected)


def test_it_starts_from_weights_that_were_set_after_construction():
    trainer = trainer_of()
    dataset = data.ArrayDataset(X, Y)
    assert trainer.evaluate(dataset, ema=True) == trainer.evaluate(dataset)  # nothing is averaged yet
    for parameter in trainer.parallel.parameters.values():
        parameter.data[...] = 0.25
    trainer.step((put(X), put(Y)))
    close(averages_of(trainer), {n: 0.8 * 0.25 + 0.2 * value for n, value in weights_of(trainer).items()})


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_evaluation_by_the_average_is_that_of_a_model_that_has_it(precision):
    trainer = trainer_of(precision=precision)
    for _ in range(5):
        trainer.step((put(X), put(Y)))
    dataset = data.ArrayDataset(X, Y)
    before = [host(trainer.parallel.weights).tobytes(), trainer.evaluate(dataset)]
    by_average = trainer.evaluate(dataset, metrics=[nn.accuracy], ema=True)
    predicted = trainer.predict(X, ema=True)
    other = trainer_of(ema=None, precision=precision)
    for name, value in averages_of(trainer).items():
        other.parallel.parameters[name].data[...] = put(value)
    assert by_average == other.evaluate(dataset, metrics=[nn.accuracy])
    assert np.array_equal(predicted, other.predict(X)) and not np.array_equal(predicted, trainer.predict(X))
    assert by_average["loss"] != before[1]["loss"]
    assert [host(trainer.parallel.weights).tobytes(), trainer.evaluate(dataset)] == before


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_validation_in_fit_by_the_average(precision, tmp_path):
    """What is logged is the average's, and what follows it; what is trained has the same bits."""
    train, test = data.ArrayDataset(X[:16], Y[:16]), data.ArrayDataset(X[16:], Y[16:])
    seen = []

    class Compare(mpdp.Callback):
        def on_validation(self, trainer, metrics):
            options = {"metrics": [nn.accuracy], "global_batch_size": 4}
            assert metrics == trainer.evaluate(test, ema=True, **options)
            seen.append(metrics["loss"] != trainer.evaluate(test, **options)["loss"])

    results = []
    for ema in (False, True):
        plateau = optim.ReduceOnPlateau(patience=0, threshold=0.0)
        trainer = trainer_of(
            0.95, precision=precision, schedule=plateau, run_dir=tmp_path / str(ema), keep_best="validation_loss",
            callbacks=[Compare()] if ema else [],
        )  # fmt: skip
        fed = []
        plateau.observe = fed.append
        options = {"epochs": 6, "global_batch_size": 4, "validation": test, "metrics": [nn.accuracy]}
        history = trainer.fit(train, progress=False, ema=ema, **options)
        assert fed == history and len(history) == 6
        best = min(history, key=lambda row: row["validation_loss"])
        assert int(mpdp.best_checkpoint(tmp_path / str(ema)).name.split("-")[1]) == best["step"]
        results.append((history, weights_of(trainer)))
    assert seen == [True] * 6
    (plain, weights), (averaged, others) = results
    assert [row["loss"] for row in plain] == [row["loss"] for row in averaged]
    assert all(a["validation_loss"] != b["validation_loss"] for a, b in zip(plain, averaged))
    close(others, weights, 0)


def test_validation_by_the_average_needs_both():
    train = data.ArrayDataset(X, Y)
    with pytest.raises(
        ValueError, match=r"ema: expected validation= beside it .*, got none; pass validation"
    ):
        trainer_of().fit(train, epochs=1, global_batch_size=8, ema=True)
    with pytest.raises(ValueError, match=r"ema: expected a trainer that keeps an average .* pass ema=0.999"):
        trainer_of(ema=None).fit(train, epochs=1, global_batch_size=8, validation=train, ema=True)


def test_training_is_the_same_with_and_without():
    runs = []
    for ema in (None, 0.9):
        trainer = trainer_of(ema=ema, precision="bfloat16")
        for _ in range(6):
            trainer.step((put(X), put(Y)))
            if ema:
                trainer.evaluate(data.ArrayDataset(X, Y), ema=True)
        trainer.settle()
        runs.append(host(trainer.parallel.weights).tobytes())
    assert runs[0] == runs[1]


def test_inside_the_block_nothing_trains_or_saves(tmp_path):
    trainer = trainer_of(run_dir=tmp_path)
    trainer.step((put(X), put(Y)))
    dataset = data.ArrayDataset(X, Y)
    calls = {
        "step": lambda: trainer.step((put(X), put(Y))),
        "fit": lambda: trainer.fit(dataset, epochs=1, global_batch_size=8),
        "save": trainer.save,
        "resume": trainer.resume,
        "freeze or thaw": lambda: trainer.freeze("0.bias"),
    }
    before = weights_of(trainer)
    for name, call in calls.items():
        with (
            pytest.raises(
                ValueError, match=rf"{name}: expected a call outside averaged\(\), got one inside it"
            ),
            trainer.averaged(),
        ):
            call()
        close(weights_of(trainer), before, 0)
    with trainer.averaged(), trainer.averaged():  # one inside another is one
        inside = trainer.evaluate(dataset)
        assert trainer.evaluate(dataset, ema=True) == inside
    close(weights_of(trainer), before, 0)


@pytest.mark.parametrize("graph", ["auto", False])
def test_it_goes_through_a_checkpoint_to_the_bit(graph, tmp_path):
    batches = [(put(X[i : i + 6]), put(Y[i : i + 6])) for i in range(12)]
    whole = trainer_of(graph=graph)
    for batch in batches:
        whole.step(batch)
    first = trainer_of(graph=graph, run_dir=tmp_path)
    for batch in batches[:7]:
        first.step(batch)
    first.save()
    second = trainer_of(graph=graph, run_dir=tmp_path)
    assert second.resume()
    for batch in batches[7:]:
        second.step(batch)
    for one, other in ((whole, second),):
        one.settle(), other.settle()
        assert host(one.parallel.weights).tobytes() == host(other.parallel.weights).tobytes()
        averages = [host(t.parallel._replica.average.array).tobytes() for t in (one, other)]
        assert averages[0] == averages[1]


def test_a_checkpoint_with_and_a_trainer_without(tmp_path, capsys):
    first = trainer_of(run_dir=tmp_path / "with")
    second = trainer_of(ema=None, run_dir=tmp_path / "without")
    for trainer in (first, second):
        trainer.step((put(X), put(Y)))
        trainer.save()
    plain = trainer_of(ema=None, run_dir=tmp_path / "with")
    assert plain.resume() and "average of weights is left out" in capsys.readouterr().err
    keeps = trainer_of(run_dir=tmp_path / "without")
    assert keeps.resume() and "no average of weights; it starts from them" in capsys.readouterr().err
    close(averages_of(keeps), weights_of(second), 0)


def test_frozen_parameters_keep_their_averages():
    trainer = trainer_of()
    for _ in range(3):
        trainer.step((put(X), put(Y)))
    before = averages_of(trainer)
    trainer.freeze("0.weight", "2.bias")
    close(averages_of(trainer), before, 0)
    trainer.step((put(X), put(Y)))
    now = weights_of(trainer)
    expected = {name: 0.8 * value + 0.2 * now[name] for name, value in before.items()}
    close(averages_of(trainer), expected)
    trainer.thaw("0.weight")
    close(averages_of(trainer), expected)


def test_an_error_that_is_caught_outside_of_the_block():
    """Ranks that hold slices of the weights cannot put the others' back alone; nothing is computed by the average."""

    def rank():
        trainer = trainer_of(world=mpdp.init(device="cpu"), placement="sharded", precision="bfloat16")
        own = slice(trainer.world.rank, None, trainer.world.size)
        for _ in range(3):
            trainer.step((X[own], Y[own]))
        before = trainer.evaluate(data.ArrayDataset(X, Y))
        with pytest.raises(KeyError), trainer.averaged():
            raise KeyError("mine")
        with pytest.raises(
            ValueError, match=r"averaged: expected a block that no error leaves, got one that was"
        ):
            trainer.parallel(X[own])
        with trainer.averaged():
            pass
        assert trainer.evaluate(data.ArrayDataset(X, Y)) == before
        trainer.step((X[own], Y[own]))

    mpdp.threads.run(rank, 2)


def test_memory_counts_it():
    with_average, without = trainer_of(), trainer_of(ema=None)
    size = with_average.parallel.weights.nbytes
    assert with_average.memory()["optimizer"] == without.memory()["optimizer"] + size


def test_a_loop_of_ones_own():
    mpdp.seed(2)
    parallel = mpdp.DataParallel(nn.Linear(4, 3), world())
    parallel.keep_average(0.5)
    optimizer = optim.SGD(lr=0.1)
    first = host(parallel.model.weight).astype(float)
    parallel.backward(nn.cross_entropy(parallel(put(X)), put(Y)))
    parallel.step(optimizer)
    second = host(parallel.model.weight).astype(float)
    with parallel.averaged():
        np.testing.assert_allclose(host(parallel.model.weight), (first + second) / 2, rtol=0, atol=1e-6)
        parallel.backward(nn.cross_entropy(parallel(put(X)), put(Y)))
        with pytest.raises(ValueError, match=r"step: expected a call outside averaged\(\)"):
            parallel.step(optimizer)


def test_none_is_kept():
    trainer = trainer_of(ema=None)
    with pytest.raises(
        ValueError, match=r"ema: expected a trainer that keeps an average .* pass ema=0.999 to it"
    ):
        trainer.evaluate(data.ArrayDataset(X, Y), ema=True)
