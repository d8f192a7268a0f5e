"""Reductions over axes: sum, mean and max."""

from __future__ import annotations

import math
from typing import Any

from ..operation import Operation
from ..tensor import Tensor


def _axes(axis, ndim):
    """Return the axes as a sorted tuple of positive integers."""
    if axis is None:
        return tuple(range(ndim))
    given = axis if isinstance(axis, tuple | list) else (axis,)
    axes = tuple(sorted(a + ndim if a < 0 else a for a in given))
    if len(set(axes)) != len(axes) or any(not 0 <= a < ndim for a in axes):
        raise ValueError(
            f"axis: expected distinct integers in {-ndim}..{ndim - 1} for {ndim} axes, got {axis}; "
            "count axes from 0"
        )
    return axes


def _kept(shape, axes):
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


def _sum(k, x, axis, keepdims):
    axes = _axes(axis, x.ndim)
    return k.sum(x, axes, keepdims), (x.shape, _kept(x.shape, axes))


def _sum_backward(k, saved, g, wants, axis, keepdims):
    shape, kept = saved
    return (k.xp.broadcast_to(g.reshape(kept), shape),)


def _mean(k, x, axis, keepdims):
    axes = _axes(axis, x.ndim)
    # An empty share has nothing to average: 0 and not 0 / 0, so that it adds nothing to the other ranks'.
    scale = 1.0 / (math.prod(x.shape[i] for i in axes) or 1)
    return k.mean(x, axes, keepdims), (x.shape, _kept(x.shape, axes), scale)


def _mean_backward(k, saved, g, wants, axis, keepdims):
    shape, kept, scale = saved
    return (k.xp.broadcast_to((g * scale).reshape(kept), shape),)


def _max(k, x, axis, keepdims):
    axes = _axes(axis, x.ndim)
    out = k.xp.amax(x, axis=axes, keepdims=keepdims)
    return out, (x, out, _kept(x.shape, axes), axes)


def _max_backward(k, saved, g, wants, axis, keepdims):
    x, out, kept, axes = saved
    share = (x == out.reshape(kept)).astype(g.dtype)
    share /= k.sum(share, axes, True)
    share *= g.reshape(kept)
    return (share,)


_apply_sum = Operation("sum", _sum, _sum_backward)
_apply_mean = Operation("mean", _mean, _mean_backward)
_apply_max = Operation("max", _max, _max_backward)


def sum(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Return the sum over ``axis``; 16-bit floats are added in float32. **Local.**

    Args:
        x: array of any shape.
        axis: an integer, a tuple of them, or None for all axes.
        keepdims: keep the axes with length 1.
    """
    return _apply_sum(x, axis=axis, keepdims=keepdims)


def mean(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Return the mean over ``axis``; where there is nothing to average it is 0, not NaN. **Local.**"""
    return _apply_mean(x, axis=axis, keepdims=keepdims)


def max(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Return the maximum over ``axis``; equal maxima share the gradient equally. **Local.**"""
    return _apply_max(x, axis=axis, keepdims=keepdims)
