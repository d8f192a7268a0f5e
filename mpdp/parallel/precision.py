"""Precision: what a replica keeps in which dtype, and what forward and backward run in.

The weights that the optimizer updates are the *masters*: float32, or float64. Under 16 bits, forward and backward read
working copies of them, and the model's floating inputs are rounded on entry; operations never cast (their rules are in
``docs/guide.md``). It knows no model and no ranks. Read ``replica`` for the memory and ``data_parallel`` for the use.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import ml_dtypes
import numpy as np

from .. import kernels
from ..autodiff import Tensor, ops
from ..autodiff.recording import working_copies
from ..kernels.precision import tf32
from ..optim import LossScale

NAMES = ("float32", "float64", "tf32", "bfloat16", "float16")
_HALVES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
_REDUCED = {name: np.dtype(name) for name in ("float16", "float32", "float64")}
_REDUCED["bfloat16"] = _HALVES["bfloat16"]


class Precision:
    """The dtypes of one replica.

    **Local.**

    Args:
        name: one of ``NAMES``; None for the dtype that the parameters have, without working copies.
        parameters: their common dtype; None for a model without any.

    Attributes:
        name: as given, or the parameters' dtype.
        master: dtype of the weights that the optimizer updates.
        copies: dtype of the working copies, or None.
        tf32: float32 products may use TF32, where the device has it.
        scaled: the loss is scaled.

    Raises:
        ValueError: no such precision.
        TypeError: parameters of another dtype than the masters'.
    """

    def __init__(self, name: str | None, parameters: np.dtype | None) -> None:
        if name is not None and name not in NAMES:
            raise ValueError(
                f"precision: expected one of {', '.join(NAMES)}, got {name!r}; float32 is the default"
            )
        usual = np.dtype("float64" if name == "float64" else "float32")
        own = usual if parameters is None else parameters
        self.name = own.name if name is None else name
        self.master = own if name is None else usual
        if own != self.master:
            raise TypeError(
                f"precision: expected parameters of dtype {self.master} for {name}, got {own}; build the layers "
                f'with dtype="{self.master}"'
            )
        self.copies: np.dtype | None = None if name is None else _HALVES.get(name)
        self.tf32 = name == "tf32"
        self.scaled = name == "float16"
        self.plain = self.copies is None and not self.tf32

    def forward(self, inputs: Any, kwargs: Any, model: Any) -> Any:
        """Call the model as this precision wants it: inputs rounded, parameters read as their working copies."""
        if self.plain:
            return model(*inputs, **kwargs)
        with self.products(), working_copies(self.copies is not None):
            return model(
                *[self.rounded(value) for value in inputs],
                **{name: self.rounded(value) for name, value in kwargs.items()},
            )

    @contextmanager
    def products(self) -> Iterator[None]:
        """Run a block, a forward or a backward pass, with the products and the overflows of this precision."""
        # A float16 that overflows is what the loss scale looks for; NumPy would warn.
        quiet = np.errstate(over="ignore", invalid="ignore") if self.scaled else nullcontext()
        with tf32() if self.tf32 else nullcontext(), quiet:
            yield

    def rounded(self, value: Any) -> Any:
        """Return a floating input of the masters' dtype in that of the working copies; anything else as it is."""
        if self.copies is None:
            return value
        if isinstance(value, (tuple, list)):
            return type(value)(self.rounded(item) for item in value)
        if isinstance(value, dict):
            return {key: self.rounded(item) for key, item in value.items()}
        if getattr(value, "dtype", None) != self.master or not hasattr(value, "astype"):
            return value
        if isinstance(value, Tensor):
            return ops.astype(value, self.copies)
        if isinstance(value, np.ndarray | np.generic):
            return value.astype(self.copies)
        k = kernels.of(value)
        return k.store(value, k.xp.empty(value.shape, self.copies))

    def check_loss(self, total: Tensor) -> None:
        """Refuse a loss in 16 bits, whose sum and gradient would be rounded.

        Raises:
            TypeError: saying what to do.
        """
        if self.copies is not None and total.dtype.itemsize == 2:
            raise TypeError(
                f'loss: expected float32 under precision="{self.name}", got {total.dtype}; compute it from '
                'output.astype("float32"), or take a loss of nn, which does'
            )


def reduced_dtype(wanted: Any, parameters: np.dtype) -> np.dtype:
    """Return the dtype of the gradient buffer. **Local.**

    Args:
        wanted: a dtype or its name; None for the parameters', but float32 for 16-bit ones.
        parameters: dtype of the weights.

    Raises:
        ValueError: not one of the floats that ranks can add.
    """
    if wanted is None:
        return _REDUCED["float32"] if parameters.itemsize == 2 else parameters
    try:
        name = "bfloat16" if wanted == "bfloat16" else np.dtype(wanted).name
        return _REDUCED[name]
    except (TypeError, KeyError):
        raise ValueError(
            f"reduce_dtype: expected float16, bfloat16, float32 or float64, got {wanted!r}; gradients are floats"
        ) from None


def loss_scale_of(precision: Precision, given: LossScale | None) -> LossScale | None:
    """Return the loss scale of a precision: a copy of the given one, a default one, or None. **Local.**"""
    if given is not None and not isinstance(given, LossScale):
        raise TypeError(f"loss_scale: expected an optim.LossScale, got {type(given).__name__}; leave it out")
    if given is not None and not precision.scaled:
        raise ValueError(
            f'loss_scale: expected None with precision="{precision.name}", got one; only "float16" needs it'
        )
    if given is None:
        return LossScale() if precision.scaled else None
    return copy.copy(given)  # it changes while this model trains
