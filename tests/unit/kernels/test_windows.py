"""The CPU's convolution and pooling against plain array calls, in sizes that take several blocks."""

import numpy as np
import pytest

from mpdp.kernels import cpu_windows
from mpdp.kernels.cpu import KERNELS as CPU
from mpdp.kernels.cpu import CpuKernels
from mpdp.kernels.windows import PlainWindows, Windows

random = np.random.default_rng(15)


class Plain(CpuKernels):
    """What a device without forms of its own does, a few samples at a time."""

    window_elements = 20_000
    conv2d = PlainWindows.conv2d
    conv2d_backward = PlainWindows.conv2d_backward
    max_pool2d = PlainWindows.max_pool2d
    max_pool2d_backward = PlainWindows.max_pool2d_backward


plain = Plain()


def test_the_oracle_is_not_what_it_judges():
    for name in ("conv2d", "conv2d_backward", "max_pool2d", "max_pool2d_backward"):
        assert getattr(CpuKernels, name) is not getattr(PlainWindows, name)


CONVOLUTIONS = {
    "several blocks": ((19, 5, 30, 28), (16, 5, 3, 3), Windows((3, 3))),
    "padded": ((9, 8, 30, 28), (12, 8, 3, 3), Windows((3, 3), padding=(1, 2))),
    "dilated": ((9, 8, 30, 28), (12, 8, 3, 2), Windows((3, 2), padding=(2, 1), dilation=(2, 3))),
    "pointwise": ((9, 32, 20, 20), (64, 32, 1, 1), Windows((1, 1))),
    "larger than a block": ((3, 64, 40, 40), (64, 64, 3, 3), Windows((3, 3))),
    "small images": ((100, 40, 4, 6), (8, 40, 3, 3), Windows((3, 3), padding=(0, 1))),
    "small images, pointwise": ((100, 40, 4, 4), (80, 40, 1, 1), Windows((1, 1))),
    "tall": ((7, 4, 200, 8), (6, 4, 5, 1), Windows((5, 1))),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_conv2d(name, dtype):
    shape, kernel, windows = CONVOLUTIONS[name]
    assert cpu_windows._is_wide(shape, windows, 1)
    x, weight = random.standard_normal(shape).astype(dtype), random.standard_normal(kernel).astype(dtype)
    bias = random.standard_normal(kernel[0]).astype(dtype)
    tolerance = {"float32": 1e-5, "float64": 1e-13}[dtype]
    for relu in (False, True):
        out = CPU.conv2d(x, weight, bias, windows, 1, relu)
        expected = plain.conv2d(x, weight, bias, windows, 1, relu)
        assert out.dtype == dtype and np.abs(out - expected).max() <= tolerance * np.abs(expected).max()
        g = random.standard_normal(out.shape).astype(dtype)
        arguments = g, x, weight, expected if relu else None, windows, 1
        found = CPU.conv2d_backward(*arguments, (True, True, True))
        for one, other in zip(found, plain.conv2d_backward(*arguments, (True, True, True))):
            assert one.dtype == other.dtype == dtype and one.shape == other.shape
            assert np.abs(one - other).max() <= tolerance * np.abs(other).max()
        for wants in ((False, True, True), (True, False, False), (False, False, True)):
            for one, other, wanted in zip(CPU.conv2d_backward(*arguments, wants), found, wants):
                assert np.array_equal(one, other) if wanted else one is None


def test_conv2d_leaves_its_inputs_alone():
    shape, kernel, windows = CONVOLUTIONS["padded"]
    inputs = [random.standard_normal(s) for s in (shape, kernel, kernel[:1])]
    out = CPU.conv2d(*inputs, windows, 1, True)
    arrays = [*inputs, out, random.standard_normal(out.shape)]
    before = [a.copy() for a in arrays]
    for a in arrays:
        a.flags.writeable = False
    CPU.conv2d(*inputs, windows, 1, True)
    CPU.conv2d_backward(arrays[4], inputs[0], inputs[1], out, windows, 1, (True, True, True))
    assert all(np.array_equal(a, b) for a, b in zip(arrays, before))


def test_windows_over_the_whole_width_are_for_images_that_are_wider_than_windows():
    for shape, windows in [
        ((2, 3, 8, 8), Windows((8, 8))),
        ((2, 3, 8, 8), Windows((3, 3), stride=(2, 2))),
        ((0, 3, 8, 8), Windows((3, 3))),
    ]:
        assert not cpu_windows._is_wide(shape, windows, 1)
    assert not cpu_windows._is_wide((2, 4, 8, 8), Windows((3, 3)), 2)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(37, 16, 24, 24), (1, 1, 2, 2), (3, 5, 2, 60)])
def test_max_pooling_by_halves(shape, relu):
    windows = Windows((2, 2), (2, 2))
    x = random.integers(-4, 5, shape).astype("float32")  # with ties
    out, saved = CPU.max_pool2d(x, windows, relu)
    expected, kept = plain.max_pool2d(x, windows, relu)
    assert len(saved) == 3 and np.array_equal(out, expected)
    g = random.standard_normal(out.shape).astype("float32")
    found = CPU.max_pool2d_backward(g, saved, windows, relu)
    assert np.array_equal(found, plain.max_pool2d_backward(g, kept, windows, relu))
