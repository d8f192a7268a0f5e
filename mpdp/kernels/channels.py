"""Moments and normalisation by channel, and RMS norm of rows, with plain array calls.

Sums over many numbers run in two stages, the first in the numbers' own dtype (float32 for 16 bits) and the second in
float64, so that moments are right to the dtype they come from. The docstrings are in ``kernels.base``.

Shapes: N samples, C channels, S places of a sample (pixels, or 1), D features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .base import Array, Kernels
from .precision import wide


class Statistics(NamedTuple):
    """Of a batch, by channel; float64.

    Attributes:
        count: how many numbers a channel has, 0-d.
        mean: (C,); 0 of an empty batch.
        rstd: 1 / sqrt(variance + eps), (C,).
    """

    count: Array
    mean: Array
    rstd: Array


class _Normalised(NamedTuple):
    """What backward needs."""

    normal: Array  # (N, C, S)
    rstd: Array
    weight: Array | None
    out: Array | None  # with ReLU


class ChannelKernels(Kernels):
    """Batch norm's parts, and RMS norm. **Local.**"""

    def channel_moments(self, x: Array) -> Array:
        xp, rows = self.xp, _rows(x)
        n, channels, places = rows.shape
        out = xp.zeros(1 + 2 * channels, np.float64)
        out[0] = n * places
        if n * places == 0:
            return out
        near = (self._per_channel(rows) / (n * places)).astype(wide(x.dtype))
        # From a second pass: the squares of numbers far from 0 would leave nothing of a small variance, and their
        # sum has lost digits of the mean.
        centred = rows - near[:, None]
        rest = self._per_channel(centred) / (n * places)
        squares = self._per_channel(centred, centred) - n * places * rest * rest
        out[1 : 1 + channels] = near.astype(np.float64) + rest
        out[1 + channels :] = xp.maximum(squares, 0)
        return out

    def channel_statistics(
        self,
        x: Array,
        eps: float,
        gather: Callable[[Array], Array] | None = None,
        running: tuple[Array, Array] | None = None,
        momentum: float = 0.0,
    ) -> Statistics:
        xp, channels = self.xp, x.shape[1]
        own = self.channel_moments(x)
        if gather is None:
            count, mean, squares = own[:1].reshape(()), own[1 : 1 + channels], own[1 + channels :]
        else:
            count, mean, squares = self._merged(gather(own), channels)
        if running is not None:
            # A batch of one value has no unbiased variance, an empty one no mean, and one with NaN ends the run: the
            # numbers that a checkpoint may hold stay as they were.
            variance = squares / xp.maximum(count - 1, 1)
            for old, value, least in ((running[0], mean, 1), (running[1], variance, 2)):
                moved = old + momentum * (value - old)
                old[...] = xp.where(xp.logical_and(xp.isfinite(value), count >= least), moved, old)
        return Statistics(count, mean, 1 / xp.sqrt(squares / xp.maximum(count, 1) + eps))

    def _merged(self, parts: Array, channels: int) -> tuple[Array, Array, Array]:
        """Return (count, mean, squares) of a batch from those of its parts, added in order.

        Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances"
        (1979), equation 2.1. An empty part changes nothing.
        """
        xp = self.xp
        counts, means, squares = parts[:, :1], parts[:, 1 : 1 + channels], parts[:, 1 + channels :]
        total = counts.sum(axis=0)
        weights = counts / xp.maximum(total, 1)
        mean = xp.zeros(channels, np.float64)
        for i in range(len(parts)):
            mean += weights[i] * means[i]
        square = xp.zeros(channels, np.float64)
        for i in range(len(parts)):
            away = means[i] - mean
            square += squares[i] + counts[i] * away * away
        return total[0], mean, square

    def _per_channel(self, a: Array, b: Array | None = None) -> Array:
        """Return the float64 sums over samples and places of a, or of a * b."""
        total = a if b is None else self.xp.multiply(a, b, dtype=wide(a.dtype))
        return total.sum(axis=2, dtype=wide(a.dtype)).sum(axis=0, dtype=np.float64)

    def normalise_channels(
        self,
        x: Array,
        mean: Array,
        rstd: Array,
        weight: Array | None,
        bias: Array | None,
        residual: Array | None = None,
        relu: bool = False,
    ) -> tuple[Array, Any]:
        xp, dtype = self.xp, wide(x.dtype)
        normal = _rows(x) - mean.astype(dtype)[:, None]
        normal *= rstd.astype(dtype)[:, None]
        out = normal if weight is None else normal * weight[:, None]
        if bias is not None:
            out = xp.add(out, bias[:, None], out=None if out is normal else out)
        if residual is not None:
            out = xp.add(out, _rows(residual), out=None if out is normal else out)
        if relu:
            out = xp.maximum(out, 0, out=None if out is normal else out)
        if out is normal and dtype == x.dtype:
            out = normal.copy()
        out = out.astype(x.dtype, copy=False)
        return out.reshape(x.shape), _Normalised(normal, rstd, weight, out if relu else None)

    def channel_sums(
        self,
        g: Array,
        saved: Any,
        gain: tuple[Array, float] | None = None,
        shift: tuple[Array, float] | None = None,
        other: Array | None = None,
    ) -> tuple[Array, Array]:
        if other is not None:
            g = self.add(g, other)
        rows = g.reshape(saved.normal.shape)
        if saved.out is not None:
            rows = self.relu_backward(rows, saved.out)
        sums = self.xp.stack((self._per_channel(rows), self._per_channel(rows, saved.normal)))
        for pair, total in ((gain, sums[1]), (shift, sums[0])):
            if pair is not None:
                self.store(total, *pair)
        return sums, rows.reshape(g.shape)

    def normalise_channels_backward(
        self, g: Array, saved: Any, sums: Array | None = None, count: Array | None = None
    ) -> Array:
        normal, dtype = saved.normal, saved.normal.dtype
        rows = g.reshape(normal.shape)
        scale = saved.rstd if saved.weight is None else saved.rstd * saved.weight
        scale = scale.astype(dtype, copy=False)[:, None]
        if sums is None:
            grad = rows * scale
        else:
            sums = sums / self.xp.maximum(count, 1)
            mean, along = (a.astype(dtype)[:, None] for a in sums)
            grad = normal * along
            grad += mean
            self.xp.subtract(rows, grad, out=grad)
            grad *= scale
        return grad.astype(g.dtype, copy=False).reshape(g.shape)

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


def _rows(x: Array) -> Array:
    """Return x (N, C, ...) as (N, C, S)."""
    return x.reshape(x.shape[0], x.shape[1], math.prod(x.shape[2:]))


class CpuChannels(ChannelKernels):
    """The same on the CPU, where a dot product needs no memory for its products. **Local.**"""

    def _per_channel(self, a: Array, b: Array | None = None) -> Array:
        if b is None:
            first = np.add.reduce(a, axis=2, dtype=wide(a.dtype))
        else:
            first = np.vecdot(a.astype(b.dtype, copy=False), b)
        return np.add.reduce(first, axis=0, dtype=np.float64)
