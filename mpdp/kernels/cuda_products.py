"""Products of matrices on a GPU: arrays are turned into problems of cuBLAS, once for each kind of call.

Products go to cuBLASLt (``cublaslt``) where ``nvmath-python`` is installed: it can be captured in a graph, adds bias
and activation in the product's own kernel and lets algorithms be chosen. Without it they go through CuPy's bindings
(``cublas_plain``), eagerly. Small products of float32 have a kernel of ours (``small_products``). What depends on
shapes, strides and dtypes alone is worked out at the first call and looked up afterwards, by thread: a plan holds
addresses while it runs.
"""

from __future__ import annotations

import math
import threading
from itertools import pairwise
from typing import Any

import numpy as np

from .base import ACTIVATIONS, Array, Into
from .cublas_plain import PlainCublas
from .cublaslt import CublasLt, Problem
from .cuda_source import CudaBase, loop_blocks, types
from .precision import is_floating, tf32_allowed, wide
from .small_products import SmallProduct, is_small, is_small_layer, linear_backward

_MOST_CALLS = 4096  # kept a thread; programs whose shapes never repeat start again
_EPILOGUES = {
    (False, None): "DEFAULT",
    (True, None): "BIAS",
    (False, "relu"): "RELU",
    (True, "relu"): "RELU_BIAS",
    (False, "gelu"): "GELU_AUX",
    (True, "gelu"): "GELU_AUX_BIAS",
}
_SMALL = 1 << 17  # elements up to which sums over rows are taken by tall blocks, for their latency
_CHUNK_ROWS = 64  # rows that a chunk has at least
_MOST_CHUNKS = 256
_WANTED_BLOCKS = 1056  # eight blocks a multiprocessor of an H200; a constant, since it orders the sums


class _Call:
    """What is known of all calls with operands of the same shapes, strides and dtypes."""

    __slots__ = ("dtype", "plan", "plans", "problem", "shape")

    def __init__(self, problem: Problem | None, shape: tuple[int, ...], dtype: Any) -> None:
        self.problem = problem  # None: operands must be changed first, or there is nothing to multiply
        self.shape = shape
        self.dtype = dtype
        self.plan: Any = None  # for addresses that are a multiple of 16
        self.plans: dict[int, Any] = {}  # by alignment


class _Calls(threading.local):
    def __init__(self) -> None:
        self.known: dict[Any, _Call] = {}


class CudaProducts(CudaBase):
    """gemm and linear, with cuBLAS. **Local.**"""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self._blas: Any = None  # loading the library takes a while
        self._calls = _Calls()
        self._clusters = False  # whether blocks can share memory
        self.plan_book.on_change.append(self._forget_plans)

    def _forget_plans(self) -> None:
        self._calls = _Calls()

    def gemm(self, a: Array, b: Array, out: Array | None = None, beta: float = 0.0) -> Array:
        written = None if out is None else out.dtype
        key = (
            a.shape,
            a.strides,
            b.shape,
            b.strides,
            a.dtype,
            b.dtype,
            written,
            tf32_allowed(),
        )
        call = self._calls.known.get(key) or self._prepare(key, a, b)
        if call.problem is None or (out is not None and not out.flags.c_contiguous):
            return self._indirectly(call, a, b, out, beta)
        if out is None:
            out = self.xp.empty(call.shape, call.dtype)
        at_a, at_b, at_out = a.data.ptr, b.data.ptr, out.data.ptr
        low = (at_a | at_b | at_out) & 15
        plan = self._plan(call, low) if low or call.plan is None else call.plan
        plan.run(at_a, at_b, at_out, beta != 0.0, self.xp.cuda.get_current_stream().ptr)
        return out

    def linear(
        self, x: Array, weight: Array, bias: Array | None, activation: str | None = None
    ) -> tuple[Array, Any]:
        known = self._calls.known
        key = (x.shape, x.strides, weight.strides, weight.shape, x.dtype, weight.dtype, activation, bias is None,
               tf32_allowed())  # fmt: skip
        call = known.get(key) or self._prepare(key, x, weight.T, _EPILOGUES[bias is not None, activation])
        plan: Any = None
        if call.problem is not None and (
            bias is None or (bias.dtype == call.dtype and bias.flags.c_contiguous)
        ):
            at_x, at_weight, at_bias = x.data.ptr, weight.data.ptr, 0 if bias is None else bias.data.ptr
            if not (at_x | at_weight | at_bias) & 15:  # epilogues read the bias in packs
                plan = self._plan(call, 0) if call.plan is None else call.plan
        if plan is None:
            return self._linear_in_parts(x, weight, bias, activation)
        out = self.xp.empty(call.shape, call.dtype)
        kept = out if activation == "relu" else None
        if at_bias:
            plan.point("BIAS_POINTER", at_bias)
        if activation == "gelu":
            kept = self.xp.empty(call.shape, call.dtype)
            plan.point("EPILOGUE_AUX_POINTER", kept.data.ptr)
        plan.run(at_x, at_weight, out.data.ptr, False, self.xp.cuda.get_current_stream().ptr)
        return out, kept

    def _linear_in_parts(
        self, x: Array, weight: Array, bias: Array | None, activation: str | None
    ) -> tuple[Array, Any]:
        """Multiply, then add the bias and apply the activation in one kernel: where no epilogue fits."""
        pre = self.gemm(x, weight.T)
        if not is_floating(pre.dtype) or (bias is not None and bias.dtype != pre.dtype):
            pre = pre if bias is None else pre + bias
            bias = None
        if bias is None and activation is None:
            return pre, None
        out = self.xp.empty(pre.shape, pre.dtype) if activation == "gelu" else pre
        if pre.size:
            bias = None if bias is None else self.flat(bias)
            n = _packed(pre.dtype, pre.shape[-1], pre, out, *(() if bias is None else (bias,)))
            built = (*types(pre.dtype), "N", n, "ACTIVATION", ACTIVATIONS.index(activation))
            keep = activation == "gelu" and bias is not None
            count = pre.size // n
            self.launch(
                "linear", "bias_activation", built, loop_blocks(count, 256), 256,
                pre, bias, out, count, pre.shape[-1] // n, keep,
            )  # fmt: skip
        return out, pre if activation == "gelu" else out if activation == "relu" else None

    # -- backward ------------------------------------------------------------------------------------------

    def activation_backward(
        self,
        g: Array,
        saved: Any,
        activation: str | None,
        sums: bool = False,
        out: Array | None = None,
        beta: float = 0.0,
    ) -> tuple[Array, Array | None]:
        rows, width = g.shape
        g = self.flat(g)
        changed = g
        if (
            activation is not None
        ):  # what GELU was applied to is not needed again: its memory takes the gradient
            changed = saved if activation == "gelu" else self.xp.empty(g.shape, g.dtype)
        total = None
        if sums:
            total = out if out is not None else self.xp.empty(width, g.dtype)
        if g.size == 0:
            if total is not None and beta == 0.0:
                total.fill(0)
            return changed, total
        target = total
        if total is not None and not total.flags.c_contiguous:
            target = self.xp.empty(width, total.dtype)
        accumulate = beta != 0.0 and target is total
        arrays = (g,) if activation is None else (g, saved, changed)
        if g.size <= _SMALL:
            n, across, tall, chunks = 1, 32, 32, 1
        else:
            n = _packed(g.dtype, width, *arrays)
            packs = width // n
            across = next((a for a in (32, 16, 8) if packs % a == 0), 32)
            tall = 256 // across
            tiles = -(-packs // across)
            chunks = max(1, min(-(-rows // _CHUNK_ROWS), -(-_WANTED_BLOCKS // tiles), _MOST_CHUNKS))
        size = -(-rows // chunks)
        chunks = -(-rows // size)
        partial = None
        if chunks > 1 and target is not None:
            partial = self.xp.empty((chunks, width), wide(g.dtype))
        written = g.dtype if target is None else target.dtype
        built = (*types(g.dtype, written), "N", n, "ACTIVATION", ACTIVATIONS.index(activation),
                 "ACROSS", across, "TALL", tall)  # fmt: skip
        blocks = (-(-(width // n) // across), chunks)
        self.launch(
            "linear", "activation_backward", built, blocks, (across, tall),
            g, saved if activation else None, changed if activation else None, partial, target, rows, width,
            size, accumulate,
        )  # fmt: skip
        if partial is not None:
            self.launch(
                "linear", "finish_sums", built, -(-width // 32), (32, 8),
                partial, target, chunks, width, accumulate,
            )  # fmt: skip
        if target is not total:
            assert total is not None
            self.store(target, total, beta)
        return changed, total

    def linear_backward(
        self,
        g: Array,
        saved: Any,
        activation: str | None,
        x: Array,
        weight: Array,
        into: tuple[Into, Into, Into],
    ) -> list[Array | None]:
        if not self._is_one_kernel(g, saved, activation, x, weight, into):
            return super().linear_backward(g, saved, activation, x, weight, into)
        shapes = x.shape, weight.shape, g.shape[1:]
        found = [
            None if pair is None else self.xp.empty(like, g.dtype) if pair[0] is None else pair[0]
            for pair, like in zip(into, shapes)
        ]
        places = tuple(None if pair is None else (array, pair[1] != 0.0) for pair, array in zip(into, found))
        if any(places):
            linear_backward(self.launch, g, saved, x, weight, places, self._blas.multiprocessors)
        return found

    def _is_one_kernel(
        self, g: Array, saved: Any, activation: str | None, x: Array, weight: Array, into: tuple[Into, ...]
    ) -> bool:
        """Return whether one launch does the whole backward of a layer."""
        if not self._clusters or activation == "gelu" or tf32_allowed():
            return False
        given = [g, x, weight, *(pair[0] for pair in into if pair is not None and pair[0] is not None)]
        if activation is not None:
            given.append(saved)
        return is_small_layer(g.shape[0], g.shape[1], x.shape[1]) and all(
            a.dtype == np.float32 and a.flags.c_contiguous for a in given
        )

    # -- from arrays to problems ---------------------------------------------------------------------------

    def _prepare(self, key: Any, a: Array, b: Array, epilogue: str = "DEFAULT") -> _Call:
        """Work out what all calls with this key have in common."""
        known = self._calls.known
        if len(known) >= _MOST_CALLS:
            known.clear()
        call = known[key] = self._worked_out(key, a, b, epilogue)
        return call

    def _worked_out(self, key: Any, a: Array, b: Array, epilogue: str) -> _Call:
        dtype = a.dtype
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        shape = (*batch, a.shape[-2], b.shape[-1])
        written = dtype
        if epilogue == "DEFAULT" and key[6] is not None:
            written = key[6]
        call = _Call(None, shape, dtype)
        if not is_floating(dtype) or b.dtype != dtype or not _writes(dtype, written):
            return call
        if dtype.itemsize > 2 and "GELU" in epilogue:  # cuBLASLt's tanh is right to five digits
            return call
        if math.prod(shape) == 0 or a.shape[-1] == 0:
            return call
        left, right = (_laid_out(x.shape, x.strides, dtype.itemsize, batch) for x in (a, b))
        if left is None or right is None:
            return call
        if self._blas is None:
            self._blas = self._load()
            self._clusters = int(self.xp.cuda.Device().compute_capability) >= 90
        call.problem = Problem(
            dtype.name, written.name, dtype == np.float32 and tf32_allowed(),
            a.shape[-2], b.shape[-1], a.shape[-1], *left, *right, math.prod(batch), epilogue, 16,
        )  # fmt: skip
        return call

    def _load(self) -> Any:
        try:
            return CublasLt(self.xp, self.device.ordinal, self.plan_book)
        except ImportError:
            return PlainCublas(self.xp)

    def _made(self, problem: Problem) -> Any:
        """Return a new plan for a problem; None if there is none."""
        if self._clusters and is_small(problem):
            return SmallProduct(self.launch, problem, self._blas.multiprocessors)
        return self._blas.plan(problem)

    def _plan(self, call: _Call, low: int) -> Any:
        """Return the plan for addresses whose last four bits together are ``low``; None if there is none."""
        alignment = low & -low if low else 16
        if alignment not in call.plans:
            assert call.problem is not None
            call.plans[alignment] = self._made(call.problem._replace(alignment=alignment))
        if not low:
            call.plan = call.plans[16]
        return call.plans[alignment]

    def _indirectly(self, call: _Call, a: Array, b: Array, out: Array | None, beta: float) -> Array:
        """Multiply what cuBLAS cannot take as it is: other dtypes, strides or targets, and nothing at all."""
        xp, dtype = self.xp, a.dtype
        if not is_floating(dtype) or b.dtype != dtype:  # integers, mixed dtypes: as CuPy does it
            product = xp.matmul(a, b)
        elif math.prod(call.shape) == 0 or a.shape[-1] == 0:
            product = xp.zeros(call.shape, dtype)
        elif call.problem is not None or not _writes(dtype, dtype if out is None else out.dtype):
            product = self.gemm(a, b)
        else:
            batch = call.shape[:-2]
            left, right = (
                x if _laid_out(x.shape, x.strides, dtype.itemsize, batch) else xp.ascontiguousarray(x)
                for x in (a, b)
            )
            left, right = (
                x
                if _laid_out(x.shape, x.strides, dtype.itemsize, batch)
                else xp.ascontiguousarray(xp.broadcast_to(x, (*batch, *x.shape[-2:])))
                for x in (left, right)
            )
            return self.gemm(left, right, out, beta)
        return product if out is None else self.store(product, out, beta)


def _laid_out(
    shape: tuple[int, ...], strides: tuple[int, ...], size: int, batch: tuple[int, ...]
) -> tuple[int, int, int] | None:
    """Return an operand as cuBLAS reads it, (transposed, elements between rows, elements between matrices); None
    where it cannot.

    ``batch`` are the lengths of the result's axes before the last two, to which the operand's broadcast.
    """  # fmt: skip
    *own, rows, columns = shape
    *first, down, along = strides
    step = 0
    if math.prod(own) > 1:
        first = [0] * (len(batch) - len(own)) + [0 if n == 1 else s for n, s in zip(own, first)]
        held = [(n, s) for n, s in zip(batch, first) if n > 1]
        for (_, outer), (n, inner) in pairwise(held):
            if outer != n * inner:
                return None
        step = held[-1][1] if held else 0
    if step < 0 or step % size:
        return None
    if (along == size or columns == 1) and (down >= columns * size or rows == 1) and down % size == 0:
        return 0, down // size if rows > 1 else columns, step // size
    if (down == size or rows == 1) and (along >= rows * size or columns == 1) and along % size == 0:
        return 1, along // size if columns > 1 else rows, step // size
    return None


def _packed(dtype: Any, width: int, *arrays: Array) -> int:
    """Return how many neighbours of a row a thread may take at once: up to 16 bytes, where all arrays allow it."""
    most = n = 16 // dtype.itemsize
    while n > 1 and (width % n or any(a.data.ptr % (n * dtype.itemsize) for a in arrays)):
        n //= 2
    return min(n, most)


def _writes(read: Any, written: Any) -> bool:
    """Return whether cuBLAS writes products of one dtype as another."""
    return read == written or (written == np.float32 and read.itemsize == 2)
