"""The kernels of a GPU: CuPy for storage and plain reductions, kernels of our own for the rest.

This file holds storage, reductions and elementwise forms and assembles the class. Products are in
``cuda_products``, rows (softmax, layer norm, losses) in ``cuda_rows``, indices in ``cuda_indices``, optimizers
and checks in ``cuda_updates``, random masks in ``cuda_random``, layer norm in ``cuda_norms``, attention in
``cuda_attention``, convolution and pooling in ``cuda_images``, batch norm in ``cuda_channels``; ``cuda_source``
compiles and launches what lies in ``cuda_src``. Every sum is added in a fixed order, so a call repeats its bits.
``tests`` compares each method with the one of the CPU. Importing this module needs no CuPy; making the class does.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import DeviceError
from .base import Array, Shape
from .board import Board
from .cuda_attention import CudaAttention
from .cuda_board import CudaBoard
from .cuda_channels import CudaChannels
from .cuda_images import CudaImages
from .cuda_indices import CudaIndices
from .cuda_norms import CudaNorms
from .cuda_products import CudaProducts
from .cuda_random import CudaRandom
from .cuda_rows import CudaRows
from .cuda_rules import CudaRules
from .cuda_source import THREADS, loop_blocks, types
from .precision import is_floating, is_half, wide

_CHUNK_ROWS = 128  # rows that a chunk of a column sum has at least: a small batch takes one launch
_MOST_CHUNKS = 256
_WANTED_BLOCKS = 1056  # eight blocks a multiprocessor of an H200; a constant, since it orders the sums


class CudaKernels(
    CudaRules, CudaNorms, CudaRows, CudaIndices, CudaProducts, CudaRandom, CudaImages, CudaChannels, CudaAttention,
):  # fmt: skip
    """CuPy's side of :class:`~mpdp.kernels.base.Kernels`; the docstrings are there. **Local.**

    Args:
        ordinal: index of the GPU as this process sees it.

    Raises:
        MissingDependencyError: CuPy is not installed.
        DeviceError: no such GPU.
    """

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        try:
            count = self._runtime.getDeviceCount()
        except self._runtime.CUDARuntimeError as error:
            raise DeviceError(
                f"device {self.device}: expected a GPU that CUDA can use, got {error}; look at nvidia-smi and "
                'the driver, or use device="cpu"'
            ) from error
        if ordinal >= count:
            raise DeviceError(
                f"device {self.device}: expected an ordinal below the {count} GPUs that this process sees; look "
                "at nvidia-smi and CUDA_VISIBLE_DEVICES"
            )

    def board(self, slots: int, numbers: int, sources: int, reports: int) -> Board:
        return CudaBoard(self, slots, numbers, sources, reports)

    # -- storage -------------------------------------------------------------------------------------------

    def from_host(self, array: Array) -> Array:
        with self.active():
            return self.xp.asarray(array)

    def to_numpy(self, array: Array) -> Array:
        return self.xp.asnumpy(array)

    def store(self, value: Array, out: Array, beta: float = 0.0) -> Array:
        into, value = self._as_they_lie(out, value)
        if beta == 0.0 and _casts(value, into):  # CuPy takes one element a thread at a time
            built = types(value.dtype, into.dtype)
            self.launch(
                "casts", "cast", built, loop_blocks(into.size, 8 * THREADS), THREADS, value, into, into.size
            )
            return out
        if value.dtype.itemsize == into.dtype.itemsize == 2 and value.dtype != into.dtype:
            value = value.astype(np.float32)  # CuPy has no cast from bfloat16 to float16, nor back
        if beta == 0.0:
            self.xp.copyto(into, value)
        else:
            self.xp.add(into, value, out=into)
        return out

    # -- reductions ----------------------------------------------------------------------------------------

    def sum(self, x: Array, axis: int | Shape | None = None, keepdims: bool = False) -> Array:
        if x.dtype.kind in "biu":
            return x.sum(axis=axis, keepdims=keepdims)  # counts widen as NumPy's do
        return x.sum(axis=axis, keepdims=keepdims, dtype=wide(x.dtype)).astype(x.dtype, copy=False)

    def mean(self, x: Array, axis: int | Shape | None = None, keepdims: bool = False) -> Array:
        dtype = x.dtype if is_floating(x.dtype) else np.dtype(np.float64)
        out = x.sum(axis=axis, keepdims=keepdims, dtype=wide(dtype))
        out /= (x.size // out.size if out.size else 0) or 1
        return out.astype(dtype, copy=False)

    def sum_to(self, x: Array, shape: Shape, out: Array | None = None, beta: float = 0.0) -> Array:
        if x.shape == shape:
            return x if out is None else self.store(x, out, beta)
        lead = x.ndim - len(shape)
        if len(shape) == 1 and x.shape[-1] == shape[0] and is_floating(x.dtype):
            rows = x.reshape(math.prod(x.shape[:-1]), shape[0])
            return self.activation_backward(rows, None, None, True, out, beta)[1]
        if lead == 1 and x.shape[1:] == shape and is_floating(x.dtype):
            return self._first_axis_sums(x, out, beta)
        axes = tuple(range(lead))
        axes += tuple(i + lead for i, n in enumerate(shape) if n == 1 and x.shape[i + lead] != 1)
        total = x.sum(axis=axes, dtype=wide(x.dtype)).reshape(shape)
        return total.astype(x.dtype, copy=False) if out is None else self.store(total, out, beta)

    def _column_sums(
        self, g: Array, normal: tuple[Array, Array, Array] | None, out: Array | None, beta: float
    ) -> Array:
        """Sum the rows of g (N, D), each times its normalised row of x where ``normal`` is (x, mean, rstd)."""
        rows, width = g.shape
        if out is None:
            out, beta = self.xp.empty(width, g.dtype), 0.0
        if width == 0:
            return out
        if rows == 0:
            if beta == 0.0:
                out.fill(0)
            return out
        target = out if out.flags.c_contiguous else self.xp.empty(width, out.dtype)
        tiles = -(-width // 32)
        chunks = max(1, min(-(-rows // _CHUNK_ROWS), -(-_WANTED_BLOCKS // tiles), _MOST_CHUNKS))
        size = -(-rows // chunks)
        chunks = -(-rows // size)
        partial = self.xp.empty((chunks, width), wide(g.dtype)) if chunks > 1 else None
        built = (*types(g.dtype, out.dtype), "NORMAL", 0 if normal is None else 1)
        x, mean, rstd = normal or (None, None, None)
        accumulate = beta != 0.0 and target is out
        self.launch(
            "columns", "column_sums", built, (tiles, chunks), (32, 8),
            self.flat(g), x, mean, rstd, partial, target, rows, width, size, accumulate,
        )  # fmt: skip
        if chunks > 1:
            self.launch(
                "columns", "column_sums_finish", built, -(-width // THREADS), THREADS,
                partial, target, chunks, width, accumulate,
            )  # fmt: skip
        return out if target is out else self.store(target, out, beta)

    # -- elementwise ---------------------------------------------------------------------------------------

    def _map(self, name: str, *arrays: Array) -> Array:
        """Run a function of one element over arrays of one shape and dtype."""
        first, *others = self._as_they_lie(*arrays)
        out = self.xp.empty(first.shape, first.dtype)
        if out.size:
            flat = [self.flat(a) for a in (first, *others)]
            blocks = loop_blocks(out.size)
            self.launch("elementwise", name, types(out.dtype), blocks, THREADS, *flat, out, out.size)
        return out if first is arrays[0] else self.channels_first(out)

    def _as_they_lie(self, *arrays: Array) -> tuple[Array, ...]:
        """Return the arrays themselves, or views with channels last where all of them lie so."""
        if all(a.ndim == 4 and not a.flags.c_contiguous for a in arrays):
            views = [a.transpose(0, 2, 3, 1) for a in arrays]
            if all(view.flags.c_contiguous for view in views):
                return tuple(views)
        return arrays

    def add(self, a: Array, b: Array) -> Array:
        first, other = self._as_they_lie(a, b)
        if a.shape == b.shape and a.dtype == b.dtype and is_half(a.dtype) and first.flags.c_contiguous:
            return self._map("sum", a, b)
        out = self.xp.add(first, other)
        if out.dtype != a.dtype:  # older ml_dtypes
            out = out.astype(a.dtype)
        return out if first is a else self.channels_first(out)

    def relu(self, x: Array) -> Array:
        return self._map("relu", x) if is_floating(x.dtype) else self.xp.maximum(x, 0)

    def relu_backward(self, g: Array, out: Array) -> Array:
        return self._map("relu_backward", g, out)

    def sigmoid(self, x: Array) -> Array:
        return self._map("sigmoid", x)

    def sigmoid_backward(self, g: Array, out: Array) -> Array:
        return self._map("sigmoid_backward", g, out)

    def tanh_backward(self, g: Array, out: Array) -> Array:
        return self._map("tanh_backward", g, out)

    def gelu(self, x: Array) -> tuple[Array, Any]:
        return self._map("gelu", x), x

    def gelu_backward(self, g: Array, saved: Any) -> Array:
        return self._map("gelu_backward", g, saved)  # tanh is computed again: cheaper than to read it

    def dropout(self, x: Array, mask: Array, scale: float) -> Array:
        out = self.xp.empty(x.shape, x.dtype)
        if out.size:
            arguments = self.flat(x), self.flat(mask), out, out.size, float(scale)
            self.launch("elementwise", "dropout", types(x.dtype), loop_blocks(out.size), THREADS, *arguments)
        return out


def _casts(value: Array, out: Array) -> bool:
    """Return whether a kernel of ours casts one array to another: 16-bit floats and float32, in C order."""
    return (
        value.shape == out.shape
        and out.size > 0
        and value.dtype != out.dtype
        and all(a.flags.c_contiguous and (is_half(a.dtype) or a.dtype == np.float32) for a in (value, out))
    )
