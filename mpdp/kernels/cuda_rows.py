"""The CUDA kernels that work on rows: softmax, layer norm, and the losses.

Part of ``kernels.cuda``, which assembles them; the docstrings are in ``kernels.base``. What backward needs is
computed again from the inputs and a number or two a row: neither probabilities nor normalised rows are stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import Array
from .cuda_source import THREADS, CudaBase, integer, loop_blocks, stored, types
from .precision import wide

_CLASSES = 2048  # shortest row of logits that a block takes 16 bytes at a time
_CLASS_THREADS = 512
_WARP_WIDTH = 1024  # longest row that one warp works on; a block of threads takes longer ones
_SPAN = 4096  # elements that one block adds
_ONE_BLOCK = 16_384  # elements up to which one block adds all


class CudaRows(CudaBase):
    """Softmax, layer norm and losses. **Local.**"""

    _check_and_loss: Any  # of kernels.cuda_indices

    def _rows(
        self,
        name: str,
        shape: tuple[int, int],
        dtype: Any,
        *arguments: Any,
        index: str = "i64",
        parameter: Any = None,
    ) -> None:
        """Launch a kernel with a warp or a block a row; nothing where there is no row.

        ``parameter`` is a layer norm's weight or bias, whose dtype may be wider than that of the rows.
        """
        rows, width = shape
        if rows == 0:
            return
        lanes = 32 if width <= _WARP_WIDTH else THREADS
        beside = dtype if parameter is None else parameter.dtype
        built = (*types(dtype), "P", stored(beside), "LANES", lanes, "INDEX", index)
        self.launch("rows", name, built, -(-rows // (THREADS // lanes)), THREADS, *arguments, rows, width)

    # -- softmax -------------------------------------------------------------------------------------------

    def _along(self, name: str, axis: int, *arrays: Array) -> Array:
        """Run a row kernel along an axis of arrays of one shape."""
        last = axis in (-1, arrays[0].ndim - 1)
        moved = [self.flat(a if last else a.swapaxes(axis, -1)) for a in arrays]
        out = self.xp.empty(moved[0].shape, moved[0].dtype)
        if out.size:
            width = out.shape[-1]
            self._rows(name, (out.size // width, width), out.dtype, *moved, out)
        return out if last else self.flat(out.swapaxes(axis, -1))

    def softmax(self, x: Array, axis: int) -> Array:
        return self._along("softmax", axis, x)

    def softmax_backward(self, g: Array, out: Array, axis: int) -> Array:
        return self._along("softmax_backward", axis, g, out)

    def log_softmax(self, x: Array, axis: int) -> Array:
        return self._along("log_softmax", axis, x)

    def log_softmax_backward(self, g: Array, out: Array, axis: int) -> Array:
        return self._along("log_softmax_backward", axis, g, out)

    # -- layer norm ----------------------------------------------------------------------------------------

    def layer_norm(self, x: Array, weight: Array | None, bias: Array | None, eps: float) -> tuple[Array, Any]:
        x = self.flat(x)
        out = self.xp.empty(x.shape, x.dtype)
        mean, rstd = (self.xp.empty(len(x), wide(x.dtype)) for _ in range(2))
        scale, shift = (None if p is None else self.flat(p) for p in (weight, bias))
        arrays = x, scale, shift, out, mean, rstd
        self._rows(
            "layer_norm", x.shape, x.dtype, float(eps), *arrays, parameter=weight if bias is None else bias
        )
        return out, (x, mean, rstd)

    def layer_norm_backward(self, g: Array, saved: Any, weight: Array | None) -> Array:
        x, mean, rstd = saved
        out = self.xp.empty(x.shape, g.dtype)
        scale = None if weight is None else self.flat(weight)
        arrays = self.flat(g), x, scale, mean, rstd, out
        self._rows("layer_norm_backward", x.shape, x.dtype, *arrays, parameter=weight)
        return out

    def layer_norm_weight_gradient(
        self, g: Array, saved: Any, out: Array | None = None, beta: float = 0.0
    ) -> Array:
        return self._column_sums(g, saved, out, beta)

    def _column_sums(self, g: Array, normal: Any, out: Array | None, beta: float) -> Array:
        raise NotImplementedError  # kernels.cuda

    # -- losses --------------------------------------------------------------------------------------------

    def checks_with_loss(self, logits: Array, target: Array) -> bool:
        return logits.ndim == 2 and 0 < logits.size <= _ONE_BLOCK and logits.shape[1] <= _WARP_WIDTH

    def cross_entropy(
        self, logits: Array, target: Array, ignore_index: int, count: Array | None = None, check: bool = False
    ) -> tuple[Array, Any]:
        logits, target = self.flat(logits), self.flat(target)
        if check:
            tops, sums = (self.xp.empty(len(logits), wide(logits.dtype)) for _ in range(2))
            total = self.xp.empty((), tops.dtype)
            self._check_and_loss(logits, target, int(ignore_index), count, tops, sums, total)
            return total, (logits, target, int(ignore_index), tops, sums)
        losses, tops, sums = (self.xp.empty(len(logits), wide(logits.dtype)) for _ in range(3))
        saved = logits, target, int(ignore_index), tops, sums
        if _many_classes(logits):
            self._classes("classes_loss", target.dtype, logits, *saved, losses)
        else:
            index = integer(target.dtype)
            self._rows("cross_entropy", logits.shape, logits.dtype, *saved, losses, index=index)
        return self._total(losses), saved

    def cross_entropy_backward(self, g: Array, saved: Any, own: bool = False) -> Array:
        logits, target, *_ = saved
        out = logits if own else self.xp.empty(logits.shape, logits.dtype)
        if out.size == 0:
            return out
        if _many_classes(logits):
            self._classes("classes_loss_backward", target.dtype, logits, g, *saved, out)
        else:
            index = integer(target.dtype)
            self._rows("cross_entropy_backward", logits.shape, logits.dtype, g, *saved, out, index=index)
        return out

    def _classes(self, name: str, index: Any, logits: Array, *arguments: Any) -> None:
        """Launch a kernel with a block a row of many classes."""
        built = (*types(logits.dtype), "INDEX", integer(index), "COUNT", _CLASS_THREADS)
        rows, width = logits.shape
        self.launch("classes", name, built, rows, _CLASS_THREADS, *arguments, width)

    def squared_error(self, output: Array, target: Array) -> tuple[Array, Any]:
        if target.dtype == wide(output.dtype):  # a float32 target is not rounded to 16 bits
            output = output.astype(target.dtype, copy=False)
        output = self.flat(output)
        target = self.flat(target.astype(output.dtype, copy=False))
        size, dtype = output.size, wide(output.dtype)
        parts = self.xp.empty(-(-size // _SPAN), np.float64)
        if size:
            built = types(output.dtype, dtype)
            self.launch(
                "spans", "span_differences", built, len(parts), THREADS, output, target, parts, size, _SPAN
            )
        return self._total(parts, dtype), (output, target)

    def squared_error_backward(self, g: Array, saved: Any) -> Array:
        output, target = saved
        out = self.xp.empty(output.shape, output.dtype)
        if out.size:
            arguments = g, output, target, out, out.size
            blocks = loop_blocks(out.size)
            self.launch(
                "elementwise", "squared_error_backward", types(out.dtype), blocks, THREADS, *arguments
            )
        return out

    def _total(self, values: Array, dtype: Any = None) -> Array:
        """Return the sum of a flat array in float64, as a 0-d array of ``dtype`` (default: the array's)."""
        out = self.xp.empty((), dtype or values.dtype)
        if values.size > _ONE_BLOCK:
            parts = self.xp.empty(-(-values.size // _SPAN), np.float64)
            built = types(values.dtype, out.dtype)
            self.launch("spans", "span_sums", built, len(parts), THREADS, values, parts, values.size, _SPAN)
            values = parts
        self.launch("spans", "total", types(values.dtype, out.dtype), 1, 1024, values, out, values.size)
        return out


def _many_classes(logits: Array) -> bool:
    """Return whether rows of logits are long, and packs of 16 bytes lie evenly in them."""
    rows, width = logits.shape
    size = logits.dtype.itemsize
    return (
        rows > 0 and width >= _CLASSES and size <= 4 and width * size % 16 == 0 and logits.data.ptr % 16 == 0
    )
