"""Layer norm on a GPU, with what stands beside it in a transformer: rows stay in registers between passes.

Rows that don't fit (float64, widths that are no multiple of 16 bytes, very long ones) go to ``cuda_rows``. The
docstrings are in ``kernels.base``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import Array
from .cuda_rows import CudaRows
from .cuda_source import THREADS, stored, types
from .norms import NormsInParts
from .precision import wide

_EACH = 24  # elements of a row that a thread holds, at most: more don't fit its registers in backward
_WIDEST = 8192
_NARROWEST = 128  # bytes of a row
_BLOCKS = 396  # of backward, three a multiprocessor of an H200; a constant, since it orders the sums
_FORWARD_BLOCKS = 1056
_LEAST_THREADS = 128  # of a block


class CudaNorms(CudaRows, NormsInParts):
    """Layer norm, its gradients, and the sum before it. **Local.**"""

    def layer_norm(self, x: Array, weight: Array | None, bias: Array | None, eps: float) -> tuple[Array, Any]:
        if not _fits(x, weight, bias):
            return super().layer_norm(x, weight, bias, eps)
        _, out, saved = self._norm(x, None, weight, bias, eps)
        return out, saved

    def add_layer_norm(
        self, x: Array, added: Array, weight: Array | None, bias: Array | None, eps: float
    ) -> tuple[Array, Array, Any]:
        if not (_fits(x, weight, bias) and _even(added)):
            return super().add_layer_norm(x, added, weight, bias, eps)
        return self._norm(x, added, weight, bias, eps)

    def layer_norm_gradients(
        self,
        g: Array,
        saved: Any,
        weight: Array | None,
        before: Array | None,
        x: bool,
        weight_into: tuple[Array, float] | None,
        bias_into: tuple[Array, float] | None,
    ) -> Array | None:
        source, means, rstds = saved
        wanted = [into for into in (weight_into, bias_into) if into is not None]
        even = _even(g) and (before is None or _even(before)) and all(_even(a) for a, _ in wanted)
        same = len({a.dtype for a, _ in wanted}) < 2
        if not (even and same and g.dtype == source.dtype and _fits(source, weight, None)):
            return super().layer_norm_gradients(g, saved, weight, before, x, weight_into, bias_into)
        xp, (rows, width) = self.xp, source.shape
        out = xp.empty(source.shape, g.dtype) if x else None
        written = wanted[0][0].dtype if wanted else wide(g.dtype)
        built, threads, groups = _built(source.dtype, weight, width, written)
        blocks = min(-(-rows // groups), _BLOCKS)
        partial = xp.empty((blocks, 2, width), wide(g.dtype)) if wanted else None
        self.launch(
            "norms", "norm_backward", built, blocks, threads,
            g, source, before, weight, means, rstds, out, partial, rows,
        )  # fmt: skip
        if wanted:
            (scales, a), (shifts, b) = weight_into or (None, 0.0), bias_into or (None, 0.0)
            self.launch(
                "norms", "norm_finish", built, (-(-width // 32), 2), (32, 8),
                partial, scales, shifts, blocks, a != 0.0, b != 0.0,
            )  # fmt: skip
        return out

    def _norm(
        self, x: Array, added: Array | None, weight: Array | None, bias: Array | None, eps: float
    ) -> tuple[Array, Array, Any]:
        xp, (rows, width) = self.xp, x.shape
        out = xp.empty(x.shape, x.dtype)
        total = x if added is None else xp.empty(x.shape, x.dtype)
        means, rstds = (xp.empty(rows, wide(x.dtype)) for _ in range(2))
        built, threads, groups = _built(x.dtype, weight if bias is None else bias, width, wide(x.dtype))
        blocks = min(-(-rows // groups), _FORWARD_BLOCKS)
        self.launch(
            "norms", "norm_forward", built, blocks, threads,
            float(eps), x, added, weight, bias, total, out, means, rstds, rows,
        )  # fmt: skip
        return total, out, (total, means, rstds)


def _fits(x: Array, weight: Array | None, bias: Array | None) -> bool:
    """Return whether the rows of x are what ``norms.cu`` takes."""
    rows, width = x.shape
    size = x.dtype.itemsize
    beside = [p for p in (weight, bias) if p is not None]
    return (
        rows > 0
        and size <= 4
        and width * size % 16 == 0
        and width * size >= _NARROWEST
        and width <= _WIDEST
        and _even(x)
        and all(_even(p) and p.dtype.itemsize in (2, 4) for p in beside)
        and len({p.dtype for p in beside}) < 2
    )


def _even(x: Array) -> bool:
    """Return whether x is contiguous, in packs of 16 bytes."""
    return bool(x.flags.c_contiguous and x.data.ptr % 16 == 0)


def _built(dtype: Any, beside: Array | None, width: int, written: Any) -> tuple[tuple[Any, ...], int, int]:
    """Return the types and constants of ``norms.cu``, the threads of a block, and the rows it works on at once."""
    lanes = 32
    while lanes * _EACH < width and lanes < THREADS:
        lanes *= 2
    threads = max(lanes, _LEAST_THREADS)
    parameter = stored(np.dtype(np.float32) if beside is None else beside.dtype)
    built = (*types(dtype, written), "P", parameter, "WIDTH", width, "LANES", lanes, "THREADS", threads)
    return built, threads, threads // lanes
