"""Attention on a GPU: cuDNN where it has a plan, else products and a softmax. The docstrings are in ``kernels.base``.

Shapes: N sequences, H heads, T queries, S keys, D features of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..errors import MissingDependencyError
from .attention import PlainAttention
from .base import Array
from .cuda_source import CudaBase
from .cudnn_attention import CudnnAttention, Problem
from .precision import is_half

_ALIGNED = 16  # bytes: of addresses and strides that cuDNN reads


class _Fused(NamedTuple):
    """What cuDNN's backward needs."""

    problem: Problem
    q: Array
    k: Array
    v: Array
    out: Array
    statistics: Array


class CudaAttention(PlainAttention, CudaBase):
    """Attention of a GPU. **Local.**"""

    _plans_of_attention: CudnnAttention | None = None
    _missing = False  # it was looked for, and is not installed

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        scale: float,
        causal: bool,
        keys: Array | None,
        keep: Array | None,
        keep_scale: float,
        engine: str = "auto",
    ) -> tuple[Array, Any]:
        fused = None
        if engine != "plain":
            why = _unfit(q, k, causal, keys, keep)
            if not why:
                fused = self._fused(q, k, v, scale, causal, demanded=engine == "cudnn")
                why = "" if fused else f"a plan for q {q.shape}, k {k.shape}"
            if why and engine == "cudnn":
                raise ValueError(
                    f'engine: expected an attention that cuDNN has, got {why}; use engine="auto"'
                )
        if fused is None:
            return super().attention(q, k, v, scale, causal, keys, keep, keep_scale)
        return fused.out, fused

    def attention_backward(
        self,
        g: Array,
        saved: Any,
        scale: float,
        keep: Array | None,
        keep_scale: float,
        deterministic: bool = True,
        into: tuple[Array, Array, Array] | None = None,
    ) -> tuple[Array, Array, Array]:
        if not isinstance(saved, _Fused):
            return super().attention_backward(g, saved, scale, keep, keep_scale, deterministic, into)
        xp = self.xp
        g = self._readable(g)
        if into is None:
            into = tuple(_beside(xp, x) for x in (saved.q, saved.k, saved.v))
        assert into is not None
        arrays = saved.q, saved.k, saved.v, saved.out, g, *into
        problem = saved.problem._replace(
            strides=tuple(_strides(x) for x in arrays), deterministic=deterministic
        )
        cudnn, stream = self._plans_of_attention, xp.cuda.get_current_stream().ptr
        assert cudnn is not None
        plan = cudnn.plan(problem, stream)
        if plan is None:  # as for a single query: the scores come back
            _, plain = super().attention(*saved[1:4], scale, problem.causal, None, None, 1.0)
            return super().attention_backward(g, plain, scale, None, 1.0, deterministic, into)
        workspace = xp.empty(plan.workspace_bytes, np.uint8)
        cudnn.run(plan, [x.data.ptr for x in (*arrays, saved.statistics)], workspace.data.ptr, stream)
        return into

    def _fused(
        self, q: Array, k: Array, v: Array, scale: float, causal: bool, demanded: bool
    ) -> _Fused | None:
        """Run forward by cuDNN; None where it has no plan or is not installed, unless it is demanded."""
        cudnn = self._plans_of_attention
        if cudnn is None:
            if self._missing and not demanded:
                return None
            try:
                cudnn = self._plans_of_attention = CudnnAttention()
            except MissingDependencyError:
                self._missing = True
                if demanded:
                    raise
                return None
        xp = self.xp
        q, k, v = (self._readable(x) for x in (q, k, v))
        out = _beside(xp, q)
        arrays = q, k, v, out
        problem = Problem(
            q.dtype.name, q.shape, k.shape, tuple(_strides(x) for x in arrays), scale, causal, True
        )
        stream = xp.cuda.get_current_stream().ptr
        plan = cudnn.plan(problem, stream)
        if plan is None:
            return None
        statistics = xp.empty((*q.shape[:3], 1), np.float32)
        workspace = xp.empty(plan.workspace_bytes, np.uint8)
        addresses = [x.data.ptr for x in (*arrays, statistics)]
        cudnn.run(plan, addresses, workspace.data.ptr, stream)
        return _Fused(problem, q, k, v, out, statistics)

    def _readable(self, x: Array) -> Array:
        """Return x, or a copy whose strides and address cuDNN can read."""
        *outer, last = x.strides
        size = x.dtype.itemsize
        lengths = x.shape
        fits = (last == size or lengths[-1] == 1) and x.data.ptr % _ALIGNED == 0
        if fits and all(n == 1 or (s >= size and s % _ALIGNED == 0) for n, s in zip(lengths, outer)):
            return x
        return self.xp.ascontiguousarray(x)


def _unfit(q: Array, k: Array, causal: bool, keys: Array | None, keep: Array | None) -> str:
    """Return what cuDNN is not asked for; empty where it is."""
    if not is_half(q.dtype):
        return f"{q.dtype}"
    if keys is not None:
        return "a key mask"
    if keep is not None:
        return "dropout"
    if causal and q.shape[2] != k.shape[2]:
        return f"a causal mask over {q.shape[2]} queries and {k.shape[2]} keys"
    if q.shape[3] % 8:
        return f"heads of {q.shape[3]} features"
    if 0 in q.shape or 0 in k.shape:
        return "no element"
    return ""


def _beside(xp: Any, x: Array) -> Array:
    """Return an array like x (N, H, T, D) that lies as (N, T, H, D): the next product reads it as (N, T, H * D)."""
    n, h, t, d = x.shape
    return xp.empty((n, t, h, d), x.dtype).transpose(0, 2, 1, 3)


def _strides(x: Array) -> tuple[int, ...]:
    """Return strides in elements; those of axes of length 1 as if the array were contiguous, to share plans."""
    return tuple(s // x.dtype.itemsize for s in x.strides)
