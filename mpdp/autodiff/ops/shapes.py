"""Shapes: reshape, transpose, indexing, and joining tensors along an axis."""

from __future__ import annotations

import math
from typing import Any

from ...device import same_device
from ...kernels.precision import is_floating
from ..operation import Operation
from ..tensor import Tensor, unwrap


def _reshape(k, x, shape):
    return x.reshape(shape), x.shape


def _reshape_backward(k, before, g, wants, shape):
    return (g.reshape(before),)


def _transpose(k, x, axes):
    return x.transpose(axes), None


def _transpose_backward(k, saved, g, wants, axes):
    inverse = [0] * len(axes)
    for i, axis in enumerate(axes):
        inverse[axis] = i
    return (g.transpose(inverse),)


def _getitem(k, x, index):
    return x[index], x.shape


def _getitem_backward(k, shape, g, wants, index):
    return (k.scatter(g, index, shape),)


def _concatenate(k, *parts, axis):
    floating = next((part.dtype for part in parts if is_floating(part.dtype)), None)
    if floating is not None:  # integers take the others' dtype, as in arithmetic
        parts = tuple(part.astype(floating, copy=False) for part in parts)
    return k.xp.concatenate(parts, axis=axis), [part.shape[axis] for part in parts]


def _concatenate_backward(k, lengths, g, wants, axis):
    gradients, start = [], 0
    where = [slice(None)] * g.ndim
    for want, length in zip(wants, lengths):
        where[axis] = slice(start, start + length)
        gradients.append(None if want is None else g[tuple(where)])
        start += length
    return tuple(gradients)


_apply_reshape = Operation("reshape", _reshape, _reshape_backward)
_apply_transpose = Operation("transpose", _transpose, _transpose_backward)
_apply_getitem = Operation("getitem", _getitem, _getitem_backward)
_apply_concatenate = Operation("concatenate", _concatenate, _concatenate_backward)


def reshape(x: Any, *shape: Any) -> Tensor:
    """Return the elements in another shape. **Local.**

    Args:
        x: array of any shape.
        shape: lengths, as integers or one tuple. One may be -1: what is left of the elements. For an empty
            share, whose leading length 0 leaves that open, it is what is left of a sample's elements.

    Raises:
        ValueError: another number of elements.
    """
    if len(shape) == 1 and isinstance(shape[0], tuple | list):
        shape = tuple(shape[0])
    before = unwrap(x).shape
    if -1 in shape and before[:1] == (0,) and shape[0] == 0:
        rest = math.prod(n for n in shape[1:] if n != -1)
        sample = math.prod(before[1:])
        shape = tuple((sample // rest if rest else 0) if n == -1 else n for n in shape)
    return _apply_reshape(x, shape=shape)


def transpose(x: Any, *axes: Any) -> Tensor:
    """Return the axes in the order ``axes`` (integers or one tuple), reversed if left out. **Local.**"""
    if len(axes) == 1 and isinstance(axes[0], tuple | list):
        axes = tuple(axes[0])
    ndim = unwrap(x).ndim
    axes = tuple(axis + ndim if axis < 0 else axis for axis in axes) or tuple(range(ndim))[::-1]
    if sorted(axes) != list(range(ndim)):
        raise ValueError(f"transpose: expected each of the axes 0..{ndim - 1} once, got {axes}; list all")
    return _apply_transpose(x, axes=axes)


def getitem(x: Any, index: Any) -> Tensor:
    """Return ``x[index]`` for anything that indexes an array: integers, slices, ``...``, None, index or
    boolean arrays on the device of x. **Local.** An element chosen twice gets the sum of both gradients.
    """  # fmt: skip
    index = tuple(unwrap(part) for part in index) if isinstance(index, tuple) else unwrap(index)
    arrays = [part for part in (index if isinstance(index, tuple) else (index,)) if getattr(part, "ndim", 0)]
    if arrays:
        same_device("getitem", unwrap(x), *arrays)
    return _apply_getitem(x, index=index)


def concatenate(tensors: Any, axis: int = 0) -> Tensor:
    """Return the tensors joined along an existing axis. **Local.**"""
    tensors = tuple(tensors)
    if not tensors:
        raise ValueError("concatenate: expected one tensor or more, got none; pass a sequence")
    return _apply_concatenate(*tensors, axis=_axis(axis, unwrap(tensors[0]).ndim))


def stack(tensors: Any, axis: int = 0) -> Tensor:
    """Return the tensors, all of one shape, joined along a new axis. **Local.**"""
    tensors = tuple(tensors)
    if not tensors:
        raise ValueError("stack: expected one tensor or more, got none; pass a sequence")
    ndim = unwrap(tensors[0]).ndim + 1
    axis = _axis(axis, ndim)
    joined = [reshape(t, unwrap(t).shape[:axis] + (1,) + unwrap(t).shape[axis:]) for t in tensors]
    return concatenate(joined, axis)


def _axis(axis: int, ndim: int) -> int:
    """Return an axis counted from 0 after checking it."""
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis: expected an integer in {-ndim}..{ndim - 1}, got {axis}; count axes from 0")
    return axis % ndim
