"""Layers: shapes, default values as PyTorch's, dropout masks that follow the samples."""

import copy
import pickle

import numpy as np
import pytest
from on_device import here, host, put, xp

from mpdp import nn
from mpdp.autodiff import SampleContext, Tensor, ops, samples
from mpdp.kernels.random import dropout_mask

pytestmark = pytest.mark.usefixtures("device")
random = np.random.default_rng(2)


def test_linear():
    layer = nn.Linear(3, 2)
    assert layer.weight.shape == (2, 3) and layer.bias.shape == (2,) and layer.weight.dtype == np.float32
    x = random.standard_normal((4, 5, 3)).astype("f4")
    expected = x @ layer.weight.data.T + layer.bias.data
    assert np.allclose(host(layer.to(here.device)(put(x))), expected, atol=1e-6)
    assert nn.Linear(3, 2, bias=False).bias is None
    assert nn.Linear(3, 2, dtype="float64").bias.dtype == np.float64
    assert nn.Linear(0, 2).to(here.device)(xp.zeros((3, 0), "f4")).shape == (3, 2)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_linear_with_an_activation(activation):
    nn.seed(3)
    plain = nn.Linear(6, 5).to(here.device)
    nn.seed(3)
    layer = nn.Linear(6, 5, activation=activation).to(here.device)
    x = put(random.standard_normal((4, 3, 6)).astype("f4"))
    expected = getattr(plain(x), activation)()
    assert host(layer.weight).tobytes() == host(plain.weight).tobytes()
    np.testing.assert_allclose(host(layer(x)), host(expected), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r'activation: expected None, "relu" or "gelu", got \'silu\''):
        nn.Linear(6, 5, activation="silu")


class _Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def test_sequential_computes_pairs_in_one_pass(monkeypatch):
    layers = [nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.GELU(), nn.GELU(), _Doubled(4, 4), nn.ReLU(),
              nn.Linear(4, 3, activation="relu"), nn.ReLU(), nn.checkpoint(nn.Linear(3, 3)), nn.ReLU(),
              nn.Linear(3, 2)]  # fmt: skip
    model = nn.Sequential(*layers).to(here.device)
    x = put(random.standard_normal((7, 6)).astype("f4"))
    expected = x
    for layer in layers:
        expected = layer(expected)
    seen = []
    plain = ops.linear.forward

    def spy(k, *arrays, activation=None):
        seen.append(activation)
        return plain(k, *arrays, activation=activation)

    monkeypatch.setattr(ops.linear, "forward", spy)
    np.testing.assert_allclose(host(model(x)), host(expected), rtol=0, atol=1e-6)
    assert seen == ["relu", "gelu", None, "relu", None, None]


def test_defaults_are_pytorchs():
    nn.seed(0)
    layer = nn.Linear(400, 300)
    bound = 1 / np.sqrt(400)
    for values in (layer.weight.data, layer.bias.data):
        assert np.abs(values).max() <= bound and abs(values.std() / (bound / np.sqrt(3)) - 1) < 0.06
    table = nn.Embedding(200, 100).weight.data
    assert abs(table.mean()) < 0.03 and abs(table.std() - 1) < 0.03
    norm = nn.LayerNorm((2, 3))
    assert norm.weight.data.tolist() == [[1, 1, 1]] * 2 and norm.bias.data.tolist() == [[0, 0, 0]] * 2


def test_initialisers_may_be_chosen():
    layer = nn.Linear(3, 2, weight_init=nn.init.constant(2), bias_init=nn.init.zeros)
    assert layer.weight.data.tolist() == [[2] * 3] * 2 and layer.bias.data.tolist() == [0, 0]
    assert nn.Embedding(3, 2, weight_init=nn.init.ones).weight.data.sum() == 6
    assert nn.LayerNorm(3, weight_init=nn.init.zeros, bias_init=nn.init.ones).bias.data.sum() == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(-1, 2), r"inputs: expected an integer of 0 or more, got -1; pass"),
        (lambda: nn.Linear(2, 2.5), r"outputs: expected an integer of 0 or more, got 2.5"),
        (lambda: nn.Embedding(True, 2), r"count: expected an integer of 0 or more, got True"),
        (lambda: nn.Embedding(2, None), r"width: expected an integer of 0 or more, got None"),
        (lambda: nn.LayerNorm((2, -3)), r"shape: expected an integer of 0 or more, got -3"),
        (lambda: nn.Dropout(1.0), r"p: expected a probability in \[0, 1\), got 1.0"),
    ],
)
def test_sizes_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_embedding_and_layer_norm():
    table = nn.Embedding(5, 3)
    rows = table.weight.data[[[4, 0]]]
    assert np.array_equal(host(table.to(here.device)(put([[4, 0]]))), rows)
    x = random.standard_normal((2, 4)).astype("f4")
    out = host(nn.LayerNorm(4).to(here.device)(put(x)))
    assert np.allclose(
        out, (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5), atol=1e-5
    )


def test_activations_and_flatten():
    x = put([[-1.0, 2.0]])
    assert nn.ReLU()(x).data.tolist() == [[0, 2]]
    assert np.allclose(host(nn.Tanh()(x)), np.tanh(host(x)))
    assert np.allclose(host(nn.GELU()(x)), [[-0.15880801, 1.95459769]])
    assert nn.Flatten()(xp.zeros((2, 3, 4))).shape == (2, 12)
    assert nn.Flatten()(xp.zeros((0, 3, 4))).shape == (0, 12)
    assert nn.Flatten()(xp.zeros(3)).shape == (3, 1)


def test_sequential():
    model = nn.Sequential(nn.Linear(3, 4), lambda x: abs(x), nn.Sequential(nn.Linear(4, 2)))
    assert [name for name, _ in model.named_parameters()] == [
        "0.weight", "0.bias", "2.0.weight", "2.0.bias",
    ]  # fmt: skip
    assert len(model) == 3 and model[0] is next(iter(model))
    assert model.to(here.device)(xp.zeros((5, 3), "f4")).shape == (5, 2)
    assert nn.Sequential()(3) == 3
    with pytest.raises(
        TypeError, match=r"layers: expected modules or functions, got list at 1; pass them as sep"
    ):
        nn.Sequential(nn.ReLU(), [nn.ReLU()])


def test_models_are_copied_and_pickled():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.LayerNorm(4)).to(here.device)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        state = twin.state_dict()
        assert all(np.array_equal(value, state[name]) for name, value in model.state_dict().items())
        twin[0].weight.data[...] = 0
    assert np.abs(host(model[0].weight)).max() > 0


# -- dropout -----------------------------------------------------------------------------------------------


def dropped(layer, x, **context):
    with samples(SampleContext(**context)):
        return host(layer(put(x)))


def test_masks_are_the_public_ones():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.3)).bind_names()
    x = random.standard_normal((4, 6)).astype("f4")
    out = dropped(model[1], x, seed=5, step=7, start=10, count=4)
    mask = dropout_mask(5, "1", 7, 10, (4, 6), 0.3)
    assert out.dtype == np.float32 and np.allclose(out, np.where(mask, x / 0.7, 0), rtol=1e-6, atol=0)


def test_masks_do_not_depend_on_the_shares():
    layer = nn.Dropout(0.5)
    layer.path = "drop"
    x = random.standard_normal((7, 3, 2))
    whole = dropped(layer, x, seed=1, step=2, start=3, count=7)
    parts = [
        dropped(layer, x[a:b], seed=1, step=2, start=3 + a, count=b - a) for a, b in ((0, 3), (3, 3), (3, 7))
    ]
    assert np.array_equal(np.concatenate(parts), whole)
    rows = [
        dropped(layer, x[a:b].reshape(-1, 2), seed=1, step=2, start=3 + a, count=b - a)
        for a, b in ((0, 3), (3, 7))
    ]
    assert np.array_equal(np.concatenate(rows), whole.reshape(-1, 2))


def test_calls_in_one_forward_pass_differ_and_passes_repeat():
    layer = nn.Dropout(0.5).bind_names()
    x = xp.ones((4, 50))

    def twice():
        with samples(SampleContext(0, 0, 0, 4)):
            return host(layer(x)), host(layer(x))

    first, second = twice()
    assert not np.array_equal(first, second)
    assert np.array_equal(first, twice()[0]) and np.array_equal(second, twice()[1])
    assert np.array_equal(second != 0, dropout_mask(0, "", 0, 0, (4, 50), 0.5, call=1))


def test_gradient_goes_through_the_mask():
    layer = nn.Dropout(0.5).bind_names()
    x = Tensor(xp.ones((4, 5)), requires_grad=True)
    with samples(SampleContext(0, 0, 0, 4)):
        out = layer(x)
    out.sum().backward()
    assert np.array_equal(host(x.grad), host(out))


def test_a_leading_length_that_does_not_fit_is_refused():
    with pytest.raises(
        ValueError, match=r"samples: expected a leading length that is a multiple of the 4 samples"
    ):
        dropped(nn.Dropout(), np.ones((5, 2)), seed=0, step=0, start=0, count=4)


def test_evaluation_and_zero_probability_pass_through():
    x = xp.ones((4, 5))
    assert nn.Dropout(0.5).eval()(x) is x and nn.Dropout(0.0)(x) is x


def test_without_a_context_masks_follow_the_seed_and_the_calls():
    x = xp.ones((4, 50))

    def run():
        nn.seed(3)
        a, b = nn.Dropout(), nn.Dropout()
        return [host(a(x)), host(a(x)), host(b(x))]

    one, two = run(), run()
    assert all(np.array_equal(p, q) for p, q in zip(one, two))
    assert not np.array_equal(one[0], one[1]) and not np.array_equal(one[0], one[2])
    named = nn.Sequential(nn.Dropout()).bind_names()
    assert np.array_equal(host(named(x)) != 0, dropout_mask(3, "0", 0, 0, (4, 50), 0.5))
