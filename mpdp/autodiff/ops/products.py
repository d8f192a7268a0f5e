"""Products of matrices: ``matmul`` and ``linear``.

Gradients of leaves are written straight into their memory. Shapes: N rows, i and o features in and out.
"""

from __future__ import annotations

import math
from typing import Any

from ...kernels.base import ACTIVATIONS
from ..operation import Operation
from ..tensor import Tensor, unwrap
from ..wants import Target, deliver
from .shapes import reshape


def _flat(x):
    """Return (..., i) as (N, i); N is counted, not inferred, so that empty arrays work."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _linear(k, x, weight, bias=None, *, activation=None):
    shape = x.shape
    if weight.ndim != 2 or shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"linear: expected x of shape (..., i) and a weight of shape (o, i), got {shape} and "
            f"{weight.shape}; the weight's shape is (outputs, inputs)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"linear: expected a bias of shape {weight.shape[:1]}, got {bias.shape}; one number an output"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(
            f'activation: expected None, "relu" or "gelu", got {activation!r}; apply others to the result'
        )
    rows = _flat(x)
    out, kept = k.linear(rows, weight, bias, activation)
    if len(shape) != 2:
        out = out.reshape(shape[:-1] + weight.shape[:1])
    return out, (rows, weight, shape, kept)


def _linear_backward(k, saved, g, wants, *, activation=None):
    rows, weight, shape, kept = saved
    found = _gradients(k, _flat(g), kept, activation, rows, weight, shape, [*wants, None][:3])
    return found[: len(wants)]


def _gradients(k, g, kept, activation, rows, weight, shape, wants):
    """Return what a backward rule returns for x, weight and bias."""
    into = [_into(want) for want in wants]
    if into[0] is not None and len(shape) != 2:
        into[0] = None, 0.0
    found = k.linear_backward(g, kept, activation, rows, weight, tuple(into))
    if found[0] is not None and len(shape) != 2:
        found[0] = found[0].reshape(shape)
    return tuple([_done(*each) for each in zip(wants, into, found)])


def _into(want):
    """Return where a gradient goes, as the kernels are told; a leaf's own memory where there is one."""
    if want is None:
        return None
    return (want.array, want.beta) if isinstance(want, Target) else (None, 0.0)


def _done(want, into, array):
    return array if into is None or into[0] is None else want


linear = Operation("linear", _linear, _linear_backward, floats=1)
"""``linear(x, weight, bias=None, activation=None)``: ``x @ weight.T + bias`` of x (..., i), weight (o, i), bias (o,).

``activation`` is applied to the result in the same pass: None, ``"relu"`` or ``"gelu"`` (the tanh form).
"""


def _matmul(k, a, b):
    if b.ndim == 2 and a.ndim > 2:  # one product of many rows instead of many products
        return k.gemm(_flat(a), b).reshape(a.shape[:-1] + b.shape[-1:]), (a, b)
    return k.gemm(a, b), (a, b)


def _matmul_backward(k, saved, g, wants):
    a, b = saved
    left = right = None
    if b.ndim == 2:
        rows = _flat(g)
        if a.ndim == 2:
            left = deliver(wants[0], k.gemm, g, b.T)
        elif wants[0] is not None:
            left = k.gemm(rows, b.T).reshape(a.shape)
        return left, deliver(wants[1], k.gemm, _flat(a).T, rows)
    if wants[0] is not None:
        left = deliver(wants[0], k.sum_to, k.gemm(g, b.swapaxes(-1, -2)), a.shape)
    if wants[1] is not None:
        right = deliver(wants[1], k.sum_to, k.gemm(a.swapaxes(-1, -2), g), b.shape)
    return left, right


_apply_matmul = Operation("matmul", _matmul, _matmul_backward)


def matmul(a: Any, b: Any) -> Tensor:
    """Return the matrix product over the last two axes; other axes broadcast, as in ``numpy.matmul``.

    **Local.** A vector on the left is a row, on the right a column; its axis is gone from the result.

    Args:
        a: (..., n, i) or (i,).
        b: (..., i, o) or (i,).

    Raises:
        ValueError: inner lengths that differ, or a scalar.
    """
    left, right = unwrap(a).shape, unwrap(b).shape
    if not left or not right or left[-1] != right[-2 if len(right) > 1 else 0]:
        raise ValueError(
            f"matmul: expected a of shape (..., n, i) and b of shape (..., i, o), got {left} and {right}; "
            "multiply scalars with *"
        )
    if len(left) == 1:
        a = reshape(a, (1,) + left)
    if len(right) == 1:
        b = reshape(b, right + (1,))
    out = _apply_matmul(a, b)
    if len(left) > 1 and len(right) > 1:
        return out
    shape = out.shape[:-2] + out.shape[-2:-1] * (len(left) > 1) + out.shape[-1:] * (len(right) > 1)
    return reshape(out, shape)
