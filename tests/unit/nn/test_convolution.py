"""Convolution and pooling as layers: shapes, default values, names, errors."""

import numpy as np
import pytest
from on_device import here, host, put, xp

from mpdp import nn
from mpdp.autodiff import ops

pytestmark = pytest.mark.usefixtures("device")
random = np.random.default_rng(3)


def test_conv2d():
    layer = nn.Conv2d(4, 6, (3, 2), stride=2, padding=(1, 0), dilation=(2, 1), groups=2).to(here.device)
    assert [(name, p.shape) for name, p in layer.named_parameters()] == [
        ("weight", (6, 2, 3, 2)),
        ("bias", (6,)),
    ]
    x = put(random.standard_normal((2, 4, 9, 8)).astype("float32"))
    options = {"stride": 2, "padding": (1, 0), "dilation": (2, 1), "groups": 2}
    expected = ops.conv2d(x, layer.weight, layer.bias, **options)
    assert np.array_equal(host(layer(x)), host(expected))
    assert np.array_equal(host(layer(x, relu=True)), np.maximum(host(expected), 0))
    assert nn.Conv2d(4, 6, 3, bias=False).bias is None
    assert nn.Conv2d(4, 6, 3, dtype="float64").weight.dtype == np.float64


def test_defaults_are_pytorchs():
    layer = nn.Conv2d(16, 300, 5)
    bound = 1 / np.sqrt(16 * 25)
    for values in (layer.weight.data, layer.bias.data):
        assert np.abs(values).max() <= bound and abs(values.std() / (bound / np.sqrt(3)) - 1) < 0.06


def test_pooling():
    x = xp.arange(2 * 3 * 6 * 6, dtype="float32").reshape(2, 3, 6, 6)
    assert nn.MaxPool2d(2)(x).shape == (2, 3, 3, 3)
    assert nn.MaxPool2d(3, 2, 1)(x).shape == (2, 3, 3, 3)
    assert nn.AvgPool2d((3, 2))(x).shape == (2, 3, 2, 3)
    assert host(nn.AvgPool2d(2, 2, 1)(x))[0, 0, 0, 0] == 0.0
    assert host(nn.MaxPool2d(2)(-x, relu=True)).max() == 0.0
    whole = nn.GlobalAvgPool2d()(x)
    assert np.allclose(host(whole), host(x).mean((2, 3))) and nn.GlobalAvgPool2d()(x[:0]).shape == (0, 3)


BAD = {
    "inputs": (lambda: nn.Conv2d(-1, 2, 3), r"inputs: expected an integer of 0 or more, got -1"),
    "groups": (
        lambda: nn.Conv2d(4, 6, 3, groups=4),
        r"groups: expected a divisor of 4 inputs and 6 outputs, got 4",
    ),
    "size": (lambda: nn.Conv2d(4, 6, 0), r"size: expected an integer of 1 or more, or a pair"),
    "padding": (
        lambda: nn.Conv2d(4, 6, 3, padding=-1),
        r"padding: expected an integer of 0 or more, or a pair",
    ),
    "stride": (
        lambda: nn.MaxPool2d(2, stride=(1, 0)),
        r"stride: expected an integer of 1 or more, .*got \(1, 0\)",
    ),
    "pooling": (lambda: nn.AvgPool2d(1.5), r"size: expected an integer of 1 or more, .*got 1\.5"),
    "axes": (lambda: nn.GlobalAvgPool2d()(xp.zeros((2, 3))), r"x: expected shape \(samples, .*got \(2, 3\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()
