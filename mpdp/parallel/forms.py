"""The forms in which a program hands over losses and inputs, brought to one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..autodiff import Tensor


def split_loss(loss: Any, samples_seen: float | None) -> tuple[Tensor, float, float]:
    """Return (tensor, factor, count) such that tensor * factor is the loss sum. **Local.**

    Raises:
        TypeError: a loss of no known form.
        ValueError: a tensor that is not a scalar, a plain scalar without a count, or a count below 0.
    """
    if isinstance(loss, tuple) and len(loss) == 2:
        total, count = loss
        if isinstance(total, Tensor) and total.size == 1:
            return _scalar(total), 1.0, _checked(float(count.data if isinstance(count, Tensor) else count))
    elif isinstance(loss, Tensor):
        count = getattr(loss, "count", None)
        if count is not None and isinstance(loss.sum, Tensor):
            return loss.sum, 1.0, _checked(float(count))
        if loss.size != 1:
            raise ValueError(
                f"loss: expected a scalar, got shape {tuple(loss.shape)}; take the mean over the leading dimension, "
                "or return (sum, count)"
            )
        if samples_seen is None:
            raise ValueError(
                "loss: expected a count beside a plain scalar, got none; call the model through this object "
                "or pass count="
            )
        count = _checked(float(samples_seen))
        return _scalar(loss), count, count
    raise TypeError(
        "loss: expected a scalar Tensor, a loss of mpdp.nn or a pair (sum, count) with a Tensor sum, "
        f"got {type(loss).__name__}; return one of these"
    )


def split_captured(loss: Any, samples_seen: int) -> tuple[Tensor, float, Any]:
    """Return what :func:`split_loss` does without a look at the device: the count may be a 0-d float64 array there.

    **Local.**
    """
    count = loss[1] if isinstance(loss, tuple) and len(loss) == 2 else getattr(loss, "count", None)
    count = count.data if isinstance(count, Tensor) else count
    if count is None or not hasattr(count, "dtype") or isinstance(count, np.generic):
        return split_loss(loss, samples_seen)
    total = loss[0] if isinstance(loss, tuple) else loss.sum
    if not isinstance(total, Tensor) or total.size != 1:
        return split_loss(loss, samples_seen)  # says what is wrong
    return _scalar(total), 1.0, count.reshape(()).astype(np.float64, copy=False)


def check_rate(lr: float, step: int) -> None:
    """Refuse a learning rate that would lose the weights, and the next checkpoint with them. **Local.**"""
    if not 0.0 <= lr < math.inf:  # NaN too
        raise ValueError(
            f"lr: expected a finite number of 0 or more at step {step}, got {lr}; look at the schedule"
        )


def check_clip(**limits: float | None) -> None:
    """Refuse a limit of the gradient that isn't above 0. **Local.**"""
    for name, limit in limits.items():
        if limit is not None and not limit > 0:
            raise ValueError(f"{name}: expected a number above 0, got {limit}; None does not clip")


def leading_length(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the number of samples in a model's inputs: their common leading length. **Local.**"""
    for value in (*inputs, *kwargs.values()):
        shape = getattr(value, "shape", None)
        if shape:
            return int(shape[0])
    raise ValueError("inputs: expected an array with a leading sample dimension, got none; pass one")


def _scalar(total: Tensor) -> Tensor:
    """Return a tensor of one element in the shape ()."""
    return total if total.shape == () else total.reshape(())


def _checked(count: float) -> float:
    """Return a count of samples or tokens; below 0 or NaN, it would keep an update from the weights unseen."""
    if not 0.0 <= count < math.inf:
        raise ValueError(
            f"count: expected a finite number of 0 or more, got {count}; return how many things the sum is over"
        )
    return count
