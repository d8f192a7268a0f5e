"""Models out of checkpoints without a trainer."""

import json

import numpy as np
import pytest

import mpdp
import mpdp.threads
from mpdp import nn, optim
from mpdp.errors import CheckpointError
from mpdp.training import checkpoint, manifest

SMALL = {
    "mlp": lambda: nn.models.mlp([3, 4, 2]),
    "convnet": lambda: nn.models.convnet(classes=3, size=8),
    "gpt": lambda: nn.models.gpt(
        "chargpt", layers=1, width=12, heads=2, context=8, vocabulary=11, dropout=0.1
    ),
}


def saved(tmp_path, model, **options):
    trainer = mpdp.Trainer(model, nn.cross_entropy, optim.SGD(lr=0.1), run_dir=tmp_path, **options)
    for parameter in model.parameters():
        parameter.data[...] = np.random.default_rng(1).standard_normal(parameter.shape)
    return trainer.save()


@pytest.mark.parametrize("kind", SMALL)
def test_models_of_the_library_need_no_model(tmp_path, kind):
    model = SMALL[kind]()
    path = saved(tmp_path, model)
    mpdp.seed(3)
    before = nn.Linear(2, 2).weight.numpy().copy()
    mpdp.seed(3)
    for source in (tmp_path, path, str(path)):
        found = mpdp.load_model(source)
        assert type(found) is type(model) and not found.training
        state, own = found.state_dict(), model.state_dict()
        assert state.keys() == own.keys() and all(np.array_equal(state[name], own[name]) for name in own)
    assert np.array_equal(nn.Linear(2, 2).weight.numpy(), before)  # parameters made later start as ever
    assert [name for name, _ in found.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_a_widened_model_comes_back_wide(tmp_path):
    model = nn.models.mlp((3, 2))
    saved(tmp_path, model, precision="float64")
    found = mpdp.load_model(tmp_path)
    assert found[0].weight.dtype == np.float64 and np.array_equal(found[0].weight.data, model[0].weight.data)


def averaging(run_dir, precision="float32", placement="replicated", ema=0.5):
    mpdp.seed(1)
    model = nn.Sequential(nn.Linear(40, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 3))
    model[3].bias.requires_grad = False
    return mpdp.Trainer(
        model, nn.cross_entropy, optim.Adam(lr=0.1), run_dir=run_dir, precision=precision, placement=placement, ema=ema
    )  # fmt: skip


def of_its_average(trainer):
    with trainer.averaged():
        return trainer.parallel.state_dict()


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize(
    ("placement", "size"), [("replicated", 1), ("replicated", 3), ("root", 3), ("sharded", 1), ("sharded", 3)]
)
def test_averaged_weights_have_the_bits_of_the_trainer_that_saved(tmp_path, placement, size, precision):
    def rank():
        trainer = averaging(tmp_path, precision, placement)
        for step in range(3):
            x = np.random.default_rng([step, trainer.world.rank]).standard_normal((4, 40))
            trainer.step((x.astype("float64" if precision == "float64" else "float32"), np.arange(4) % 3))
        trainer.save()
        return trainer.parallel.state_dict(), of_its_average(trainer)

    weights, average = mpdp.threads.run(rank, size)[0]
    for expected, ema in ((weights, False), (average, True)):
        model = nn.Sequential(nn.Linear(40, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 3))
        if precision == "float64":
            model = nn.Sequential(
                nn.Linear(40, 300, dtype="float64"), nn.BatchNorm1d(300, dtype="float64"), nn.ReLU(),
                nn.Linear(300, 3, dtype="float64"),
            )  # fmt: skip
        found = mpdp.load_model(tmp_path, model, ema=ema).state_dict()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == value.dtype and found[name].tobytes() == value.tobytes(), name
    assert any(weights[name].tobytes() != average[name].tobytes() for name in weights)


def test_an_average_of_no_update_is_the_weights(tmp_path):
    trainer = averaging(tmp_path)
    trainer.save()
    found = mpdp.load_model(tmp_path, averaging(None, ema=None).model, ema=True).state_dict()
    assert all(np.array_equal(found[name], value) for name, value in of_its_average(trainer).items())


def test_a_checkpoint_without_an_average(tmp_path):
    """Also where an older one has it: asked for is that of the newest."""
    trainer = averaging(tmp_path)
    trainer.step((np.ones((2, 40), "float32"), np.zeros(2, int)))
    first = trainer.save()
    plain = averaging(tmp_path, ema=None)
    assert plain.resume()
    second = plain.save()
    for path in (tmp_path, second):
        with pytest.raises(
            CheckpointError,
            match=rf"checkpoint {second}: expected one with averaged weights, got one without; train with ema=",
        ):
            mpdp.load_model(path, plain.model, ema=True)
    assert mpdp.load_model(first, plain.model, ema=True) is plain.model


def test_averaged_weights_of_a_model_that_is_made_anew(tmp_path):
    model = nn.models.mlp((3, 2))
    trainer = mpdp.Trainer(model, nn.cross_entropy, optim.SGD(lr=0.1), run_dir=tmp_path, ema=0.5)
    for _ in range(3):
        trainer.step((np.ones((2, 3), "float32"), np.zeros(2, int)))
    trainer.save()
    found = mpdp.load_model(tmp_path, ema=True)
    with trainer.averaged():
        assert np.array_equal(found[0].weight.data, model[0].weight.data)
    assert not np.array_equal(found[0].weight.data, model[0].weight.data)


def test_other_models_are_filled(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    saved(tmp_path, model)
    with pytest.raises(
        ValueError, match=r"model: expected one made by nn.models \(.*mlp.*\), got another; pass"
    ):
        mpdp.load_model(tmp_path)
    own = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    assert mpdp.load_model(tmp_path, own) is own
    assert np.array_equal(own[0].weight.data, model[0].weight.data)
    other = nn.Sequential(nn.Linear(3, 5))
    before = other[0].weight.numpy().copy()
    with pytest.raises(CheckpointError, match=r"mismatched: 0.weight .* nothing was loaded"):
        mpdp.load_model(tmp_path, other)
    assert np.array_equal(other[0].weight.data, before)
    with pytest.raises(TypeError, match=r"model: expected an nn.Module, got int"):
        mpdp.load_model(tmp_path, 3)


def test_a_model_that_was_changed_is_not_taken_for_the_original(tmp_path):
    model = nn.models.mlp((3, 4, 2))
    setattr(model, "1", nn.Tanh())
    saved(tmp_path, model)
    with pytest.raises(ValueError, match=r"got a model that was changed afterwards"):
        mpdp.load_model(tmp_path)


def test_a_torn_newest_is_passed_over_and_nothing_at_all_is_said(tmp_path):
    model = nn.models.mlp((3, 2))
    first = saved(tmp_path, model)
    trainer = mpdp.Trainer(model, nn.cross_entropy, optim.SGD(lr=0.1), run_dir=tmp_path)
    assert trainer.resume()
    second = trainer.save()
    (second / checkpoint.MANIFEST).write_bytes(b"")
    assert mpdp.load_model(tmp_path) is not None
    with pytest.raises(CheckpointError, match=str(second)):
        mpdp.load_model(second)
    (first / "part-00000.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"expected a complete one below .*, got none; .*torn one .*; .*part-00000"
    ):
        mpdp.load_model(tmp_path)
    with pytest.raises(CheckpointError, match=r"nowhere"):
        mpdp.load_model(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "made_by",
    [
        {"function": "os.system", "arguments": {"command": "false"}},
        {"function": "mlp", "arguments": {"sizes": [10**9, 10**9]}},
        {"function": "mlp", "arguments": {"sizes": [3, -2]}},
        {"function": "mlp", "arguments": {"sizes": "ab"}},
        {"function": "mlp", "arguments": {"shape": [3, 2]}},
        {"function": "gpt", "arguments": {"preset": "chargpt", "layers": 10**7}},
        {"function": ["mlp"], "arguments": {}},
        {"function": "mlp", "arguments": [3, 2]},
        {},
        7,
    ],
)
def test_no_file_makes_it_call_or_allocate_what_it_likes(tmp_path, made_by):
    path = saved(tmp_path, nn.models.mlp((3, 2)))
    text = json.loads((path / checkpoint.MANIFEST).read_text())
    text["state"]["model"]["made_by"] = made_by
    text["digest"] = manifest.digest(text)
    (path / checkpoint.MANIFEST).write_text(json.dumps(text))
    with pytest.raises(ValueError, match=r"model: expected .*pass model="):
        mpdp.load_model(path)
