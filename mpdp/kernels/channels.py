"""Moments and normalisation by channel, and RMS norm of rows, with plain array calls: NumPy and CuPy go the same way.

Sums over many numbers run in two stages, the first in the numbers' own dtype (float32 for 16 bits) and the second in
float64, so that moments are right to the dtype they come from. The docstrings are in ``kernels.base``.

Shapes: N samples, C channels, S places of a sample (pixels, or 1), D features.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import Array, Kernels
from .precision import wide


class ChannelKernels(Kernels):
    """Batch norm's parts, and RMS norm. **Local.**"""

    def channel_moments(self, x: Array) -> tuple[Array, Array]:
        n, channels, places = x.shape
        if n * places == 0:
            zeros = self.xp.zeros(channels, np.float64)
            return zeros, zeros.copy()
        near = (self._per_channel(x) / (n * places)).astype(wide(x.dtype))
        # From a second pass: the squares of numbers far from 0 would leave nothing of a small variance, and their
        # sum has lost digits of the mean.
        centred = x - near[:, None]
        rest = self._per_channel(centred) / (n * places)
        squares = self._per_channel(centred, centred) - n * places * rest * rest
        return near.astype(np.float64) + rest, self.xp.maximum(squares, 0)

    def channel_sums(self, g: Array, normal: Array) -> Array:
        return self.xp.stack((self._per_channel(g), self._per_channel(g, normal)))

    def _per_channel(self, a: Array, b: Array | None = None) -> Array:
        """Return the float64 sums over samples and places of a, or of a * b."""
        total = a if b is None else self.xp.multiply(a, b, dtype=wide(a.dtype))
        return total.sum(axis=2, dtype=wide(a.dtype)).sum(axis=0, dtype=np.float64)

    def normalise_channels(
        self, x: Array, mean: Array, rstd: Array, weight: Array | None, bias: Array | None
    ) -> tuple[Array, Array]:
        dtype = wide(x.dtype)
        normal = x - mean.astype(dtype)[:, None]
        normal *= rstd.astype(dtype)[:, None]
        out = normal if weight is None else normal * weight[:, None]
        if bias is not None:
            out = self.xp.add(out, bias[:, None], out=None if out is normal else out)
        if out is normal and dtype == x.dtype:
            out = normal.copy()
        return out.astype(x.dtype, copy=False), normal

    def normalise_channels_backward(
        self, g: Array, normal: Array, scale: Array, mean: Array, along: Array
    ) -> Array:
        scale, mean, along = (a.astype(normal.dtype)[:, None] for a in (scale, mean, along))
        grad = normal * along
        grad += mean
        self.xp.subtract(g, grad, out=grad)
        grad *= scale
        return grad.astype(g.dtype, copy=False)

    def rms_norm(self, x: Array, weight: Array | None, eps: float) -> tuple[Array, Any]:
        wider = x.astype(wide(x.dtype), copy=False)
        rstd = (wider * wider).sum(axis=1, keepdims=True)
        rstd /= max(x.shape[1], 1)
        rstd += eps
        rstd = 1 / self.xp.sqrt(rstd)
        normal = wider * rstd
        out = normal.copy() if weight is None else normal * weight
        return out.astype(x.dtype, copy=False), (normal, rstd)

    def rms_norm_backward(self, g: Array, saved: Any, weight: Array | None) -> Array:
        normal, rstd = saved
        grad = g.astype(normal.dtype) if weight is None else g * weight.astype(normal.dtype)
        along = (grad * normal).sum(axis=1, keepdims=True)
        along /= max(normal.shape[1], 1)
        grad -= normal * along
        grad *= rstd
        return grad.astype(g.dtype, copy=False)

    def rms_norm_weight_gradient(
        self, g: Array, saved: Any, out: Array | None = None, beta: float = 0.0
    ) -> Array:
        normal, _ = saved
        total = (g * normal).sum(axis=0)
        return total.astype(g.dtype, copy=False) if out is None else self.store(total, out, beta)


class CpuChannels(ChannelKernels):
    """The same on the CPU, where a dot product needs no memory for its products. **Local.**"""

    def _per_channel(self, a: Array, b: Array | None = None) -> Array:
        if b is None:
            first = np.add.reduce(a, axis=2, dtype=wide(a.dtype))
        else:
            first = np.vecdot(a.astype(b.dtype, copy=False), b)
        return np.add.reduce(first, axis=0, dtype=np.float64)
