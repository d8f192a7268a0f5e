"""The trainer in each precision on one rank: files, resuming, evaluation, the log; a plain formula of one update."""

import json

import ml_dtypes
import numpy as np
import pytest
from on_device import host, only_on_the_cpu, put, world

import mpdp
from mpdp import data, nn, optim
from mpdp.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("device")
PRECISIONS = ["float32", "tf32", "bfloat16", "float16"]
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.standard_normal((24, 4)).astype(np.float32), RANDOM.integers(0, 3, 24)


def trainer(precision, optimizer=None, loss=nn.cross_entropy, **options):
    mpdp.seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    if precision == "float16":
        options.setdefault("loss_scale", optim.LossScale(initial=2.0**30, largest=2.0**30, interval=3))
    return mpdp.Trainer(
        model, loss, optimizer or optim.Adam(lr=1e-2), world=world(), precision=precision, **options
    )


def fit(t, updates):
    return t.fit(data.ArrayDataset(X, Y), updates=updates, global_batch_size=10)


def weights(t):
    return [p.numpy().tobytes() for p in t.model.parameters()]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_resumed_after_any_update(tmp_path, precision):
    whole = trainer(precision, run_dir=tmp_path / "whole", save_every=1, keep=99)
    fit(whole, 12)
    for step in (1, 4, 7, 11):
        (path,) = (tmp_path / "whole" / "checkpoints").glob(f"step-{step:010d}-*")
        t = trainer(precision)
        assert t.resume(path) and t.step_count == step
        fit(t, 12)
        assert weights(t) == weights(whole) and t.history == whole.history
        if precision == "float16":
            assert t.parallel.loss_scale.state() == whole.parallel.loss_scale.state()


@pytest.mark.parametrize("there", PRECISIONS)
@pytest.mark.parametrize("here", PRECISIONS)
def test_resumed_in_another_precision(tmp_path, there, here, capfd):
    """Weights and moments are float32 in all four, so they are taken as they are."""
    first = trainer(there, run_dir=tmp_path)
    fit(first, 5)
    first.save()
    second = trainer(here, run_dir=tmp_path)
    assert second.resume()
    assert weights(second) == weights(first)
    for slot, flat in second.optimizer.state.items():
        assert np.array_equal(host(flat), host(first.optimizer.state[slot]))
    said = f'precision="{there}", going on with "{here}"' in capfd.readouterr().err
    assert said == (there != here)
    if here == there == "float16":
        assert second.parallel.loss_scale.state() == first.parallel.loss_scale.state()
    elif here == "float16":
        assert second.parallel.loss_scale.state() == {"value": 2.0**30, "finite": 0, "skipped": 0}
    fit(second, 25)  # float16 first skips some
    assert second.step_count == 25 and weights(second) != weights(first)


def test_float64_and_others_do_not_mix_in_a_checkpoint(tmp_path):
    first = trainer("float64", run_dir=tmp_path)
    fit(first, 2)
    first.save()
    with pytest.raises(
        CheckpointError, match=r"parameter 0.weight is float64\[8, 4\] there, float32\[8, 4\] here"
    ):
        trainer("bfloat16", run_dir=tmp_path).resume()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_checkpoint_holds_float32(tmp_path, precision):
    from safetensors.numpy import load_file

    t = trainer(precision, run_dir=tmp_path)
    fit(t, 3)
    tensors = load_file(t.save() / "part-00000.safetensors")
    assert {a.dtype.name for a in tensors.values()} == {"float32"}
    assert np.array_equal(tensors["weights/0.weight"], t.model.state_dict()["0.weight"])


def test_the_log_shows_the_scale(tmp_path):
    t = trainer("float16", run_dir=tmp_path)
    fit(t, 14)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    rows = [row for row in log if row["kind"] == "step"]
    value, good, skipped = 2.0**30, 0, 0
    for row in rows:  # the scale of the update, and how many were skipped up to it
        assert row["loss_scale"] == value
        overflow = row["skipped"] > skipped
        good = 0 if overflow else good + 1
        value = value / 2 if overflow else value * 2 if good == 3 else value
        good, skipped = good % 3, row["skipped"]
    assert 0 < skipped < 14 and value == t.parallel.loss_scale.value
    assert t.optimizer.updates.tolist() == [14 - skipped] * len(t.optimizer.updates)
    assert json.loads((tmp_path / "config.json").read_text())["loss_scale"]["interval"] == 3
    memory = [row for row in log if row["kind"] == "memory"]
    found = t.memory()
    assert len(memory) == 1 and memory[0]["step"] == 14
    assert all(
        memory[0][part] == found[part] for part in ("parameters", "gradients", "optimizer", "activations")
    )
    plain = trainer("bfloat16", run_dir=tmp_path / "other")
    fit(plain, 1)
    assert "loss_scale" not in json.loads((tmp_path / "other" / "log.jsonl").read_text().splitlines()[0])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_evaluation_runs_in_the_precision_and_adds_in_float64(precision):
    t = trainer(precision)
    fit(t, 3)
    seen = []

    def first_logit(output, target):
        seen.append(output.dtype)
        return float(host(output).astype(np.float64)[:, 0].sum()), len(target)

    found = t.evaluate(data.ArrayDataset(X, Y), metrics=[nn.accuracy, first_logit], global_batch_size=7)
    half = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}.get(precision)
    assert set(seen) == {half or np.dtype(np.float32)}
    t.model.eval()
    exact = host(t.model(put(X)))  # float32, with the masters
    step = {"bfloat16": 0.05, "float16": 0.01, "tf32": 0.01}.get(precision, 1e-5)
    assert abs(found["first_logit"] - exact[:, 0].mean()) < step
    assert abs(found["accuracy"] - (exact.argmax(1) == Y).mean()) <= 2 / 24


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_one_update_is_the_formula(precision):
    """Linear regression: output, slope and weights by hand, with float32 targets that 16 bits could not hold."""
    dtype = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[precision]
    target = (X @ np.ones((4, 3), np.float32)) * np.float32(1.001)
    mpdp.seed(0)
    model = nn.Linear(4, 3)
    w, b = model.weight.data.copy(), model.bias.data.copy()
    scale = optim.LossScale(initial=128.0) if precision == "float16" else None
    t = mpdp.Trainer(model, nn.mse, optim.SGD(lr=0.1), world=world(), precision=precision, loss_scale=scale)
    found = t.step((put(X), put(target)))

    def half(a):
        return a.astype(dtype).astype(np.float32)

    out = half(half(X) @ half(w).T + half(b))
    difference = out - target
    np.testing.assert_allclose(
        found, (difference.astype(float) ** 2).mean(), rtol=1e-6 if world_is_cpu() else 1e-2
    )
    factor = np.float32(2.0**-t.parallel.exponent * (128.0 if scale else 1.0))
    g = half(2 * factor * difference)
    expected = w - 0.1 * (g.T @ half(X)) / factor / target.size, b - 0.1 * g.sum(0) / factor / target.size
    for parameter, array in zip((model.weight, model.bias), expected):
        np.testing.assert_allclose(host(parameter.data), array, atol=1e-6 if world_is_cpu() else 2e-3)


def world_is_cpu():
    return world().device.kind == "cpu"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_empty_shares_and_accumulation(precision):
    """An update without a sample changes nothing, the scale included; two micro-batches are one batch."""
    t = trainer(
        precision, accumulate=2, loss_scale=optim.LossScale(initial=8.0) if precision == "float16" else None
    )
    before = weights(t)
    assert t.step((put(X[:0]), put(Y[:0]))) == 0.0
    assert weights(t) == before and t.step_count == 1
    if precision == "float16":
        assert t.parallel.loss_scale.state() == {"value": 8.0, "finite": 0, "skipped": 0}
    t.step((put(X[:1]), put(Y[:1])))  # the second micro-batch is empty
    assert weights(t) != before and t.parallel.last_count == 1


def test_tf32_is_said_once_on_a_cpu(capfd):
    only_on_the_cpu("it has TF32")
    t = trainer("tf32")
    fit(t, 2)
    assert capfd.readouterr().err.count('"tf32" is float32 on a CPU') == 1
    other = trainer("float32")
    fit(other, 2)
    assert weights(t) == weights(other)


def test_a_plain_loss_needs_float32():
    t = trainer("bfloat16", loss=lambda output, target: (output * output).mean())
    with pytest.raises(TypeError, match=r'output.astype\("float32"\), or take a loss of nn'):
        t.step((put(X), put(Y)))
    t = trainer("bfloat16", loss=lambda output, target: (output.astype("float32") ** 2).mean())
    assert t.step((put(X), put(Y))) > 0


def test_16_bit_layers_are_refused():
    for dtype in ("float16", ml_dtypes.bfloat16):
        name = np.dtype(dtype).name
        with pytest.raises(
            TypeError, match=rf"parameters of dtype float32, got {name} in weight; build the layers"
        ):
            mpdp.Trainer(
                nn.Linear(2, 2, dtype=dtype), nn.mse, optim.SGD(lr=0.1), world=world(), precision=name
            )


def test_checkpointed_blocks_train_to_the_same_bits_in_16_bits():
    found = []
    for again in (False, True):
        t = trainer("bfloat16")
        if again:
            for layer in t.model:
                nn.checkpoint(layer)
        fit(t, 4)
        found.append((weights(t), t.history, t.memory()["activations"]))
    assert found[0][:2] == found[1][:2]
