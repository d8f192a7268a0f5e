"""Losses: a scalar mean that also carries the sum and the count it was made of.

Data-parallel training differentiates ``sum`` and divides by the counts of all ranks, so shares of different
sizes are exact and an empty one (sum 0, count 0, mean 0) is nothing special.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import kernels
from ..autodiff import Tensor, ops
from ..autodiff.recording import recorded
from ..autodiff.tensor import unwrap
from ..device import same_device

Array = Any


class Loss(Tensor):
    """A mean loss. As a tensor it is the mean; arithmetic with it gives plain tensors. **Local.**

    The mean is computed when something first asks for it, since training itself needs only the sum.

    Args:
        total: scalar tensor, the sum of the losses.
        count: how many there are: a number, or a 0-d array or tensor on the device.

    Attributes:
        sum: the scalar tensor ``total``.
        count: 0-d float64 array; it may hold any weight above 0, or 0 for an empty share.

    Example:
        >>> import numpy as np
        >>> loss = Loss(Tensor(np.float32([1, 2]), requires_grad=True).sum(), 2)
        >>> float(loss), float(loss.sum), float(loss.count)
        (1.5, 3.0, 2.0)
    """

    __slots__ = ("_mean", "count", "sum")

    sum: Tensor  # type: ignore[assignment]
    count: Array

    def __init__(self, total: Tensor, count: Any) -> None:
        if total.shape != ():
            raise ValueError(f"total: expected a scalar tensor, got shape {total.shape}; sum it first")
        self.sum = total
        xp, count = kernels.of(total.data).xp, unwrap(count)
        # A number reaches a GPU with the launch; an array would need a copy, which no graph can hold.
        number = isinstance(count, int | float)
        self.count = xp.full((), count, xp.float64) if number else xp.asarray(count, dtype=xp.float64)
        self._name = None
        self._key = 0
        self._mean: Tensor | None = None
        self._grad = self._binding = None
        self._written = -1
        self._requires_grad = total.requires_grad

    def _computed(self) -> Tensor:
        if self._mean is None:
            with recorded():  # whether it is recorded was settled when the sum was
                self._mean = ops.mean_of_sum(self.sum, self.count)
        return self._mean

    @property
    def _data(self) -> Array:
        return self._computed()._data

    @property
    def _node(self) -> Any:  # type: ignore[override]
        return self._computed()._node


def cross_entropy(output: Any, target: Any, ignore_index: int = -100) -> Loss:
    """Return the mean of -log softmax(output)[target] over all targets that count. **Local.**

    Args:
        output: logits (..., C), floating; 16-bit ones give a float32 loss.
        target: integers (...), each in 0..C-1, or ``ignore_index`` where nothing is to be learnt.
        ignore_index: the target that does not count.

    Raises:
        ValueError: shapes that do not fit, or a target out of range (on the CPU, at once).
        TypeError: targets that are not integers, or None.
        DeviceMismatchError: output and target on different devices.

    Example:
        >>> import numpy as np
        >>> loss = cross_entropy(np.zeros((2, 4)), np.array([3, -100]))
        >>> round(float(loss), 4), float(loss.count)
        (1.3863, 1.0)
    """
    logits, labels = unwrap(output), unwrap(target)
    if labels is None:
        raise _no_target("cross_entropy")
    if not hasattr(labels, "dtype"):
        labels = np.asarray(labels)
    if logits.ndim == 0 or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"target: expected shape {logits.shape[:-1]} for an output of shape {logits.shape} (classes "
            f"on the last axis), got {labels.shape}; give one class index a row"
        )
    same_device("cross_entropy", logits, labels)
    k = kernels.of(logits)
    if labels.dtype.kind in "iu" and k.checks_with_loss(logits, labels):
        count = k.xp.empty((), k.xp.float64)  # written beside the loss
        return Loss(ops.cross_entropy(output, labels, ignore_index, count, check=True), count)
    count = check_class_indices(labels, logits.shape[-1], ignore_index)
    return Loss(ops.cross_entropy(output, labels, ignore_index, count), count)


def _no_target(loss: str) -> TypeError:
    return TypeError(
        f"target: expected an array for {loss}, got None; give samples (x, y), as data.ArrayDataset(x, y) does"
    )


def mse(output: Any, target: Any) -> Loss:
    """Return the mean of (output - target)^2 over all elements; the count is their number. **Local.**

    Args:
        output: floating array of any shape.
        target: array of the same shape and dtype; float32 beside a 16-bit output, whose loss is float32.

    Raises:
        ValueError: different shapes: (N, 1) against (N,) would broadcast to N * N differences.
        TypeError: no target.
    """
    if target is None:
        raise _no_target("mse")
    shape, other = unwrap(output).shape, np.shape(unwrap(target))
    if shape != other:
        raise ValueError(f"target: expected shape {shape} of the output, got {other}; reshape one of them")
    return Loss(ops.squared_error(output, target), float(unwrap(output).size))


def check_class_indices(target: Any, classes: int, ignore_index: int | None = -100) -> Array:
    """Check class indices and count those that are not ``ignore_index``. **Local.**

    Args:
        target: integers of any shape.
        classes: C.
        ignore_index: a value to leave out, or None.

    Returns:
        0-d float64 array.

    Raises:
        TypeError: another dtype than integers, or None.
        ValueError: an index out of 0..C-1, with the first sample that has one.
    """
    target = unwrap(target)
    if target is None:
        raise _no_target("cross_entropy")
    if target.dtype.kind not in "iu":
        raise TypeError(
            f"target: expected integer class indices, got {target.dtype}; convert them with .astype(int64), "
            "or use mse for numbers"
        )
    return kernels.of(target).check_class_indices(target, classes, ignore_index)
