"""Convolution and pooling with plain array calls: what every device can do, and the oracle of what one does better.

Windows are strided views of the padded input; a convolution is a matrix product of the weights with the copied
windows, some samples at a time. NumPy and CuPy go the same way here. ``cpu_windows`` holds the fast forms of the CPU.

Shapes: N samples, C channels in, O out, H x W pixels in, P x Q out, I x J the window, G groups.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .base import Array, Kernels, Shape
from .image_interface import Into
from .precision import wide

Pair = tuple[int, int]


class Windows(NamedTuple):
    """Where the windows of a convolution or a pooling lie; each pair is (down, across).

    Attributes:
        size: I and J.
        stride: pixels between neighbouring windows.
        padding: pixels added on each side.
        dilation: pixels between neighbours inside a window.
    """

    size: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    def fit(self, height: int, width: int) -> Pair:
        """Return P and Q for an image of H x W; 0 or less where no window fits. **Local.**"""
        return self._fit(0, height), self._fit(1, width)

    def _fit(self, axis: int, length: int) -> int:
        reach = self.dilation[axis] * (self.size[axis] - 1) + 1
        return (length + 2 * self.padding[axis] - reach) // self.stride[axis] + 1

    def parts(self, count: Pair) -> list[tuple[slice, slice]]:
        """Return, for each place in a window, row by row, the pixels of the padded image that lie there. **Local.**"""
        (down, across), (step_down, step_across) = self.dilation, self.stride
        return [
            (
                slice(i * down, i * down + (count[0] - 1) * step_down + 1, step_down),
                slice(j * across, j * across + (count[1] - 1) * step_across + 1, step_across),
            )
            for i in range(self.size[0])
            for j in range(self.size[1])
        ]

    @property
    def pointwise(self) -> bool:
        """Whether a window is one pixel, and every pixel has one."""
        return self.size == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0)


class PlainWindows(Kernels):
    """Convolution and pooling for any array module. **Local.**"""

    window_elements = 1 << 26  # copied at once

    # -- convolution ---------------------------------------------------------------------------------------

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
        if engine == "cudnn":
            raise ValueError(
                f'engine: expected "auto" or "plain" on {self.device}, got "cudnn"; cuDNN needs a GPU'
            )
        n, _, height, width = x.shape
        count, outputs = windows.fit(height, width), len(weight)
        out = self.xp.empty((n, outputs, *count), x.dtype)
        rows = weight.reshape(groups, outputs // groups, math.prod(weight.shape[1:]))
        for part in self._samples(x, weight, count):
            product = self.gemm(rows, self._columns(x[part], windows, count, groups))
            out[part] = product.reshape(outputs, -1, *count).swapaxes(0, 1)
        if bias is not None:
            out += bias.reshape(-1, 1, 1)
        if relu:
            self.xp.maximum(out, 0, out=out)
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
        want_x, want_weight, want_bias = wants
        if out is not None:
            g = self.relu_backward(g, out)
        channels = x.shape[1]
        count, outputs = windows.fit(*x.shape[2:]), len(weight)
        rows = weight.reshape(groups, outputs // groups, math.prod(weight.shape[1:]))
        gx = self.xp.zeros(x.shape, x.dtype) if want_x else None
        gweight = self.xp.zeros(rows.shape, wide(weight.dtype)) if want_weight else None
        for part in self._samples(x, weight, count):
            here = g[part].swapaxes(0, 1).reshape(groups, outputs // groups, -1)
            if gweight is not None:
                columns = self._columns(x[part], windows, count, groups)
                self.gemm(here, columns.swapaxes(-1, -2), gweight, 1.0)
            if gx is not None:
                columns = self.gemm(rows.swapaxes(-1, -2), here)
                pieces = columns.reshape(channels, math.prod(windows.size), -1, *count)
                self._scatter(pieces, gx[part], windows, count)
        gbias = self.sum(g.astype(wide(g.dtype), copy=False), (0, 2, 3)) if want_bias else None
        if gweight is not None:
            gweight = gweight.reshape(weight.shape)
        return gx, gweight, gbias

    def _samples(self, x: Array, weight: Array, count: Pair) -> list[slice]:
        """Cut the samples so that the windows of a part are few enough to copy."""
        each = x.shape[1] * math.prod(weight.shape[2:]) * math.prod(count)
        size = max(1, self.window_elements // max(1, each))
        return [slice(start, start + size) for start in range(0, len(x), size)]

    def _columns(self, x: Array, windows: Windows, count: Pair, groups: int) -> Array:
        """Return the windows of x as (G, C / G * I * J, N * P * Q): all samples in one product."""
        n, channels = x.shape[:2]
        turned = self._strided(self._padded(x, windows, 0), windows, count).transpose(1, 2, 3, 0, 4, 5)
        return turned.reshape(groups, channels // groups * math.prod(windows.size), n * math.prod(count))

    def _strided(self, padded: Array, windows: Windows, count: Pair) -> Array:
        """Return the windows of padded images as a view (N, C, I, J, P, Q)."""
        n, c, h, w = padded.strides
        (down, across), (step_down, step_across) = windows.dilation, windows.stride
        return self.xp.lib.stride_tricks.as_strided(
            padded,
            (*padded.shape[:2], *windows.size, *count),
            (n, c, h * down, w * across, h * step_down, w * step_across),
        )

    def _padded(self, x: Array, windows: Windows, value: float) -> Array:
        """Return x with ``value`` around it; x itself where there is no padding."""
        down, across = windows.padding
        if down == across == 0:
            return x
        shape = (*x.shape[:2], x.shape[2] + 2 * down, x.shape[3] + 2 * across)
        padded = self.xp.full(shape, value, x.dtype)
        padded[:, :, down : down + x.shape[2], across : across + x.shape[3]] = x
        return padded

    def _scatter(self, pieces: Array, out: Array, windows: Windows, count: Pair) -> None:
        """Add to ``out``, which is zero, what each place of a window holds: pieces is (C, I * J, N, P, Q)."""
        (down, across), (height, width) = windows.padding, out.shape[2:]
        whole = out
        if down or across:
            whole = self.xp.zeros((*out.shape[:2], height + 2 * down, width + 2 * across), out.dtype)
        for i, (rows, columns) in enumerate(windows.parts(count)):
            whole[:, :, rows, columns] += pieces[:, i].swapaxes(0, 1)
        if whole is not out:
            out[...] = whole[:, :, down : down + height, across : across + width]

    # -- pooling -------------------------------------------------------------------------------------------

    def max_pool2d(self, x: Array, windows: Windows, relu: bool) -> tuple[Array, Any]:
        count = windows.fit(*x.shape[2:])
        padded = self._padded(x, windows, -math.inf)
        out: Any = None
        for rows, columns in windows.parts(count):
            part = padded[:, :, rows, columns]
            out = part.copy() if out is None else self.xp.maximum(out, part, out=out)
        found = out
        if relu:
            out = self.xp.maximum(out, 0)
        return out, (padded, found, x.shape, out)

    def max_pool2d_backward(self, g: Array, saved: Any, windows: Windows, relu: bool) -> Array:
        padded, found, shape, out = saved
        count = windows.fit(*shape[2:])
        if relu:
            g = self.relu_backward(g, out)
        gx = self.xp.zeros(padded.shape, wide(g.dtype))
        left = self.xp.ones(found.shape, bool)  # the first of equal maxima takes the gradient
        for rows, columns in windows.parts(count):
            here = (padded[:, :, rows, columns] == found) & left
            left &= ~here
            gx[:, :, rows, columns] += g * here
        (down, across), (height, width) = windows.padding, shape[2:]
        return gx[:, :, down : down + height, across : across + width].astype(g.dtype, copy=False)

    def avg_pool2d(self, x: Array, windows: Windows) -> Array:
        count = windows.fit(*x.shape[2:])
        padded = self._padded(x, windows, 0)
        total = self.xp.zeros((*x.shape[:2], *count), wide(x.dtype))
        for rows, columns in windows.parts(count):
            total += padded[:, :, rows, columns]
        total *= 1.0 / math.prod(windows.size)
        return total.astype(x.dtype, copy=False)

    def avg_pool2d_backward(self, g: Array, shape: tuple[int, ...], windows: Windows) -> Array:
        (down, across), (n, channels, height, width) = windows.padding, shape
        gx = self.xp.zeros((n, channels, height + 2 * down, width + 2 * across), wide(g.dtype))
        share = g.astype(gx.dtype) * gx.dtype.type(1.0 / math.prod(windows.size))
        for rows, columns in windows.parts(windows.fit(height, width)):
            gx[:, :, rows, columns] += share
        return gx[:, :, down : down + height, across : across + width].astype(g.dtype, copy=False)

    def global_avg_pool2d(self, x: Array) -> Array:
        return self.mean(x, (2, 3))

    def global_avg_pool2d_backward(self, g: Array, shape: Shape) -> Array:
        scale = 1.0 / (math.prod(shape[2:]) or 1)
        return self.xp.broadcast_to((g * scale).astype(g.dtype, copy=False).reshape(*g.shape, 1, 1), shape)
