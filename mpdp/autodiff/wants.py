"""What the engine asks of a backward rule for each input: nothing, an array, a sum, or a write into memory.

This is the whole vocabulary that operations and the engine share; neither knows more of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

Array = Any  # a NumPy or CuPy array


class Target:
    """Memory that a backward rule may write a gradient into: ``array = gradient + beta * array``.

    A rule that wrote returns the target itself; one that returns a plain array leaves the writing to the
    engine. With ``beta`` 0 the old contents are undefined and must not be read.

    Args:
        array: the gradient of a leaf, often a view of a large buffer; of the input's shape.
        beta: 0.0 for the first contribution, 1.0 for later ones.
    """

    __slots__ = ("array", "beta")

    def __init__(self, array: Array, beta: float) -> None:
        self.array = array
        self.beta = beta


class Pair(NamedTuple):
    """A gradient that is the sum of two arrays, which nobody has added yet: given to operations that take pairs."""

    one: Array
    other: Array


class Before:
    """A gradient of this input that other operations have found already: return the sum of it and one's own.

    Only operations that name the input in ``joins`` are asked so; it saves the pass that adds the two. The array is
    not to be written.

    Args:
        array: the gradient so far.
    """

    __slots__ = ("array",)

    def __init__(self, array: Array) -> None:
        self.array = array


class _Wanted:
    def __repr__(self) -> str:
        return "WANTED"


WANTED: Final = _Wanted()
"""Compute the gradient and return it as an array."""

Want = Any  # Target, Before, WANTED or None


def deliver(want: Want, kernel: Callable[..., Array], *arrays: Any) -> Any:
    """Run a kernel as ``want`` asks; return what a backward rule returns. **Local.**

    The kernel's last two parameters are ``out`` and ``beta``, as everywhere in ``kernels.base``.

    Example:
        >>> import numpy as np
        >>> from mpdp import kernels
        >>> out = np.full((2, 2), np.nan)
        >>> k = kernels.of(out)
        >>> target = Target(out, 0.0)
        >>> deliver(target, k.gemm, np.eye(2), np.ones((2, 2))) is target, out.sum()
        (True, np.float64(4.0))
    """
    if want is None:
        return None
    if want is WANTED:
        return kernel(*arrays)
    kernel(*arrays, want.array, want.beta)
    return want
