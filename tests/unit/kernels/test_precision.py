"""Which dtypes count as floats, and what they are summed in."""

import ml_dtypes
import numpy as np
import pytest

from mpdp.kernels.precision import is_floating, wide


@pytest.mark.parametrize(
    ("dtype", "floating", "wider"),
    [
        ("float16", True, "float32"),
        (ml_dtypes.bfloat16, True, "float32"),
        ("float32", True, "float32"),
        ("float64", True, "float64"),
        ("int16", False, "int16"),
        ("bool", False, "bool"),
        ("V2", False, "V2"),
    ],
)
def test_precision(dtype, floating, wider):
    dtype = np.dtype(dtype)
    assert is_floating(dtype) is floating
    assert wide(dtype) == np.dtype(wider)
