"""Initialisers: functions ``f(key, shape, dtype)`` that return a NumPy array of initial values.

The key alone fixes the numbers (``nn.seeding`` hands keys out), so ranks need no message to agree. Of a
weight of shape (o, i, *window), fan in is i times the window and fan out is o times the window.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..autodiff import Parameter
from ..kernels import random
from ..kernels.random import Key
from .seeding import next_parameter_key

Shape = tuple[int, ...]
Initialiser = Callable[[Key, Shape, Any], np.ndarray]


def parameter(
    initialiser: Initialiser, shape: Shape, dtype: Any = "float32", what: str = "init"
) -> Parameter:
    """Make the next parameter of the current seed. **Local.**

    Args:
        initialiser: one of this module's, or any ``f(key, shape, dtype)``.
        shape: lengths of the axes; any may be 0.
        dtype: a floating dtype.
        what: the argument's name in errors.

    Raises:
        TypeError, ValueError: the initialiser is no function, or returned another shape or dtype.

    Example:
        >>> parameter(zeros, (2,)).data
        array([0., 0.], dtype=float32)
    """
    shape, dtype = tuple(int(n) for n in shape), np.dtype(dtype)
    if not callable(initialiser):
        raise TypeError(
            f"{what}: expected an initialiser f(key, shape, dtype), got {type(initialiser).__name__}; "
            "use nn.init.constant(value) for a number"
        )
    values = initialiser(next_parameter_key(), shape, dtype)
    if not isinstance(values, np.ndarray):
        raise TypeError(
            f"{what}: expected an initialiser that returns an array, got {type(values).__name__} from it; "
            "call factories first, as in nn.init.kaiming_normal()"
        )
    if values.shape != shape or values.dtype != dtype:
        raise ValueError(
            f"{what}: expected the initialiser to return {dtype} {shape}, got {values.dtype} {values.shape}; "
            "use the shape and dtype it is given"
        )
    return Parameter(values)


def zeros(key: Key, shape: Shape, dtype: Any) -> np.ndarray:
    """Return zeros. **Local.**"""
    return np.zeros(shape, dtype)


def ones(key: Key, shape: Shape, dtype: Any) -> np.ndarray:
    """Return ones. **Local.**"""
    return np.ones(shape, dtype)


def constant(value: float) -> Initialiser:
    """Return an initialiser that fills with ``value``. **Local.**"""
    return lambda key, shape, dtype: np.full(shape, value, dtype)


def uniform(low: float = 0.0, high: float = 1.0) -> Initialiser:
    """Return an initialiser that draws from [low, high). **Local.**"""

    def draw(key: Key, shape: Shape, dtype: Any) -> np.ndarray:
        values = random.uniform(key, math.prod(shape))
        return (low + (high - low) * values).reshape(shape).astype(dtype)

    return draw


def normal(mean: float = 0.0, std: float = 1.0) -> Initialiser:
    """Return an initialiser that draws from the normal distribution. **Local.**"""

    def draw(key: Key, shape: Shape, dtype: Any) -> np.ndarray:
        return random.normal(key, math.prod(shape), mean, std, dtype).reshape(shape)

    return draw


def xavier_uniform(gain: float = 1.0) -> Initialiser:
    """Return an initialiser on [-a, a) with a = gain * sqrt(6 / (fan in + fan out)). **Local.**

    Source: Glorot, Bengio, "Understanding the difficulty of training deep feedforward neural networks"
    (2010), equation 16.
    """
    return _scaled(lambda fan_in, fan_out: gain * math.sqrt(2.0 / max(fan_in + fan_out, 1)), _flat)


def xavier_normal(gain: float = 1.0) -> Initialiser:
    """Return an initialiser of mean 0 and std gain * sqrt(2 / (fan in + fan out)). **Local.**

    Source: as for :func:`xavier_uniform`, equation 12.
    """
    return _scaled(lambda fan_in, fan_out: gain * math.sqrt(2.0 / max(fan_in + fan_out, 1)), normal)


def kaiming_uniform(gain: float = math.sqrt(2.0)) -> Initialiser:
    """Return an initialiser on [-a, a) with a = gain * sqrt(3 / fan in); the gain is that of ReLU. **Local.**

    Source: He, Zhang, Ren, Sun, "Delving deep into rectifiers" (2015), equation 10.
    """
    return _scaled(lambda fan_in, fan_out: gain / math.sqrt(max(fan_in, 1)), _flat)


def kaiming_normal(gain: float = math.sqrt(2.0)) -> Initialiser:
    """Return an initialiser of mean 0 and std gain / sqrt(fan in); the gain is that of ReLU. **Local.**

    Source: as for :func:`kaiming_uniform`.
    """
    return _scaled(lambda fan_in, fan_out: gain / math.sqrt(max(fan_in, 1)), normal)


def _flat(mean: float, std: float) -> Initialiser:
    """Return the uniform initialiser of a given standard deviation."""
    return uniform(mean - std * math.sqrt(3.0), mean + std * math.sqrt(3.0))


def _scaled(std: Callable[[int, int], float], family: Callable[[float, float], Initialiser]) -> Initialiser:
    """Return an initialiser whose standard deviation depends on the weight's fans."""

    def draw(key: Key, shape: Shape, dtype: Any) -> np.ndarray:
        if len(shape) < 2:
            raise ValueError(
                f"shape: expected two axes or more (outputs, inputs, ...), got {shape}; "
                "use zeros, constant, uniform or normal for vectors"
            )
        window = math.prod(shape[2:])
        return family(0.0, std(shape[1] * window, shape[0] * window))(key, shape, dtype)

    return draw
