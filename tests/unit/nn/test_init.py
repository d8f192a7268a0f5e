"""Initialisers: moments, fans, and errors."""

import numpy as np
import pytest

from mpdp import nn
from mpdp.nn import init

KEY = (1, 2)


@pytest.mark.parametrize(
    ("initialiser", "mean", "std", "limit"),
    [
        (init.uniform(-1, 3), 1, 4 / np.sqrt(12), None),
        (init.normal(2, 0.5), 2, 0.5, None),
        (init.xavier_uniform(), 0, np.sqrt(2 / 500), np.sqrt(6 / 500)),
        (init.xavier_normal(gain=2), 0, 2 * np.sqrt(2 / 500), None),
        (init.kaiming_uniform(), 0, np.sqrt(2 / 200), np.sqrt(6 / 200)),
        (init.kaiming_normal(gain=1), 0, np.sqrt(1 / 200), None),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_moments(initialiser, mean, std, limit, dtype):
    values = initialiser(KEY, (300, 200), np.dtype(dtype))
    assert values.shape == (300, 200) and values.dtype == dtype
    assert abs(values.mean(dtype="f8") - mean) < 0.01 and abs(values.std(dtype="f8") / std - 1) < 0.02
    assert limit is None or limit * 0.999 < np.abs(values).max() <= limit * (1 + 1e-6)
    assert np.array_equal(values, initialiser(KEY, (300, 200), np.dtype(dtype)))
    assert not np.array_equal(values, initialiser((1, 3), (300, 200), np.dtype(dtype)))


def test_fans_of_a_window():
    values = init.kaiming_normal(gain=1)(KEY, (50, 20, 3, 3), np.dtype("f8"))
    assert abs(values.std() * np.sqrt(180) - 1) < 0.03
    values = init.xavier_normal()(KEY, (50, 20, 3, 3), np.dtype("f8"))
    assert abs(values.std() * np.sqrt(70 * 9 / 2) - 1) < 0.03


def test_constants():
    assert init.zeros(KEY, (2,), "f4").tolist() == [0, 0]
    assert init.ones(KEY, (), "f4") == 1
    assert init.constant(3)(KEY, (0, 2), "f4").shape == (0, 2)


def test_empty_and_scalar_shapes():
    assert init.uniform()(KEY, (), np.dtype("f4")).shape == ()
    assert init.normal()(KEY, (3, 0), np.dtype("f4")).shape == (3, 0)
    assert init.kaiming_uniform()(KEY, (3, 0), np.dtype("f4")).shape == (3, 0)


def test_a_vector_has_no_fans():
    with pytest.raises(
        ValueError, match=r"shape: expected two axes or more .* got \(3,\); use zeros, constant"
    ):
        nn.Linear(2, 3, bias_init=init.kaiming_normal())


def test_what_is_no_initialiser_is_refused():
    with pytest.raises(
        TypeError, match=r"weight_init: expected an initialiser .* got float; use nn.init.constant"
    ):
        nn.Linear(2, 3, weight_init=0.5)
    with pytest.raises(
        TypeError, match=r"bias_init: expected an initialiser that returns an array, got float"
    ):
        nn.Linear(2, 3, bias_init=lambda key, shape, dtype: 0.0)
    with pytest.raises(
        ValueError, match=r"weight_init: expected the initialiser to return float32 \(3, 2\), got f"
    ):
        nn.Linear(2, 3, weight_init=lambda key, shape, dtype: np.zeros(shape))
    with pytest.raises(TypeError, match=r"returns an array, got function from it; call factories first"):
        nn.Linear(2, 3, weight_init=lambda key, shape, dtype: init.constant(1))


def test_parameters_of_ones_own():
    nn.seed(0)
    first = init.parameter(init.normal(), (2, 3), "float64")
    assert first.requires_grad and first.dtype == np.float64
    nn.seed(0)
    assert np.array_equal(nn.Linear(3, 2, weight_init=init.normal(), dtype="float64").weight.data, first.data)
