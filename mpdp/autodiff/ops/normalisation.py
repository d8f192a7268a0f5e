"""Normalisation along an axis: softmax, log_softmax, layer_norm, rms_norm."""

from __future__ import annotations

import math
from typing import Any

from ..operation import Operation
from ..tensor import Tensor, unwrap
from ..wants import WANTED, Before, deliver


def _softmax(k, x, axis):
    out = k.softmax(x, axis)
    return out, out


def _softmax_backward(k, out, g, wants, axis):
    return (k.softmax_backward(g, out, axis),)


def _log_softmax(k, x, axis):
    out = k.log_softmax(x, axis)
    return out, out


def _log_softmax_backward(k, out, g, wants, axis):
    return (k.log_softmax_backward(g, out, axis),)


def _layer_norm(k, x, weight, bias, shape, eps):
    width = math.prod(shape)
    rows = x.reshape(math.prod(x.shape[: x.ndim - len(shape)]), width)
    scale, shift = (None if p is None else p.reshape(width) for p in (weight, bias))
    out, saved = k.layer_norm(rows, scale, shift, eps)
    return out.reshape(x.shape), (saved, scale, None if bias is None else bias.dtype)


def _layer_norm_backward(k, saved, g, wants, shape, eps):
    saved, scale, shift_dtype = saved
    width = math.prod(shape)
    rows = g.reshape(math.prod(g.shape[: g.ndim - len(shape)]), width)
    want = wants[0]
    before = want.array.reshape(rows.shape) if isinstance(want, Before) else None
    weight, weight_into = _row(k, wants[1], shape, width, None if scale is None else scale.dtype)
    bias, bias_into = _row(k, wants[2], shape, width, shift_dtype)
    x = k.layer_norm_gradients(rows, saved, scale, before, want is not None, weight_into, bias_into)
    return None if x is None else x.reshape(g.shape), weight, bias


def _row(k, want, shape, width, dtype):
    """Return what a rule returns for a parameter, and (out, beta): the row that a kernel writes; None for neither.

    The gradient has its parameter's own dtype, which may be wider than that of the rows.
    """
    if want is None:
        return None, None
    if want is not WANTED and len(shape) == 1:  # it is a row already and goes straight into its memory
        return want, (want.array, want.beta)
    row = k.xp.empty(width, dtype)
    return row.reshape(shape), (row, 0.0)


# The sum and its normalised form are two results, so two operations. The first computes both, in one pass, and hands
# the second its own through `passed`. Backward begins with the second, which adds what came past it to its gradient.


def _norm_sum(k, x, added, weight, bias, shape, eps, passed):
    width = math.prod(shape)
    rows, others = (a.reshape(math.prod(a.shape[: a.ndim - len(shape)]), width) for a in (x, added))
    scale, shift = (None if p is None else p.reshape(width) for p in (weight, bias))
    total, out, saved = k.add_layer_norm(rows, others, scale, shift, eps)
    passed.append((out.reshape(x.shape), (saved, scale, None if bias is None else bias.dtype)))
    return total.reshape(x.shape), None


def _norm_sum_backward(k, saved, g, wants, shape, eps, passed):
    return g, g, None, None


def _summed_norm(k, total, weight, bias, shape, eps, passed):
    return passed.pop()


def _summed_norm_backward(k, saved, g, wants, shape, eps, passed):
    return _layer_norm_backward(k, saved, g, wants, shape, eps)


def _rms_norm(k, x, weight, eps):
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out, saved = k.rms_norm(rows, weight, eps)
    return out.reshape(x.shape), (saved, weight)


def _rms_norm_backward(k, saved, g, wants, eps):
    saved, weight = saved
    rows = g.reshape(math.prod(g.shape[:-1]), g.shape[-1])
    gradient = None
    if wants[1] is not None:
        kernel = k.rms_norm_weight_gradient
        gradient = _parameter(k, wants[1], weight.shape, weight.dtype, kernel, rows, saved)
    x = None if wants[0] is None else k.rms_norm_backward(rows, saved, weight).reshape(g.shape)
    return x, gradient


def _parameter(k, want, shape, dtype, kernel, *arrays):
    """Return a gradient in its parameter's own dtype, which may be wider than that of the rows."""
    if want is not WANTED and len(shape) == 1:  # it is a row already and goes straight into its memory
        return deliver(want, kernel, *arrays)
    return kernel(*arrays, k.xp.empty(math.prod(shape), dtype), 0.0).reshape(shape)


_apply_softmax = Operation("softmax", _softmax, _softmax_backward, floats=1)
_apply_log_softmax = Operation("log_softmax", _log_softmax, _log_softmax_backward, floats=1)
_apply_layer_norm = Operation(
    "layer_norm", _layer_norm, _layer_norm_backward, wide=(1, 2), joins=(0,), floats=1
)
_apply_norm_sum = Operation("sum_before_norm", _norm_sum, _norm_sum_backward, wide=(2, 3), floats=2)
_apply_summed_norm = Operation("norm_of_sum", _summed_norm, _summed_norm_backward, wide=(1, 2), joins=(0,))
_apply_rms_norm = Operation("rms_norm", _rms_norm, _rms_norm_backward, wide=(1,), floats=1)


def softmax(x: Any, axis: int = -1) -> Tensor:
    """Return exp(x) / sum(exp(x)) along ``axis``, without overflow. **Local.**"""
    return _apply_softmax(x, axis=axis)


def log_softmax(x: Any, axis: int = -1) -> Tensor:
    """Return the logarithm of :func:`softmax`, without its rounding. **Local.**"""
    return _apply_log_softmax(x, axis=axis)


def layer_norm(
    x: Any, weight: Any = None, bias: Any = None, *, shape: Any = None, eps: float = 1e-5
) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last axes. **Local.**

    The variance is the biased one; statistics are taken in float32 or wider.

    Args:
        x: (..., *shape).
        weight, bias: arrays of ``shape``, or None.
        shape: the lengths of the axes to normalise over; left out, those of ``weight``.
        eps: added to the variance.

    Raises:
        ValueError: x does not end in ``shape``.

    Source: Ba, Kiros, Hinton, "Layer normalization" (2016), equations 3 and 4.
    """
    shape = _normal_shape("layer_norm", x, weight, shape)
    return _apply_layer_norm(x, weight, bias, shape=shape, eps=eps)


def add_layer_norm(
    x: Any, added: Any, weight: Any = None, bias: Any = None, *, shape: Any = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return ``x + added`` and its :func:`layer_norm`, in one pass over memory, as is backward. **Local.**

    Args:
        x: (..., *shape).
        added: array of x's shape and dtype.
        weight, bias, shape, eps: see :func:`layer_norm`.

    Raises:
        ValueError: shapes that do not fit.
    """
    first, second = unwrap(x).shape, unwrap(added).shape
    if first != second:
        raise ValueError(f"added: expected x's shape {first}, got {second}; broadcast it first")
    attrs = {"shape": _normal_shape("add_layer_norm", x, weight, shape), "eps": eps, "passed": []}
    # The first operation reads weight and bias without a gradient for them.
    read = [p._read(True) if isinstance(p, Tensor) else p for p in (weight, bias)]
    total = _apply_norm_sum(x, added, *read, **attrs)
    return total, _apply_summed_norm(total, weight, bias, **attrs)


def _normal_shape(what: str, x: Any, weight: Any, shape: Any) -> tuple[int, ...]:
    """Return the lengths of the axes to normalise over after checking them."""
    if shape is None:
        if weight is None:
            raise ValueError(f"{what}: expected a weight or a shape, got neither; pass shape=")
        shape = unwrap(weight).shape
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    whole = unwrap(x).shape
    if not shape or whole[len(whole) - len(shape) :] != shape or len(whole) < len(shape):
        raise ValueError(f"{what}: expected x to end in axes {shape}, got {whole}; check the width")
    return shape


def rms_norm(x: Any, weight: Any = None, *, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis. **Local.**

    Args:
        x: (..., D).
        weight: (D,), or None.
        eps: added to the mean square.

    Raises:
        ValueError: x without axes, or a weight of another length.

    Source: Zhang, Sennrich, "Root mean square layer normalization" (2019), equation 4.
    """
    shape = unwrap(x).shape
    if not shape or (weight is not None and unwrap(weight).shape != shape[-1:]):
        other = "" if weight is None else f" and a weight of shape {unwrap(weight).shape}"
        raise ValueError(
            f"rms_norm: expected x of shape (..., D) and a weight (D,), got {shape}{other}; check the width"
        )
    return _apply_rms_norm(x, weight, eps=float(eps))
