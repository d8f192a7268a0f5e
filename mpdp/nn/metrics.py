"""Metrics: functions ``metric(output, target) -> (sum, count)`` that ranks and batches add up exactly.

Any function of that form is a metric, named by its ``__name__``. Two attributes are optional: ``finish(mean)`` turns
sum / count into the number that is reported, and :class:`Gather` is for what is no sum over samples. This module says
what is computed; who adds it up over ranks is in ``training.evaluation``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import kernels
from ..autodiff.tensor import unwrap
from ..device import same_device
from .losses import check_class_indices, cross_entropy


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
    output, target, counted = _classes("accuracy", output, target, ignore_index)
    xp = kernels.of(output).xp
    right = (output.argmax(axis=-1) == target) & (target != ignore_index)
    return xp.asarray(xp.count_nonzero(right), dtype=xp.float64), counted


class top_k:
    """Count targets among the k largest outputs; of equal outputs the first ones are the larger, as in ``accuracy``.

    **Local.**

    Args:
        k: how many; ``top_k(1)`` is ``accuracy``.
        ignore_index: the target that does not count.

    Example:
        >>> metric = top_k(2)
        >>> metric.__name__, metric(np.array([[0.5, 0.2, 0.3], [0.5, 0.2, 0.3]]), np.array([2, 1]))
        ('top_2', (array(1.), array(2.)))
    """

    def __init__(self, k: int, ignore_index: int = -100) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k: expected an integer of 1 or more, got {k!r}; top_k(5) is usual")
        self.k, self.ignore_index = k, ignore_index
        self.__name__ = f"top_{k}"

    def __call__(self, output: Any, target: Any) -> tuple[Any, Any]:
        output, target, counted = _classes(self.__name__, output, target, self.ignore_index)
        xp = kernels.of(output).xp
        output = output.astype(xp.float32) if output.dtype.itemsize == 2 else output
        counts = target != self.ignore_index
        label = xp.where(counts, target, 0)[..., None]
        own = xp.take_along_axis(output, label, axis=-1)
        before = (output == own) & (xp.arange(output.shape[-1]) < label)
        rank = xp.count_nonzero((output > own) | before, axis=-1)
        right = (rank < self.k) & counts & (own == own)[..., 0]  # a NaN is larger than nothing, and no hit
        return xp.asarray(xp.count_nonzero(right), dtype=xp.float64), counted


class mean:
    """Average ``function(output, target)`` over all the values that it returns.

    **Local.**

    Args:
        function: called with arrays of a batch; returns an array, a value a sample or more.
        name: of the metric (default: the function's).

    Example:
        >>> error = mean(lambda output, target: abs(output - target), name="absolute_error")
        >>> error.__name__, error(np.array([1.0, 2.0, 4.0]), np.array([1.0, 1.0, 1.0]))
        ('absolute_error', (array(4.), 3))
    """

    def __init__(self, function: Callable[[Any, Any], Any], name: str | None = None) -> None:
        self.function = function
        self.__name__ = _name(function, name)

    def __call__(self, output: Any, target: Any) -> tuple[Any, Any]:
        values = unwrap(self.function(unwrap(output), unwrap(target)))
        if not hasattr(values, "dtype"):
            values = np.asarray(values)
        xp = kernels.of(values).xp
        return xp.asarray(values.sum(dtype=xp.float64)), int(values.size)


class _Perplexity:
    """Return e to the mean cross-entropy over all targets that count.

    **Local.** Over batches and ranks the cross-entropy is added up, so it is exact where batches have different
    numbers of targets, which a mean of perplexities is not.

    Example:
        >>> perplexity.__name__, round(perplexity.finish(0.6931471805599453), 12)
        ('perplexity', 2.0)
    """

    __name__ = "perplexity"

    def __call__(self, output: Any, target: Any, ignore_index: int = -100) -> tuple[Any, Any]:
        loss = cross_entropy(unwrap(output), target, ignore_index)
        return unwrap(loss.sum), loss.count

    def finish(self, mean_loss: float) -> float:
        """Return e to the mean; infinity where that is too large. **Local.**"""
        with np.errstate(over="ignore"):
            return float(np.exp(mean_loss))


perplexity = _Perplexity()


class Gather:
    """A metric of all samples at once, for what is no sum over samples: a rank correlation, an area under a curve.

    **Local.** ``rows`` of every batch are collected, put in the order of the data set, and ``function`` is called once,
    on rank 0, whatever the number of ranks: so all ranks report the same bits. Rank 0 holds the rows of all samples.
    For validation and ``evaluate``; batches of training have no such metric.

    Args:
        function: ``function(*arrays)``: NumPy arrays with a row a sample; returns a number.
        rows: ``rows(output, target)`` returns what is collected: an array or a tuple of them, with a row a sample
            (default: output and target).
        name: of the metric (default: the function's).

    Example:
        >>> def median_error(output, target):
        ...     return np.median(abs(output - target))
        >>> metric = Gather(median_error)
        >>> metric.__name__, metric.rows(np.zeros(3), np.ones(3))
        ('median_error', (array([0., 0., 0.]), array([1., 1., 1.])))
    """

    def __init__(
        self,
        function: Callable[..., Any],
        rows: Callable[[Any, Any], Any] | None = None,
        name: str | None = None,
    ) -> None:
        self.function = function
        self._rows = rows
        self.__name__ = _name(function, name)

    def rows(self, output: Any, target: Any) -> tuple[Any, ...]:
        """Return the arrays that are collected of one batch. **Local.**"""
        output, target = unwrap(output), unwrap(target)
        found = (output, target) if self._rows is None else self._rows(output, target)
        return tuple(unwrap(part) for part in (found if isinstance(found, tuple) else (found,)))

    def __call__(self, output: Any, target: Any) -> Any:
        """Return the metric of one batch alone. **Local.**"""
        return self.function(*(kernels.of(part).to_numpy(part) for part in self.rows(output, target)))


def metric_name(metric: Any) -> str:
    """Return a metric's name: its ``__name__``, of a partial its function's, else its class's. **Local.**"""
    if isinstance(metric, functools.partial):
        metric = metric.func
    return getattr(metric, "__name__", type(metric).__name__)


def finished(metric: Any, total: float, count: float) -> float:
    """Return what a metric reports for a sum and a count; NaN where nothing was counted. **Local.**

    Raises:
        TypeError: ``finish`` returned no number.
    """
    if not count:
        return float("nan")
    if isinstance(metric, functools.partial):
        metric = metric.func
    value = total / count
    finish = getattr(metric, "finish", None)
    if finish is None:
        return float(value)
    result = finish(float(value))
    try:
        return float(result)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"metrics: expected a number from {metric_name(metric)}.finish, got {type(result).__name__}; "
            "it turns sum / count into what is reported"
        ) from error


def _name(function: Any, name: str | None) -> str:
    return metric_name(function) if name is None else str(name)


def _classes(what: str, output: Any, target: Any, ignore_index: int) -> tuple[Any, Any, Any]:
    """Return output and target as arrays that fit each other, and how many targets count."""
    output, target = unwrap(output), unwrap(target)
    if output.ndim == 0 or target.shape != output.shape[:-1]:
        raise ValueError(
            f"target: expected shape {output.shape[:-1]} for an output of shape {output.shape} (classes "
            f"on the last axis), got {target.shape}; give one class index a row"
        )
    same_device(what, output, target)
    return output, target, check_class_indices(target, output.shape[-1], ignore_index)
