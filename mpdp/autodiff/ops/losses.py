"""Sums of losses over a share: what ``nn.losses`` divides by counts. Shapes: N rows, C classes."""

from __future__ import annotations

import math
import sys
from typing import Any

from ..operation import Operation
from ..tensor import Tensor


def _cross_entropy(k, logits, target, ignore_index, count, check=False):
    shape = logits.shape
    if len(shape) != 2:
        logits = logits.reshape(math.prod(shape[:-1]), shape[-1])
        target = target.reshape(-1)
    total, saved = k.cross_entropy(logits, target, ignore_index, count, check)
    return total, ([saved], shape)


def _cross_entropy_backward(k, saved, g, wants, ignore_index, count, check=False):
    held, shape = saved
    saved = held.pop()
    return k.cross_entropy_backward(g, saved, only_here(saved)).reshape(shape), None


def only_here(saved: tuple[Any, ...]) -> bool:
    """Return whether a tuple, which its caller alone refers to, is the last that refers to its first array.

    Then its memory may be written: the logits of a language model are the largest array of a step. An array counts
    that is a view of one that nothing else refers to.
    """
    unknown = object()  # what a count is that one name alone refers to differs between versions of Python
    one = sys.getrefcount(unknown)
    array = saved[0]
    if sys.getrefcount(array) > one + 1:  # this name, and the tuple
        return False
    base = array.base
    return base is None or sys.getrefcount(base) <= one + 1  # this name, and the view


def _squared_error(k, output, target):
    total, saved = k.squared_error(output, target)
    return total, (saved, output.dtype, target.dtype)


def _squared_error_backward(k, saved, g, wants):
    saved, first, second = saved
    grad = k.squared_error_backward(g, saved)
    return (
        None if wants[0] is None else grad.astype(first, copy=False),
        None if wants[1] is None else k.xp.negative(grad).astype(second, copy=False),
    )


def _scaled(k, total, count):
    # count is a 0-d array on the device, never read here; an empty share has mean 0.
    scale = (1.0 / k.xp.where(count > 0, count, 1.0)).astype(total.dtype)
    return total * scale, scale


def _scaled_backward(k, scale, g, wants, count):
    return (g * scale,)


_apply_cross_entropy = Operation("cross_entropy", _cross_entropy, _cross_entropy_backward, floats=1)
_apply_squared_error = Operation(
    "squared_error", _squared_error, _squared_error_backward, wide=(1,), floats=1
)
_apply_scaled = Operation("mean_of_sum", _scaled, _scaled_backward)


def cross_entropy(
    logits: Any, target: Any, ignore_index: int = -100, count: Any = None, check: bool = False
) -> Tensor:
    """Return the sum over rows of -log softmax(logits)[target], as a scalar. **Local.**

    Labels are not checked here (``nn.cross_entropy`` does). 16-bit logits give a float32 sum.

    Args:
        logits: (..., C).
        target: integers (...), in 0..C-1; rows with ``ignore_index`` add nothing.
        ignore_index: the label to leave out.
        count: how many labels are not ``ignore_index``, as a 0-d array, where it is known.
        check: check the labels and write ``count``, where the device's kernels can do so at once.
    """
    return _apply_cross_entropy(logits, target, ignore_index=ignore_index, count=count, check=check)


def squared_error(output: Any, target: Any) -> Tensor:
    """Return the sum of (output - target)^2 over all elements, for arrays of one shape. **Local.**

    The sum is float32 for a 16-bit output; the target may then be float32.
    """
    return _apply_squared_error(output, target)


def mean_of_sum(total: Any, count: Any) -> Tensor:
    """Return ``total / count``, or 0 for a count of 0, without reading the count on the host. **Local.**

    Args:
        total: a scalar.
        count: 0-d float64 array.
    """
    return _apply_scaled(total, count=count)
