"""What travels in place of an array: the encodings of the MPI transport, without MPI."""

import ml_dtypes
import numpy as np
import pytest

from mpdp.comm.mpi import decode, encode


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_float_maxima_as_integers_keep_the_order_of_all_values(dtype):
    values = np.array([-np.inf, -3, -1e-3, -0.0, 0.0, 1e-3, 2, np.inf, np.nan], dtype=dtype)
    codes = encode(values, "max")
    assert codes.dtype == np.int64
    assert np.all(np.diff(codes) > 0)
    back = np.zeros_like(values)
    decode(codes, back, "max")
    assert back.tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bit_sums_travel_as_float32(dtype):
    values = np.array([1.5, -2.0, 3.25], dtype=dtype)
    wide = encode(values, "sum")
    assert wide.dtype == np.float32
    decode(wide * 2, values, "sum")
    assert values.astype(np.float64).tolist() == [3.0, -4.0, 6.5]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8])
def test_other_sums_travel_as_they_are(dtype):
    values = np.ones(3, dtype=dtype)
    assert encode(values, "sum") is values


def test_integer_maxima_travel_as_they_are():
    values = np.array([1, -5], dtype=np.int64)
    assert encode(values, "max") is values
