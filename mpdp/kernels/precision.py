"""Which dtype a sum runs in: 16-bit floats are added in float32, wider ones in their own dtype."""

from __future__ import annotations

import numpy as np

_FLOAT32 = np.dtype(np.float32)


def is_floating(dtype: np.dtype) -> bool:
    """Return whether ``dtype`` is a float, bfloat16 of ``ml_dtypes`` included. **Local.**"""
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.name == "bfloat16")


def wide(dtype: np.dtype) -> np.dtype:
    """Return the dtype to add numbers of ``dtype`` in: itself, or float32 for 16-bit floats. **Local.**"""
    return _FLOAT32 if dtype.itemsize == 2 and is_floating(dtype) else dtype
