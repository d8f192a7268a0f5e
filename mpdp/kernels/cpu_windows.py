"""The CPU's convolution and pooling where plain array calls leave the cache.

Convolution at stride 1: the windows of one sample are copied over the *whole width* of the image, so that each copy is
one run of about H * W numbers and not P runs of Q, at the price of a few columns that nobody reads. What belongs to a
sample (windows, product, bias, ReLU, and in backward all three gradients) is done while it is in the cache.
Measured (32 to 64 channels of 26 x 26, 3 x 3, one core of an AMD EPYC): windows 1.4 ms, product 16 ms for 64 samples.

Part of ``kernels.cpu``, which assembles them; the docstrings are in ``kernels.base``. Shapes as in ``windows``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from .base import Array
from .image_interface import Into
from .precision import is_half, rounded_once, wide
from .windows import Pair, PlainWindows, Windows

_BLOCK = 1 << 17  # elements of the windows and products of a block: 512 KiB of float32 stay in the L2 cache
_COLUMNS = 384  # of a product, at least: fewer would read all weights for little work
_MOST_WASTE = 1.5  # columns computed for each that is read


class CpuWindows(PlainWindows):
    """Convolution and pooling with NumPy. **Local.**"""

    window_elements = _BLOCK

    @rounded_once
    def conv2d(
        self,
        x: Array,
        weight: Array,
        bias: Array | None,
        windows: Windows,
        groups: int,
        relu: bool,
        engine: str = "auto",
    ) -> Array:
        if engine == "cudnn" or not _is_wide(x.shape, windows, groups):
            return super().conv2d(x, weight, bias, windows, groups, relu, engine)
        count = windows.fit(*x.shape[2:])
        out = np.empty((len(x), len(weight), *count), x.dtype)
        rows = _Rows(x, windows, count, len(weight))
        matrix = weight.reshape(len(weight), rows.depth)
        shift = None if bias is None else bias.reshape(-1, 1, 1)
        product = rows.empty(len(weight))
        for part in rows.parts:
            target = out[part]
            result = rows.fit(product, len(weight), len(target))
            np.matmul(matrix, rows.take(part), out=result)
            found = rows.seen(result)
            if shift is not None:
                found = np.add(found, shift, out=target)
            if relu:
                np.maximum(found, 0, out=target)
            elif shift is None:
                target[...] = found
        return out

    def conv2d_backward(
        self,
        g: Array,
        x: Array,
        weight: Array,
        out: Array | None,
        windows: Windows,
        groups: int,
        wants: tuple[bool, bool, bool],
        into: Into = (None, None),
        engine: str = "auto",
    ) -> tuple[Array | None, Array | None, Array | None]:
        if is_half(x.dtype):  # as rounded_once; the sums over samples stay float32
            g, wider, weight = (a.astype(np.float32) for a in (g, x, weight))
            out = None if out is None else out.astype(np.float32)
            gx, gweight, gbias = self.conv2d_backward(g, wider, weight, out, windows, groups, wants)
            return None if gx is None else gx.astype(x.dtype), gweight, gbias
        if not _is_wide(x.shape, windows, groups):
            return super().conv2d_backward(g, x, weight, out, windows, groups, wants)
        want_x, want_weight, want_bias = wants
        count, outputs = windows.fit(*x.shape[2:]), len(weight)
        rows = _Rows(x, windows, count, outputs)
        total = wide(weight.dtype)
        gx = np.empty(x.shape, x.dtype) if want_x else None
        gweight = np.zeros((rows.depth, outputs), total) if want_weight else None
        gbias = np.zeros(outputs, total) if want_bias else None
        # g over the whole width, once for each column of a window and that many pixels later: a product then adds up
        # the columns, and only the rows of a window are left to be added. Zero where nobody reads.
        shifts = rows.broad if want_x else 1
        spread = rows.empty(shifts * outputs)
        turned = weight.transpose(2, 1, 3, 0).reshape(rows.tall * rows.channels, rows.broad * outputs)
        back = rows.empty(len(turned)) if want_x else None
        partial = np.empty((rows.depth, outputs), x.dtype)
        zeroed = 0
        for part in rows.parts:
            here = g[part]
            stacked = rows.fit(spread, shifts * outputs, len(here))
            if zeroed != len(here):  # the first block and the last, which lies elsewhere in this memory
                stacked.fill(0)
                zeroed = len(here)
            gradient = stacked[:outputs]
            seen = rows.seen(gradient)
            if out is None:
                seen[...] = here
            else:
                np.greater(out[part], 0, out=seen)
                seen *= here
            if gbias is not None:
                gbias += gradient.sum(axis=1, dtype=total)
            if gweight is not None:
                gweight += np.matmul(rows.take(part), gradient.T, out=partial)
            if gx is not None and back is not None:
                shifted = stacked.reshape(shifts, outputs, len(here), rows.pitch)
                for i in range(1, shifts):
                    later = i * windows.dilation[1]
                    shifted[i, ..., later:] = shifted[0, ..., :-later]
                sums = rows.fit(back, len(turned), len(here))
                rows.put_back(np.matmul(turned, stacked, out=sums), gx[part])
        if gweight is not None:
            gweight = gweight.T.reshape(weight.shape).astype(weight.dtype, copy=False)
        return gx, gweight, None if gbias is None else gbias.astype(weight.dtype, copy=False)

    # -- pooling by halves: windows of 2 x 2 that do not overlap --------------------------------------------

    def max_pool2d(self, x: Array, windows: Windows, relu: bool) -> tuple[Array, Any]:
        if is_half(x.dtype):
            out, saved = self.max_pool2d(x.astype(np.float32), windows, relu)
            return out.astype(x.dtype), saved
        if not _halves(x.shape, windows):
            return super().max_pool2d(x, windows, relu)
        n, channels, height, width = x.shape
        out = np.empty((n, channels, height // 2, width // 2), x.dtype)
        lower = np.empty((n, channels, height // 2, width), bool)  # which of two rows, then of two columns
        right = np.empty(out.shape, bool)
        for part in _parts(x):
            pairs = x[part].reshape(-1, 2, width)
            top, bottom = pairs[:, 0], pairs[:, 1]
            below = np.greater(bottom, top, out=lower[part].reshape(top.shape)).reshape(-1)
            best = np.maximum(top, bottom).reshape(-1)
            first, second = best[0::2], best[1::2]
            chosen = np.greater(second, first, out=right[part].reshape(-1))
            equal = np.equal(second, first)
            equal &= below[0::2] > below[1::2]  # of equal ones the upper is the first, also on the right
            chosen |= equal
            np.maximum(first, second, out=out[part].reshape(-1))
            if relu:
                np.maximum(out[part], 0, out=out[part])
        return out, (lower, right, out if relu else None)

    @rounded_once
    def max_pool2d_backward(self, g: Array, saved: Any, windows: Windows, relu: bool) -> Array:
        if not isinstance(saved, tuple) or len(saved) != 3:
            return super().max_pool2d_backward(g, saved, windows, relu)
        lower, right, out = saved
        n, channels, half, width = lower.shape
        gx = np.empty((n, channels, 2 * half, width), g.dtype)
        for part in _parts(gx):
            here = g[part] if out is None else self.relu_backward(g[part], out[part])
            here = here.reshape(-1)
            best = np.empty(2 * here.size, g.dtype)
            np.multiply(here, right[part].reshape(-1), out=best[1::2])
            np.subtract(here, best[1::2], out=best[0::2])  # one of the two is 0, so this is exact
            best = best.reshape(-1, width)
            pairs = gx[part].reshape(-1, 2, width)
            np.multiply(best, lower[part].reshape(best.shape), out=pairs[:, 1])
            np.subtract(best, pairs[:, 1], out=pairs[:, 0])
        return gx


class _Rows:
    """The windows of images at stride 1, over the whole width of the padded image, the samples of a block side by side.

    Attributes:
        parts: the samples, block by block; block: samples of the longest one.
        depth: C * I * J.
        pitch: columns of a sample.
    """

    def __init__(self, x: Array, windows: Windows, count: Pair, outputs: int) -> None:
        self.x, self.windows, self.count = x, windows, count
        n, self.channels, height, width = x.shape
        (down, across), (self.tall, self.broad) = windows.padding, windows.size
        self.height, self.width = height + 2 * down, width + 2 * across
        self.depth = self.channels * self.tall * self.broad
        self.pitch = count[0] * self.width
        self.used = (count[0] - 1) * self.width + count[1]  # the rest of the last row lies behind the image
        fitting = _BLOCK // ((self.depth + outputs) * self.pitch)
        self.block = min(n, max(fitting, -(-_COLUMNS // self.pitch)))
        self.parts = [slice(start, start + self.block) for start in range(0, n, self.block)]
        self.pads = bool(down or across)
        self._columns: Array | None = None
        self._view: Array | None = None  # the windows of all images, or of a padded block
        self._image: Array | None = None  # the inside of that block

    def empty(self, depth: int) -> Array:
        """Return memory for ``depth`` rows of a block."""
        return np.empty(depth * self.block * self.pitch, self.x.dtype)

    def fit(self, memory: Array, depth: int, samples: int) -> Array:
        """Return the front of such memory as (depth, samples * pitch)."""
        columns = samples * self.pitch
        return memory[: depth * columns].reshape(depth, columns)

    def seen(self, product: Array) -> Array:
        """Return the pixels of a product (O, N * pitch) that somebody reads, as (N, O, P, Q)."""
        whole = product.reshape(len(product), -1, self.count[0], self.width)
        return whole[..., : self.count[1]].swapaxes(0, 1)

    def take(self, part: slice) -> Array:
        """Return the windows of a block as (C * I * J, N * pitch); what was returned before is overwritten."""
        x = self.x[part]
        if self.windows.pointwise and len(x) == 1:
            return x.reshape(self.channels, self.pitch)
        if self._view is None:
            image = np.ascontiguousarray(self.x)
            if self.pads:
                image = np.zeros((self.block, self.channels, self.height, self.width), self.x.dtype)
                self._image = self._inside(image)
            self._view = self._windows(image)
            self._columns = self.empty(self.depth)
            self._columns.fill(0)  # nobody reads what lies behind a window, but it must be finite
        columns = self.fit(self._columns, self.depth, len(x))
        if self._image is not None:
            self._image[: len(x)] = x
            view = self._view[: len(x)]
        else:
            view = self._view[part]
        shape = (self.channels, self.tall, self.broad, len(x), self.pitch)
        columns.reshape(shape)[..., : self.used] = view.transpose(1, 2, 3, 0, 4)
        return columns

    def _windows(self, image: Array) -> Array:
        """Return a view (N, C, I, J, used) of contiguous images."""
        (down, across), size = self.windows.dilation, image.itemsize
        shape = (len(image), self.channels, self.tall, self.broad, self.used)
        per_image, per_channel, per_row, _ = image.strides
        return as_strided(image, shape, (per_image, per_channel, per_row * down, size * across, size))

    def put_back(self, columns: Array, out: Array) -> None:
        """Write to ``out`` (N, C, H, W) the sums over the rows of a window: columns is (I * C, N * pitch)."""
        n = len(out)
        image = out
        if self.pads:
            image = np.empty((n, self.channels, self.height, self.width), out.dtype)
        flat = image.reshape(n, self.channels, self.height * self.width)
        pieces = columns.reshape(self.tall, self.channels, n, self.pitch).swapaxes(1, 2)
        flat[..., self.pitch :] = 0
        flat[..., : self.pitch] = pieces[0]
        for i in range(1, self.tall):
            start = i * self.windows.dilation[0] * self.width
            place = flat[..., start : start + self.pitch]
            np.add(place, pieces[i], out=place)
        if self.pads:
            out[...] = self._inside(image)

    def _inside(self, image: Array) -> Array:
        (down, across), (height, width) = self.windows.padding, self.x.shape[2:]
        return image[:, :, down : down + height, across : across + width]


def _is_wide(shape: tuple[int, ...], windows: Windows, groups: int) -> bool:
    """Return whether windows over the whole width are the better ones."""
    width = shape[3] + 2 * windows.padding[1]
    return (
        groups == 1
        and windows.stride == (1, 1)
        and math.prod(shape) > 0
        and width <= _MOST_WASTE * windows.fit(*shape[2:])[1]
    )


def _halves(shape: tuple[int, ...], windows: Windows) -> bool:
    return (
        windows.size == windows.stride == (2, 2)
        and windows.padding == (0, 0)
        and windows.dilation == (1, 1)
        and shape[2] % 2 == shape[3] % 2 == 0
        and math.prod(shape) > 0
    )


def _parts(x: Array) -> list[slice]:
    """Cut samples into parts that fit the cache."""
    size = max(1, _BLOCK // (math.prod(x.shape[1:]) or 1))
    return [slice(start, start + size) for start in range(0, len(x), size)]
