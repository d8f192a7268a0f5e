"""The GPT: causality, tied head, sizes, gradients against differences."""

import numpy as np
import pytest

import mpdp
from mpdp import autodiff, nn
from mpdp.nn.models import GPT


def build(dtype="float64"):
    mpdp.seed(0)
    return GPT(layers=2, width=12, heads=3, context=6, vocabulary=9, dtype=dtype)


def test_a_token_sees_only_what_stands_before_it():
    model = build()
    index = np.random.default_rng(0).integers(0, 9, (2, 6))
    changed = index.copy()
    changed[:, 4] = (changed[:, 4] + 1) % 9
    before, after = model(index).data, model(changed).data
    assert np.array_equal(before[:, :4], after[:, :4])
    assert not np.array_equal(before[:, 4:], after[:, 4:])
    np.testing.assert_allclose(model(index[:, :3]).data, before[:, :3], rtol=1e-12)


def test_the_head_is_the_token_table():
    names = [name for name, _ in build().named_parameters()]
    assert names[0] == "tokens.weight"
    assert not any("head" in name for name in names)
    assert len(names) == 2 + 2 * 12 + 2


def test_gradients():
    model = build()
    index = np.random.default_rng(1).integers(0, 9, (2, 5))
    target = np.random.default_rng(2).integers(0, 9, (2, 5))
    parameters = list(model.parameters())

    def loss(*arrays):
        for parameter, array in zip(parameters, arrays):
            parameter.data = array.data if isinstance(array, autodiff.Tensor) else array
        return nn.cross_entropy(model(index), target).sum

    nn.cross_entropy(model(index), target).sum.backward()
    gradients = [p.grad.copy() for p in parameters]
    values = [p.data.copy() for p in parameters]
    random = np.random.default_rng(3)
    directions = [random.standard_normal(v.shape) for v in values]
    eps = 1e-6
    high = float(loss(*[v + eps * d for v, d in zip(values, directions)]).data)
    low = float(loss(*[v - eps * d for v, d in zip(values, directions)]).data)
    expected = sum(float((g * d).sum()) for g, d in zip(gradients, directions))
    assert (high - low) / (2 * eps) == pytest.approx(expected, rel=1e-6)


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"width: expected a multiple of heads=5, got 12"):
        GPT(1, 12, 5, 4, 4)
    with pytest.raises(ValueError, match=r"index: expected at most 6 tokens a sequence, got 7"):
        build()(np.zeros((1, 7), int))
