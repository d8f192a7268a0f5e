"""The kernels of the CPU: NumPy calls, few and large, in place where the memory is our own.

This file holds storage, products, reductions and elementwise forms and assembles the class; rows
(softmax, layer norm, losses) are in ``cpu_rows``, indices (embedding, scatter) in ``cpu_indices``, convolution and
pooling in ``cpu_windows``; ``channels`` (batch norm) and ``attention`` serve every device.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from . import random
from .attention import CpuAttention
from .base import Array, Shape
from .board import Board, HostBoard
from .channels import CpuChannels
from .cpu_indices import CpuIndices
from .cpu_rows import CpuRows
from .cpu_windows import CpuWindows
from .plan_book import PlanBook
from .precision import is_floating, is_half, rounded_once, wide
from .rules import CpuRules

_GELU = math.sqrt(2.0 / math.pi)
_GELU_CUBE = 0.044715
_PANEL = (
    1 << 17
)  # elements of a product that are accumulated at once: 512 KiB of float32 stay in the L2 cache


def _by_weights(rows: int, outputs: int, inputs: int) -> bool:
    """Return whether a float32 product is to have the transposed rows, not the weights, as its second matrix.

    Then OpenBLAS takes off a half (8 rows) to a twentieth (128), if neither side of the weights is small, and the bias
    pays for transposing the result, if that stays in the cache. In float64 nothing is gained.
    """
    return 2 < rows <= 128 <= min(outputs, inputs) and rows * outputs <= _PANEL <= outputs * inputs


class CpuKernels(CpuRules, CpuRows, CpuIndices, CpuWindows, CpuChannels, CpuAttention):
    """NumPy's side of :class:`~mpdp.kernels.base.Kernels`; the docstrings are there. **Local.**"""

    xp: ModuleType = np
    device_kind = "cpu"

    def __init__(self) -> None:
        self.plan_book = PlanBook()

    def board(self, slots: int, numbers: int, sources: int, reports: int) -> Board:
        return HostBoard(self, slots, numbers, sources, reports)

    def from_host(self, array: Array) -> Array:
        return np.asarray(array)

    def to_numpy(self, array: Array) -> Array:
        return np.asarray(array)

    def store(self, value: Array, out: Array, beta: float = 0.0) -> Array:
        if beta == 0.0:
            np.copyto(out, value)
        else:
            np.add(out, value, out=out)
        return out

    # -- products ------------------------------------------------------------------------------------------

    def gemm(self, a: Array, b: Array, out: Array | None = None, beta: float = 0.0) -> Array:
        if is_half(a.dtype) and is_half(b.dtype):  # NumPy has no BLAS for them: float32, and one rounding
            narrow = a.dtype
            a, b = a.astype(np.float32), b.astype(np.float32)
            if out is None or is_half(out.dtype):
                product = np.matmul(a, b)
                return product.astype(narrow) if out is None else self.store(product, out, beta)
        if 0 in a.strides or 0 in b.strides:  # NumPy multiplies broadcast views without BLAS
            a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
        if out is None or beta == 0.0:
            return np.matmul(a, b, out)
        if a.ndim > 2 or b.ndim > 2 or out.size <= _PANEL:
            out += np.matmul(a, b)
            return out
        # NumPy has no accumulating product: add it panel by panel, while a panel is still in the cache.
        rows = max(1, _PANEL // out.shape[1])
        scratch = np.empty((min(rows, len(out)), out.shape[1]), dtype=np.result_type(a, b))
        for start in range(0, len(out), rows):
            panel = out[start : start + rows]
            panel += np.matmul(a[start : start + rows], b, out=scratch[: len(panel)])
        return out

    def linear(
        self, x: Array, weight: Array, bias: Array | None, activation: str | None = None
    ) -> tuple[Array, Any]:
        dtype = x.dtype
        if is_half(dtype):
            x, weight = x.astype(np.float32), weight.astype(np.float32)
        single = x.dtype == weight.dtype == np.float32
        if single and x.ndim == weight.ndim == 2 and _by_weights(len(x), *weight.shape):
            out = np.empty((len(x), len(weight)), np.float32)
            product = np.matmul(weight, x.T).T
            np.copyto(out, product) if bias is None else np.add(product, bias, out=out)
        else:
            out = np.matmul(x, weight.T)
            if bias is not None:
                out += bias
        if activation == "gelu":
            out, saved = self.gelu(out)
            return out.astype(dtype, copy=False), saved
        if activation == "relu":
            np.maximum(out, 0, out=out)
        out = out.astype(dtype, copy=False)
        return out, out if activation == "relu" else None

    def activation_backward(
        self,
        g: Array,
        saved: Any,
        activation: str | None,
        sums: bool = False,
        out: Array | None = None,
        beta: float = 0.0,
    ) -> tuple[Array, Array | None]:
        if activation is not None:
            g = self.relu_backward(g, saved) if activation == "relu" else self.gelu_backward(g, saved)
        return g, self.sum_to(g, g.shape[1:], out, beta) if sums else None

    # -- reductions ----------------------------------------------------------------------------------------

    def sum(self, x: Array, axis: int | Shape | None = None, keepdims: bool = False) -> Array:
        if x.dtype.kind in "biu":
            return np.asarray(np.sum(x, axis=axis, keepdims=keepdims))  # counts widen as NumPy's do
        out = x.sum(axis=axis, keepdims=keepdims, dtype=wide(x.dtype))
        return np.asarray(out, dtype=x.dtype)

    def mean(self, x: Array, axis: int | Shape | None = None, keepdims: bool = False) -> Array:
        dtype = x.dtype if is_floating(x.dtype) else np.dtype(np.float64)
        out = np.asarray(x.sum(axis=axis, keepdims=keepdims, dtype=wide(dtype)))
        out /= (x.size // out.size if out.size else 0) or 1
        return out.astype(dtype, copy=False)

    def sum_to(self, x: Array, shape: Shape, out: Array | None = None, beta: float = 0.0) -> Array:
        if x.shape == shape:
            return x if out is None else self.store(x, out, beta)
        lead = x.ndim - len(shape)
        if len(shape) == 1 and x.shape[-1] == shape[0] and wide(x.dtype) is x.dtype:
            # A product with ones: 2.6 times as fast as a sum over the rows (128 x 512 float32).
            rows = x.reshape(-1, shape[0]) if lead > 1 else x
            ones = np.empty(len(rows), x.dtype)
            ones.fill(1)
            total = np.matmul(ones, rows, out if beta == 0.0 else None)
        else:
            axes = tuple(range(lead))
            axes += tuple(i + lead for i, n in enumerate(shape) if n == 1 and x.shape[i + lead] != 1)
            total = np.add.reduce(x, axis=axes, dtype=wide(x.dtype))
            total = np.asarray(total, dtype=x.dtype if out is None else None).reshape(shape)
        return total if out is None or total is out else self.store(total, out, beta)

    # -- elementwise ---------------------------------------------------------------------------------------

    def add(self, a: Array, b: Array) -> Array:
        return np.add(a, b)

    @rounded_once
    def relu(self, x: Array) -> Array:
        return np.maximum(x, 0)

    @rounded_once
    def relu_backward(self, g: Array, out: Array) -> Array:
        # A comparison written as floats, then a product in place: 18 us against 28 us for g * (out > 0) and
        # 97 us for numpy.where (128 x 512 float32).
        grad = np.greater(out, 0, out=np.empty_like(out))
        grad *= g
        return grad

    @rounded_once
    def sigmoid(self, x: Array) -> Array:
        # exp(-|x|) / (1 + exp(-|x|)) is accurate for negative x, its complement for positive x.
        small = np.exp(-np.abs(x))
        below = small / (1 + small)
        return np.asarray(np.where(x >= 0, 1 - below, below))

    @rounded_once
    def sigmoid_backward(self, g: Array, out: Array) -> Array:
        grad = np.asarray(1 - out)
        grad *= out
        grad *= g
        return grad

    @rounded_once
    def tanh_backward(self, g: Array, out: Array) -> Array:
        grad = np.asarray(out * out)
        np.subtract(1, grad, out=grad)
        grad *= g
        return grad

    def gelu(self, x: Array) -> tuple[Array, Any]:
        wider = x.astype(wide(x.dtype), copy=False)  # x^3 overflows float16 beyond 40
        t = np.asarray(wider * wider)
        t *= _GELU_CUBE
        t += 1
        t *= wider
        t *= _GELU
        np.tanh(t, out=t)
        out = np.asarray(t + 1)
        out *= wider
        out *= 0.5
        return out.astype(x.dtype, copy=False), (wider, t)

    def gelu_backward(self, g: Array, saved: Any) -> Array:
        x, t = saved
        slope = np.asarray(x * x)
        slope *= 3 * _GELU_CUBE * _GELU
        slope += _GELU
        slope *= x
        slope *= 1 - t
        slope += 1
        t += 1
        slope *= t
        slope *= 0.5
        slope *= g
        return slope.astype(g.dtype, copy=False)

    @rounded_once
    def dropout(self, x: Array, mask: Array, scale: float) -> Array:
        out = np.multiply(mask, x.dtype.type(scale), dtype=x.dtype)
        out *= x
        return out

    def keep_mask(
        self, key: tuple[int, int], step: Any, start: Any, count: int, elements: int, threshold: int
    ) -> Array:
        return random.bits(key, int(step), int(start), count, elements) >= np.uint32(threshold)


KERNELS = CpuKernels()
