"""Operation: a forward rule beside its backward rule, and what happens when one is called.

Operations know arrays and kernels; the engine (this module and ``tape``) knows tensors and nodes. Neither
knows more of the other than the signatures below, so a user's own operation is like those of ``ops``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy import generic, ndarray

from .. import kernels
from ..device import same_device
from ..kernels.cpu import KERNELS
from ..kernels.precision import is_floating, is_half, wide
from .recording import Node, recording
from .tensor import Tensor, make

Forward = Callable[..., tuple[Any, Any]]
Backward = Callable[..., tuple[Any, ...]]


class Operation:
    """A differentiable function of arrays with one result; :func:`register` makes one. **Local.**

    Calling it takes tensors, arrays, Python or NumPy scalars (weak: they take the dtype of the arrays) and
    ``None``, passes keyword arguments through to both rules, and returns a :class:`Tensor`.

    All floating arrays share one dtype. The inputs at the positions in ``wide`` may be float32 where that dtype has
    16 bits; a parameter at such a position is read as its float32 master also where others are read as their
    working copies. The first ``floats`` inputs have to be floating: kernels write results in their dtype.

    Raises:
        TypeError: floating dtypes that differ, no floats where they are needed, or an argument that is none of these.
        DeviceMismatchError: arrays on different devices.
    """

    __slots__ = ("backward", "floats", "forward", "joins", "key", "name", "pairs", "wide")

    again = None  # a part of the graph that is computed again has a method here

    def __init__(
        self,
        name: str,
        forward: Forward,
        backward: Backward,
        wide: tuple[int, ...] = (),
        pairs: bool = False,
        joins: tuple[int, ...] = (),
        floats: int = 0,
    ) -> None:
        self.name = name
        self.floats = floats
        self.pairs = pairs  # whether the backward rule adds two parts of its gradient itself
        self.joins = joins  # positions of inputs whose gradient so far the backward rule adds its own to
        self.wide = frozenset(wide)
        self.forward = forward
        self.backward = backward
        self.key = int.from_bytes(name.encode(), "little")  # for the tape's signature

    def __repr__(self) -> str:
        return f"Operation({self.name!r})"

    def __call__(self, *inputs: Any, **attrs: Any) -> Tensor:
        arrays: list[Any] = []
        sources: list[Any] = []
        first = floating = None  # the first array; the dtype that all floats share
        plain = True  # all arrays are NumPy's: nothing to ask of devices
        needed = False
        for value in inputs:
            source = None
            if isinstance(value, Tensor):
                if value._requires_grad:
                    source = value._node or value
                    needed = True
                if value._binding is None:
                    value = value._data
                else:
                    value = value._read(len(arrays) in self.wide)
            sources.append(source)
            if type(value) is not ndarray:
                if isinstance(value, generic):
                    value = value.item()
                if value is None or isinstance(value, bool | int | float):
                    arrays.append(value)
                    continue
                if not hasattr(value, "dtype"):
                    raise TypeError(
                        f"{self.name}: expected tensors, arrays or numbers, got {type(value).__name__}; "
                        "wrap it with Tensor(...)"
                    )
                plain = False
            arrays.append(value)
            if first is None:
                first = value
            dtype = value.dtype
            if dtype is not floating and (floating is None or dtype != floating):
                if not is_floating(dtype):
                    if len(arrays) <= self.floats:
                        raise TypeError(
                            f"{self.name}: expected floating inputs, got {dtype}; convert it with .astype(...)"
                        )
                elif floating is None:
                    floating = dtype
                elif len(arrays) - 1 not in self.wide or dtype != wide(floating):
                    raise self._mixed(arrays)
        if first is None:
            raise TypeError(f"{self.name}: expected at least one tensor or array, got none; use Tensor(...)")
        if plain:
            k: Any = KERNELS
            out, saved = self.forward(k, *arrays, **attrs)
        else:
            device = same_device(self.name, *[array for array in arrays if hasattr(array, "dtype")])
            k = kernels.for_device(device)
            if k.is_current():
                out, saved = self.forward(k, *arrays, **attrs)
            else:
                with k.active():  # results are made on the current GPU
                    out, saved = self.forward(k, *arrays, **attrs)
        if type(out) is not ndarray and (isinstance(out, generic) or not hasattr(out, "dtype")):
            out = k.xp.asarray(out)  # NumPy turns 0-d results into scalars
        if not needed or not recording():
            return make(out, None)
        return make(out, Node(self, sources, saved, attrs, k, out.shape, out.dtype))

    def _mixed(self, arrays: list[Any]) -> TypeError:
        dtypes = [x.dtype for x in arrays if hasattr(x, "dtype")]
        # Working copies, and an array that a wrapper would have rounded.
        half = any(is_half(dtype) for dtype in dtypes)
        return TypeError(
            f"{self.name}: expected floating inputs of one dtype, got {', '.join(map(str, dtypes))}; convert one with "
            ".astype(...)" + (", or call the model through its trainer or trainer.parallel" if half else "")
        )


def register(name: str, forward: Forward, backward: Backward, *, wide: tuple[int, ...] = ()) -> Operation:
    """Make an operation of your own; call the result with tensors. **Local.**

    ``forward(k, *arrays, **attrs) -> (out, saved)`` computes the result from arrays. ``k`` holds the kernels
    of their device: use ``k.xp`` (NumPy or CuPy) and both work. ``saved`` is anything backward needs.

    ``backward(k, saved, g, wants, **attrs)`` returns one gradient an input, given that of the result. For
    each input ``wants`` holds ``None`` (return None), ``WANTED`` (return an array of the input's shape and
    dtype) or a :class:`~mpdp.autodiff.Target`: return an array all the same, or write
    ``target.array = gradient + target.beta * target.array`` and return the target, which saves a pass.
    Neither rule may change its input arrays or g. :func:`~mpdp.autodiff.check` tests the pair.

    Args:
        name: how errors and the tape's signature call it; equal on all ranks.
        forward: the forward rule.
        backward: the backward rule.
        wide: positions of inputs that may be float32 beside 16-bit ones, as a layer norm's weight; a parameter there
            is its float32 master under every precision, and its gradient is float32.

    Example:
        >>> import numpy as np
        >>> from mpdp import autodiff
        >>> def forward(k, x):
        ...     return k.xp.square(x), x
        >>> def backward(k, x, g, wants):
        ...     return (2 * g * x,)
        >>> square = autodiff.register("square", forward, backward)
        >>> autodiff.check(square, np.array([1.0, -2.0, 3.0])) < 1e-6
        True
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name: expected a string of one character or more, got {name!r}; name the operation")
    for rule, what in ((forward, "forward"), (backward, "backward")):
        if not callable(rule):
            raise TypeError(
                f"{what}: expected a function, got {type(rule).__name__}; see the docs of register"
            )
    return Operation(name, forward, backward, wide)
