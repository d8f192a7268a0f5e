"""Attention with products and a softmax: NumPy and CuPy go the same way. The docstrings are in ``kernels.base``.

Shapes: N sequences, H heads, T queries, S keys, D features of a head.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .base import Array, Kernels, Shape


class PlainAttention(Kernels):
    """Attention whose scores are an array. **Local.** Memory: N * H * T * S numbers, twice with dropout."""

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
        if engine == "cudnn":
            raise ValueError(
                f'engine: expected "auto" or "plain" on {self.device}, got "cudnn"; cuDNN needs a GPU'
            )
        xp = self.xp
        scores = self.gemm(q, k.swapaxes(-1, -2))
        scores *= scores.dtype.type(scale)
        allowed = None
        if causal:
            queries, count = scores.shape[-2:]
            # The last query stands beside the last key.
            allowed = xp.arange(count) <= xp.arange(queries)[:, None] + (count - queries)
        if keys is not None:
            here = keys[:, None, None, :]
            allowed = here if allowed is None else xp.logical_and(allowed, here)
        if allowed is not None:
            # The lowest number and not -inf: a row without any key then has no NaN.
            scores = self._filled(scores, allowed, float(ml_dtypes.finfo(scores.dtype).min))
        weights = self.softmax(scores, -1) if scores.size else scores
        if keys is not None:
            weights *= allowed
        mixed = weights if keep is None else self.dropout(weights, keep, keep_scale)
        return self.gemm(mixed, v), (q, k, v, weights, mixed)

    def _filled(self, scores: Array, allowed: Array, value: Any) -> Array:
        """Return the scores that are allowed, and ``value`` elsewhere; ``scores`` may be overwritten."""
        return self.xp.where(allowed, scores, value).astype(scores.dtype, copy=False)  # CuPy widens bfloat16

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
        q, k, v, weights, mixed = saved
        gv = self.gemm(mixed.swapaxes(-1, -2), g)
        slope = self.gemm(g, v.swapaxes(-1, -2))
        if keep is not None:
            slope = self.dropout(slope, keep, keep_scale)
        if slope.size:
            slope = self.softmax_backward(slope, weights, -1)
        slope *= slope.dtype.type(scale)
        gradients = self.gemm(slope, k), self.gemm(slope.swapaxes(-1, -2), q), gv
        if into is None:
            return gradients
        for gradient, array in zip(gradients, into):
            self.store(gradient, array)
        return into

    def self_attention(
        self,
        qkv: Array,
        scale: float,
        causal: bool,
        keys: Array | None,
        keep: Array | None,
        keep_scale: float,
        engine: str = "auto",
    ) -> tuple[Array, Any]:
        n, t, _, h, d = qkv.shape
        out, saved = self.attention(*_apart(qkv), scale, causal, keys, keep, keep_scale, engine)
        return out.transpose(0, 2, 1, 3).reshape(n, t, h * d), saved

    def self_attention_backward(
        self,
        g: Array,
        saved: Any,
        shape: Shape,
        scale: float,
        keep: Array | None,
        keep_scale: float,
        deterministic: bool = True,
    ) -> Array:
        n, t, _, h, d = shape
        gradient = self.xp.empty(shape, g.dtype)
        g = g.reshape(n, t, h, d).transpose(0, 2, 1, 3)
        self.attention_backward(g, saved, scale, keep, keep_scale, deterministic, _apart(gradient))
        return gradient


def _apart(qkv: Array) -> tuple[Array, Array, Array]:
    """Return the views (N, H, T, D) of queries, keys and values."""
    q, k, v = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
    return q, k, v


class CpuAttention(PlainAttention):
    """The same on the CPU, where a masked copy takes a third of the time of numpy.where. **Local.**"""

    def _filled(self, scores: Array, allowed: Array, value: Any) -> Array:
        np.copyto(scores, value, where=~allowed)
        return scores
