"""Images of few channels as a GPU's convolutions want them: padded, or folded where windows move by two pixels.

Matrix units take 8 channels of 16 bits at a time, and a colour image has 3. A convolution of stride 2 is one of stride
1 over blocks of 2 x 2 pixels: their 12 numbers become channels, and a window of 7 x 7 becomes one of 4 x 4, with zeros
in its first row and column. That is the same sum in another order, with two thirds of the products of padding to 8.

Part of ``kernels.cuda``. Shapes: N samples, C channels, O outputs, H x W pixels, I x J the window.
"""

from __future__ import annotations

from typing import NamedTuple

from .base import Array
from .cuda_layouts import MOST_NARROW, CudaLayouts
from .precision import is_half
from .windows import Windows

_PADDED = 8  # channels
_FOLDED = 16  # of 2 x 2 pixels of up to 4


class Prepared(NamedTuple):
    """What a convolution is given.

    Attributes:
        images: channels last.
        weight: in C order.
        windows: over these images.
    """

    images: Array
    weight: Array
    windows: Windows


class CudaColours(CudaLayouts):
    """Preparation of images and weights for a convolution, and of its weight gradient. **Local.**"""

    def prepared(self, x: Array, weight: Array, windows: Windows, groups: int) -> Prepared:
        """Return operands of a convolution with the same result."""
        weight, channels = self.flat(weight), x.shape[1]
        if groups > 1 or channels >= _PADDED or not is_half(x.dtype):
            return Prepared(self.channels_last(x), weight, windows)
        xp, outputs = self.xp, len(weight)
        if not _folds(channels, windows):
            padded = xp.zeros((outputs, _PADDED, *weight.shape[2:]), weight.dtype)
            padded[:, :channels] = weight
            return Prepared(self.turned(x, _PADDED), padded, windows)
        n, _, height, width = x.shape
        (down, across), inner, before = windows.fit(height, width), _blocks(windows), _before(windows)
        rows, columns = down + inner[0] - 1, across + inner[1] - 1
        images = xp.empty((n, rows, columns, _FOLDED), x.dtype)
        self._images(
            "folded", x.dtype, _FOLDED // 2, n * rows * columns,
            self.flat(x), images, n, channels, height, width, rows, columns,
            windows.padding[0] + before[0], windows.padding[1] + before[1],
            wide=max(x.size, images.size) >= MOST_NARROW,
        )  # fmt: skip
        whole = xp.zeros((outputs, channels, 2 * inner[0], 2 * inner[1]), weight.dtype)
        _inside(whole, windows)[...] = weight
        blocks = whole.reshape(outputs, channels, inner[0], 2, inner[1], 2).transpose(0, 3, 5, 1, 2, 4)
        folded = xp.zeros((outputs, _FOLDED, *inner), weight.dtype)
        folded[:, : 4 * channels] = blocks.reshape(outputs, 4 * channels, *inner)
        return Prepared(images, folded, Windows(inner))

    def unprepared(self, gradient: Array, weight: Array, windows: Windows) -> Array:
        """Return the gradient of the weight from that of the prepared one."""
        channels = weight.shape[1]
        if gradient.shape == weight.shape:
            return gradient
        if not _folds(channels, windows):
            return gradient[:, :channels]
        inner = _blocks(windows)
        blocks = gradient[:, : 4 * channels].reshape(len(weight), 2, 2, channels, *inner)
        whole = blocks.transpose(0, 3, 4, 1, 5, 2).reshape(len(weight), channels, 2 * inner[0], 2 * inner[1])
        return _inside(whole, windows)


def _folds(channels: int, windows: Windows) -> bool:
    return (
        4 * channels <= _FOLDED and windows[1:] == ((2, 2), windows.padding, (1, 1)) and min(windows.size) > 1
    )


def _before(windows: Windows) -> tuple[int, int]:
    """Return the pixels by which a window is enlarged, so that it begins with a block."""
    return windows.padding[0] % 2, windows.padding[1] % 2


def _blocks(windows: Windows) -> tuple[int, int]:
    """Return the blocks of 2 x 2 pixels that a window reaches, down and across."""
    down, across = _before(windows)
    return -(-(windows.size[0] + down) // 2), -(-(windows.size[1] + across) // 2)


def _inside(whole: Array, windows: Windows) -> Array:
    """Return the part of enlarged windows that belongs to the weight."""
    down, across = _before(windows)
    return whole[:, :, down : down + windows.size[0], across : across + windows.size[1]]
