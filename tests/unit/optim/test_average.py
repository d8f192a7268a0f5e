"""The moving average of weights: its formula, and its exchange with the weights."""

from __future__ import annotations

import numpy as np
import pytest
from on_device import here, host, put

from mpdp.optim import WeightAverage
from mpdp.optim.held import HeldArray

pytestmark = pytest.mark.usefixtures("device")
RANDOM = np.random.default_rng(2)


def bound(weights, decay=0.9):
    average = WeightAverage(decay)
    average.bind(weights, here.kernels)
    return average


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-14), (np.float32, 3e-6)])
@pytest.mark.parametrize("size", [0, 1, 1000, 300_000])
def test_formula(dtype, tolerance, size):
    weights = put(RANDOM.standard_normal(size).astype(dtype))
    average = bound(weights)
    average.start()
    expected = host(weights).astype(float)
    for t in range(5):
        weights[...] = put(RANDOM.standard_normal(size).astype(dtype))
        average.start()  # it has begun
        average.update(put(np.int64(t != 3)))
        if t != 3:
            expected = 0.9 * expected + 0.1 * host(weights)
    np.testing.assert_allclose(host(average.array), expected, rtol=0, atol=tolerance * 4)


def test_parts_of_weights_have_the_bits_of_the_whole():
    whole = RANDOM.standard_normal(5000).astype(np.float32)
    ranges = [(0, 1000), (1500, 1501), (4000, 5000)]
    weights = put(whole.copy())
    held = HeldArray(ranges, put(np.concatenate([whole[a:b] for a, b in ranges])))
    averages = [bound(weights), bound(held)]
    for average in averages:
        average.start()
    weights *= 0.5
    held.array *= 0.5
    for average in averages:
        average.update()
    assert isinstance(averages[1].array, HeldArray)
    for a, b in ranges:
        assert host(averages[0].array)[a:b].tobytes() == host(averages[1].array[a:b]).tobytes()
    before = [host(held.array).tobytes(), host(averages[1].array.array).tobytes()]
    averages[1].swap()
    assert [host(averages[1].array.array).tobytes(), host(held.array).tobytes()] == before
    averages[1].swap()
    assert [host(held.array).tobytes(), host(averages[1].array.array).tobytes()] == before


def test_an_exchange_before_the_beginning_is_none():
    weights = put(np.ones(10))
    average = bound(weights)
    average.swap()
    assert average.swapped and (host(weights) == 1).all()
    average.swap()
    weights[...] = 3.0
    average.start()
    assert (host(average.array) == 3).all()


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5, 1.5, float("nan")])
def test_decays_that_average_nothing(decay):
    with pytest.raises(ValueError, match=r"ema: expected a number between 0 and 1, got .*; 0.999 is usual"):
        WeightAverage(decay)


@pytest.mark.parametrize("decay", ["0.9", True, None])
def test_decays_that_are_no_numbers(decay):
    with pytest.raises(TypeError, match=r"ema: expected a number between 0 and 1, got"):
        WeightAverage(decay)
