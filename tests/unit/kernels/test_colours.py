"""Folding and padding of colour images, with NumPy in the place of the kernels of a GPU, which test_images runs."""

import numpy as np
import pytest

from mpdp.kernels.cpu import KERNELS as CPU
from mpdp.kernels.cuda_colours import CudaColours
from mpdp.kernels.windows import Windows

random = np.random.default_rng(3)


class OnNumPy(CudaColours):
    """The preparation of operands without a GPU."""

    xp = np

    def __init__(self):
        pass

    def flat(self, x):
        return np.ascontiguousarray(x)

    def turned(self, x, padded):
        out = np.zeros((len(x), *x.shape[2:], padded), x.dtype)
        out[..., : x.shape[1]] = x.transpose(0, 2, 3, 1)
        return out

    def _images(
        self, name, dtype, vector, work, x, out, n, channels, height, width, rows, columns, top, left, *, wide
    ):
        assert (
            name == "folded"
            and not wide
            and work == n * rows * columns
            and out.shape == (n, rows, columns, 2 * vector)
        )
        out[...] = 0
        for u, v, pixel in np.ndindex(rows, columns, 4):
            y, z = 2 * u - top + pixel // 2, 2 * v - left + pixel % 2
            if 0 <= y < height and 0 <= z < width:
                out[:, u, v, pixel * channels : (pixel + 1) * channels] = x[:, :, y, z]


CONVOLUTIONS = {
    "ResNet's first": ((2, 3, 30, 30), (8, 3, 7, 7), Windows((7, 7), (2, 2), (3, 3)), (2, 18, 18, 16)),
    "no padding": ((2, 4, 11, 14), (8, 4, 3, 2), Windows((3, 2), (2, 2)), (2, 6, 7, 16)),
    "uneven": ((2, 2, 13, 12), (8, 2, 5, 4), Windows((5, 4), (2, 2), (1, 2)), (2, 8, 8, 16)),
    "padded": ((2, 3, 9, 8), (8, 3, 3, 3), Windows((3, 3), (1, 1), (1, 1)), (2, 9, 8, 8)),
    "padded, a window of one pixel": ((2, 3, 9, 8), (8, 3, 1, 1), Windows((1, 1), (2, 2)), (2, 9, 8, 8)),
    "padded, too many to fold": ((2, 5, 9, 8), (8, 5, 3, 3), Windows((3, 3), (2, 2)), (2, 9, 8, 8)),
    "as it is": ((2, 8, 9, 8), (8, 8, 3, 3), Windows((3, 3), (2, 2)), (2, 9, 8, 8)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_what_is_prepared_gives_the_same_convolution(name):
    shape, kernel, windows, images = CONVOLUTIONS[name]
    x, weight = (random.integers(-8, 9, s).astype(np.float16) for s in (shape, kernel))
    prepared = OnNumPy().prepared(x, weight, windows, 1)
    assert prepared.images.shape == images
    turned = prepared.images.transpose(0, 3, 1, 2)
    expected = CPU.conv2d(x.astype(float), weight.astype(float), None, windows, 1, False)
    found = CPU.conv2d(turned.astype(float), prepared.weight.astype(float), None, prepared.windows, 1, False)
    assert np.array_equal(found, expected)
    # and its weight gradient, taken back
    g = random.integers(-8, 9, expected.shape).astype(float)
    wants = False, True, False
    _, exact, _ = CPU.conv2d_backward(g, x.astype(float), weight.astype(float), None, windows, 1, wants)
    _, other, _ = CPU.conv2d_backward(
        g, turned.astype(float), prepared.weight.astype(float), None, prepared.windows, 1, wants
    )
    assert np.array_equal(OnNumPy().unprepared(other, weight, windows), exact)
