"""Which dtype arithmetic runs in: 16-bit floats in float32, wider ones in their own; and whether TF32 may be used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import numpy as np

_FLOAT32 = np.dtype(np.float32)
_tf32: ContextVar[bool] = ContextVar("mpdp_tf32", default=False)

tf32_allowed = _tf32.get
"""Return whether float32 products may round their operands to TF32 in this context; a GPU alone asks."""


def is_floating(dtype: np.dtype) -> bool:
    """Return whether ``dtype`` is a float, bfloat16 of ``ml_dtypes`` included. **Local.**"""
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.name == "bfloat16")


def wide(dtype: np.dtype) -> np.dtype:
    """Return the dtype to add numbers of ``dtype`` in: itself, or float32 for 16-bit floats. **Local.**"""
    return _FLOAT32 if dtype.itemsize == 2 and is_floating(dtype) else dtype


def is_half(dtype: np.dtype) -> bool:
    """Return whether ``dtype`` is a float of 16 bits. **Local.**"""
    return dtype.itemsize == 2 and is_floating(dtype)


def rounded_once(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a CPU kernel take 16-bit floats: it runs in float32, and its result is rounded once. **Local.**

    NumPy rounds 16-bit floats after each operation, and goes element by element: for a million bfloat16 a maximum
    with 0 takes 8.2 ms, and 1.5 ms by way of float32.
    """

    @wraps(method)
    def kernel(self: Any, x: Any, *others: Any) -> Any:
        dtype = x.dtype
        if not is_half(dtype):
            return method(self, x, *others)
        widened = [o.astype(_FLOAT32) if hasattr(o, "dtype") and is_half(o.dtype) else o for o in others]
        return method(self, x.astype(_FLOAT32), *widened).astype(dtype)

    return kernel


@contextmanager
def tf32() -> Iterator[None]:
    """Let float32 products of a block use TF32 where the device has it; a CPU has not. **Local.**"""
    token = _tf32.set(True)
    try:
        yield
    finally:
        _tf32.reset(token)
