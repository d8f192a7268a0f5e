"""Products of matrices on a GPU: cuBLAS, called through CuPy's bindings.

CuPy's own ``matmul`` neither accumulates nor writes into a wider dtype, multiplies batches of float16 in float32
and fails for batches of bfloat16 (cupy#10317), so floats go to ``gemmEx`` and ``gemmStridedBatchedEx`` here. They
give the same bits each time, as long as one stream calls them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .base import Array
from .cuda_source import CudaBase
from .precision import tf32_allowed

_DEFAULT = -1  # CUBLAS_GEMM_DEFAULT
_FAST_TF32 = 77  # CUBLAS_COMPUTE_32F_FAST_TF32
_SCALARS = {name: np.array([0, 1], name) for name in ("float32", "float64")}  # beta and alpha, on the host


class _Kind(NamedTuple):
    """What cuBLAS must know of a dtype."""

    code: int  # cudaDataType_t
    compute: int  # CUBLAS_COMPUTE_32F or _64F
    zero: int  # addresses of 0 and 1 in the type of the arithmetic
    one: int


def _kind(code: int, name: str) -> _Kind:
    at = _SCALARS[name].ctypes.data
    return _Kind(code, 70 if name == "float64" else 68, at, at + _SCALARS[name].itemsize)


_FLOAT32 = np.dtype(np.float32)
_KINDS = {
    _FLOAT32: _kind(0, "float32"),
    np.dtype(np.float64): _kind(1, "float64"),
    np.dtype(np.float16): _kind(2, "float32"),
    np.dtype(ml_dtypes.bfloat16): _kind(14, "float32"),
}


class CudaProducts(CudaBase):
    """gemm and linear with cuBLAS. **Local.**"""

    _blas: Any = None  # CuPy's bindings and the handle's getter: loading the library takes a while

    def gemm(self, a: Array, b: Array, out: Array | None = None, beta: float = 0.0) -> Array:
        xp, dtype = self.xp, a.dtype
        kind = _KINDS.get(dtype)
        if kind is None or b.dtype != dtype:  # integers, mixed dtypes: as CuPy does it
            product = xp.matmul(a, b)
            return product if out is None else self.store(product, out, beta)
        flat = a.ndim == b.ndim == 2
        batch = () if flat else np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        target: Any = out
        if out is None or not (out.flags.c_contiguous and _writes(dtype, out.dtype)):
            target = xp.empty((*batch, a.shape[-2], b.shape[-1]), dtype)
        scale = beta if target is out else 0.0
        if target.size:
            if a.shape[-1] == 0:
                if scale == 0.0:
                    target.fill(0)
            elif flat:
                self._multiply(kind, a, b, target, 1, scale)
            else:
                self._multiply(
                    kind, self._batched(a, batch), self._batched(b, batch), target, math.prod(batch), scale
                )
        return target if out is None or target is out else self.store(target, out, beta)

    def linear(self, x: Array, weight: Array, bias: Array | None) -> Array:
        out = self.gemm(x, weight.T)
        if bias is not None:
            out += bias
        return out

    def _multiply(self, kind: _Kind, a: Array, b: Array, out: Array, count: int, beta: float) -> None:
        """Write ``a @ b + beta * out`` into a C-contiguous ``out`` that is not empty."""
        if self._blas is None:
            from cupy_backends.cuda.libs import cublas  # type: ignore[import-not-found,unused-ignore]

            self._blas = cublas, self.xp.cuda.device.get_cublas_handle
        cublas, handle = self._blas
        columns = b.shape[-1]
        a, ta, lda, step_a = self._laid_out(a)
        b, tb, ldb, step_b = self._laid_out(b)
        written = _KINDS[out.dtype].code
        code, scale = kind.code, kind.one if beta else kind.zero
        compute = _FAST_TF32 if code == 0 and tf32_allowed() else kind.compute
        # cuBLAS counts columns first: what it calls B.T A.T is this package's A B, row by row.
        sizes = (tb, ta, columns, a.shape[-2], a.shape[-1])
        if count == 1:
            cublas.gemmEx(
                handle(), *sizes, kind.one, b.data.ptr, code, ldb, a.data.ptr, code, lda,
                scale, out.data.ptr, written, columns, compute, _DEFAULT,
            )  # fmt: skip
        else:
            cublas.gemmStridedBatchedEx(
                handle(), *sizes, kind.one, b.data.ptr, code, ldb, step_b, a.data.ptr, code, lda, step_a,
                scale, out.data.ptr, written, columns, sizes[3] * columns, count, compute, _DEFAULT,
            )  # fmt: skip

    def _batched(self, x: Array, batch: tuple[int, ...]) -> Array:
        """Return x as (count, rows, columns), or as (rows, columns) where one matrix serves all."""
        own = x.shape[:-2]
        if math.prod(own) == 1:
            return x.reshape(x.shape[-2:])
        if own != batch:
            x = self.xp.broadcast_to(x, (*batch, *x.shape[-2:]))
        if x.ndim > 3:
            x = x.reshape(-1, *x.shape[-2:])  # copies where the batches do not lie evenly
        return x

    def _laid_out(self, x: Array) -> tuple[Array, int, int, int]:
        """Return x as cuBLAS can read it: (array, transposed, leading dimension, elements between batches)."""
        for _ in range(2):
            *_, rows, columns = x.shape
            *first, down, along = x.strides
            size = x.dtype.itemsize
            step = first[0] if first else 0
            if step >= 0:
                if (along == size or columns == 1) and (down >= columns * size or rows == 1):
                    return x, 0, down // size if rows > 1 else columns, step // size
                if (down == size or rows == 1) and (along >= rows * size or columns == 1):
                    return x, 1, along // size if columns > 1 else rows, step // size
            x = self.xp.ascontiguousarray(x)
        raise AssertionError("a contiguous array can be read")


def _writes(read: Any, written: Any) -> bool:
    """Return whether cuBLAS writes products of one dtype as another."""
    return read == written or (written == _FLOAT32 and read.itemsize == 2)
