"""The CUDA kernels of batch norm: moments, normalisation with a residual and ReLU in one pass, and backward.

Part of ``kernels.cuda``; the docstrings are in ``kernels.base``. Backward starts from x itself, as it was stored, and
takes the mask of ReLU from it again, or with a residual from a bit a number. Sums run in float32 (float64 for float64)
inside of a thread and a block, and in float64 over blocks, always in the same order.

Shapes: N samples, C channels, S places of a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .base import Array
from .channels import ChannelKernels, Statistics
from .cuda_layouts import CudaLayouts
from .cuda_source import THREADS, stored, summed
from .precision import wide


class _Sweep(NamedTuple):
    """How kernels go over rows: measured on an H200, and constants, since blocks order the sums."""

    at_once: int  # blocks on a multiprocessor
    rows: int  # that a thread loads at a time
    blocks: int


_MOMENTS = _Sweep(2, 8, 264)
_SUMS = _MAPS = _Sweep(2, 4, 264)  # all blocks run at once
_LARGE_MAPS = _Sweep(3, 2, 4224)
_LARGE = 300 << 20  # bytes from which on many short blocks are faster at what has no sums


class _Normalised(NamedTuple):
    """What backward needs."""

    x: Array  # channels last
    mean: Array
    rstd: Array
    weight: Array | None
    bias: Array | None
    positive: Array | None
    relu: bool
    residual: bool


class CudaChannels(CudaLayouts, ChannelKernels):
    """Batch norm of a GPU. **Local.**"""

    def channel_moments(self, x: Array) -> Array:
        out = self.xp.empty(1 + 2 * x.shape[1], np.float64)
        self._moments(x, out, 0.0, None, None, 0.0)
        return out

    def channel_statistics(
        self,
        x: Array,
        eps: float,
        gather: Callable[[Array], Array] | None = None,
        running: tuple[Array, Array] | None = None,
        momentum: float = 0.0,
    ) -> Statistics:
        channels = x.shape[1]
        numbers = self.xp.empty(1 + 2 * channels, np.float64)
        if gather is None:
            self._moments(x, None, eps, numbers, running, momentum)
        else:
            parts = self.flat(gather(self.channel_moments(x)))
            kept = running or (None, None)
            self.launch(
                "channels", "moments_merge", self._built(x.dtype, 1, _MOMENTS, kept=kept[0]),
                -(-channels // THREADS), THREADS,
                parts, len(parts), channels, float(eps), numbers, *kept, float(momentum),
            )  # fmt: skip
        return Statistics(numbers[:1].reshape(()), numbers[1 : 1 + channels], numbers[1 + channels :])

    def _moments(
        self, x: Array, out: Array | None, eps: float, numbers: Array | None, running: Any, momentum: float
    ) -> None:
        x = self.channels_last(x)
        channels = x.shape[-1]
        rows, vector = x.size // max(channels, 1), self.vector(channels, x)
        grid, block, tile = _geometry(rows, channels, vector, _MOMENTS)
        partial = self.xp.empty((grid[1], 2, channels), wide(x.dtype))
        kept = running or (None, None)
        built = self._built(x.dtype, vector, _MOMENTS, kept=kept[0])
        self.launch("channels", "moments", built, grid, block, x, partial, rows, channels)
        self.launch(
            "channels", "moments_finish", built, -(-channels // 32), (32, 32),
            x, partial, out, grid[1], rows, channels, tile, float(eps), numbers, *kept, float(momentum),
        )  # fmt: skip

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
        xp = self.xp
        x = self.channels_last(x)
        out = xp.empty(x.shape, x.dtype)
        mean, rstd = (self.flat(a.astype(np.float64, copy=False)) for a in (mean, rstd))
        if weight is not None:
            weight = self.flat(weight)
        if bias is not None:
            bias = self.flat(bias if weight is None else bias.astype(weight.dtype, copy=False))
        both = relu and residual is not None
        channels = x.shape[-1]
        vector = self.vector(channels, x)
        if residual is not None:
            residual = self.channels_last(residual)
            vector = self.vector(channels, x, residual)
        positive = xp.empty(x.size // vector, np.uint8) if both else None
        saved = _Normalised(x, mean, rstd, weight, bias, positive, relu, residual is not None)
        if x.size:
            rows = x.size // channels
            sweep = _LARGE_MAPS if x.nbytes >= _LARGE else _MAPS
            grid, block, _ = _geometry(rows, channels, vector, sweep)
            built = self._built(x.dtype, vector, sweep, saved)
            self.launch(
                "channels", "normalise", built, grid, block,
                x, mean, rstd, weight, bias, residual, out, positive, rows, channels,
            )  # fmt: skip
        return self.channels_first(out), saved

    def channel_sums(
        self,
        g: Array,
        saved: Any,
        gain: tuple[Array, float] | None = None,
        shift: tuple[Array, float] | None = None,
        other: Array | None = None,
    ) -> tuple[Array, Array]:
        xp, x = self.xp, saved.x
        both = saved.relu and saved.residual
        if other is not None and not both:  # nobody would hold the sum
            g, other = self.add(self.channels_first(self.channels_last(g)), other), None
        g = self.channels_last(g)
        parts = [g] if other is None else [g, self.channels_last(other)]
        channels = x.shape[-1]
        masked = xp.empty(x.shape, x.dtype) if both else None
        # The bits of `positive` lie as forward's packs did.
        vector = x.size // saved.positive.size if both and x.size else self.vector(channels, x, g)
        if any(a.data.ptr % (vector * a.dtype.itemsize) for a in parts):
            parts = [a.copy() for a in parts]
        rows = x.size // max(channels, 1)
        grid, block, _ = _geometry(rows, channels, vector, _SUMS)
        partial = xp.empty((grid[1], 2, channels), wide(x.dtype))
        sums = xp.empty((2, channels), np.float64)
        # Into one dtype by the kernel, anything else from the sums.
        target = next((pair[0].dtype for pair in (gain, shift) if pair is not None), None)
        direct = [pair is not None and _writable(pair[0], target) for pair in (gain, shift)]
        arrays = [pair[0] if pair is not None and own else None for pair, own in zip((gain, shift), direct)]
        betas = [int(pair is not None and pair[1] != 0.0) for pair in (gain, shift)]
        built = self._built(x.dtype, vector, _SUMS, saved, target=target, pair=other is not None)
        self.launch(
            "channels", "channel_sums", built, grid, block,
            parts[0], parts[-1], x, saved.positive, saved.mean, saved.rstd, saved.weight, saved.bias, masked, partial,
            rows, channels,
        )  # fmt: skip
        self.launch(
            "channels", "channel_sums_finish", built, -(-channels // 32), (32, 32),
            partial, saved.rstd, sums, *arrays, grid[1], channels, *betas,
        )  # fmt: skip
        for pair, own, total in zip((gain, shift), direct, (sums[1], sums[0])):
            if pair is not None and not own:
                self.store(total, *pair)
        return sums, self.channels_first(g if masked is None else masked)

    def normalise_channels_backward(
        self, g: Array, saved: Any, sums: Array | None = None, count: Array | None = None
    ) -> Array:
        x = saved.x
        g = self.channels_last(g)
        out = self.xp.empty(x.shape, x.dtype)
        if out.size:
            channels = x.shape[-1]
            rows, vector = x.size // channels, self.vector(channels, x, g)
            sweep = _LARGE_MAPS if x.nbytes >= _LARGE else _MAPS
            grid, block, _ = _geometry(rows, channels, vector, sweep)
            if saved.residual:  # the gradient has been masked, or there is no ReLU
                saved = saved._replace(relu=False, residual=False)
            built = self._built(x.dtype, vector, sweep, saved, centred=sums is not None)
            self.launch(
                "channels", "normalise_backward", built, grid, block,
                g, x, saved.mean, saved.rstd, saved.weight, saved.bias, sums, count, out, rows, channels,
            )  # fmt: skip
        return self.channels_first(out)

    def _built(
        self,
        dtype: Any,
        vector: int,
        sweep: _Sweep,
        saved: _Normalised | None = None,
        kept: Array | None = None,
        target: Any = None,
        centred: bool = True,
        pair: bool = False,
    ) -> tuple[Any, ...]:
        """Return the types and constants of ``channels.cu``; unused types are float, so that it is built once."""
        weight = None if saved is None else saved.bias if saved.weight is None else saved.weight
        return (
            "T", stored(dtype), "W", summed(dtype),
            "P", "float" if weight is None else stored(weight.dtype),
            "O", "float" if target is None else stored(target),
            "R", "float" if kept is None else stored(kept.dtype),
            "VEC", vector,
            "UNROLL", sweep.rows,
            "BLOCKS", sweep.at_once,
            "RELU", 0 if saved is None else int(saved.relu),
            "RESIDUAL", 0 if saved is None else int(saved.residual),
            "CENTRED", int(centred),
            "PAIR", int(pair),
        )  # fmt: skip


def _writable(array: Array, dtype: Any) -> bool:
    """Return whether a kernel that writes gradients of a dtype may write one there."""
    return bool(array.flags.c_contiguous and array.dtype == dtype)


def _geometry(
    rows: int, channels: int, vector: int, sweep: _Sweep
) -> tuple[tuple[int, int], tuple[int, int], int]:
    """Return the grid and the block of a kernel over rows and channels, and the rows of a tile."""
    groups = max(1, channels // vector)
    lanes = min(32, 1 << (groups - 1).bit_length())
    down = THREADS // lanes
    across, tile = -(-groups // lanes), sweep.rows * down
    return (across, max(1, min(-(-rows // tile), -(-sweep.blocks // across)))), (lanes, down), tile
