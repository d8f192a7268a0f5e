"""Metrics: functions ``metric(output, target) -> (sum, count)`` that ranks and batches add up exactly."""

from __future__ import annotations

from typing import Any

from .. import kernels
from ..autodiff.tensor import unwrap
from ..device import same_device
from .losses import check_class_indices


def accuracy(output: Any, target: Any, ignore_index: int = -100) -> tuple[Any, Any]:
    """Count predictions (the largest output, the first of equal ones) that are the target. **Local.**

    Args:
        output: logits or probabilities (..., C), a tensor or an array.
        target: integers (...); ``ignore_index`` does not count.
        ignore_index: the target that does not count.

    Returns:
        (correct, counted): 0-d float64 arrays on the device, so nothing waits for it.

    Raises:
        ValueError, TypeError, DeviceMismatchError: as ``nn.cross_entropy``.

    Example:
        >>> import numpy as np
        >>> accuracy(np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([1, 1]))
        (array(1.), array(2.))
    """
    output, target = unwrap(output), unwrap(target)
    if output.ndim == 0 or target.shape != output.shape[:-1]:
        raise ValueError(
            f"target: expected shape {output.shape[:-1]} for an output of shape {output.shape} (classes "
            f"on the last axis), got {target.shape}; give one class index a row"
        )
    same_device("accuracy", output, target)
    xp = kernels.of(output).xp
    counted = check_class_indices(target, output.shape[-1], ignore_index)
    right = (output.argmax(axis=-1) == target) & (target != ignore_index)
    return xp.asarray(xp.count_nonzero(right), dtype=xp.float64), counted
