"""Metrics are sums and counts."""

import numpy as np
import pytest
from on_device import found_later, put, xp

from mpdp import nn
from mpdp.autodiff import Tensor

pytestmark = pytest.mark.usefixtures("device")
OUTPUT = np.array([[0.1, 0.9], [0.8, 0.2], [0.5, 0.5], [0.3, 0.7]])


@pytest.mark.parametrize("wrap", [put, lambda values: Tensor(put(values))], ids=["array", "tensor"])
def test_accuracy(wrap):
    right, counted = nn.accuracy(wrap(OUTPUT), wrap([1, 1, 0, -100]))
    assert (float(right), float(counted)) == (2, 3)
    assert right.dtype == counted.dtype == np.float64 and right.shape == counted.shape == ()


def test_accuracy_of_more_axes_and_none():
    assert [float(v) for v in nn.accuracy(put(OUTPUT.reshape(2, 2, 2)), put([[1, 0], [0, 1]]))] == [4, 4]
    assert [float(v) for v in nn.accuracy(put(OUTPUT[:0]), xp.zeros(0, np.int64))] == [0, 0]
    assert [float(v) for v in nn.accuracy(put(OUTPUT), put([0, 0, 0, 1]), ignore_index=0)] == [1, 1]
    assert nn.accuracy.__name__ == "accuracy"


def test_bad_targets():
    with found_later(ValueError, match=r"target: expected class indices in 0..1, got 2 at sample 3; check"):
        nn.accuracy(put(OUTPUT), put([0, 0, 0, 2]))
    with pytest.raises(ValueError, match=r"target: expected shape \(4,\) for an output of shape \(4, 2\)"):
        nn.accuracy(put(OUTPUT), xp.zeros((4, 2), np.int64))
    with pytest.raises(TypeError, match=r"target: expected integer class indices, got float64"):
        nn.accuracy(put(OUTPUT), xp.zeros(4))
