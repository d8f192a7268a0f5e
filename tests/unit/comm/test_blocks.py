"""Blocks: the sums are those of rank order, bit by bit, however a buffer is cut; against NumPy, without ranks."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpdp.comm.blocks import Combiner, slices

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.uint8, np.int32, np.int64, np.uint64]
LENGTHS = [1, 3, 63, 64, 65, 127, 129, 1023, 1025]


def numbers(seed, dtype, size, count):
    """Return arrays whose sum depends on the order of the ranks."""
    random = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "iu":
        return [random.integers(0, 100, count).astype(dtype) for _ in range(size)]
    scale = 10.0 ** random.integers(-2, 3, (size, count))
    return [(random.standard_normal(count) * scale[r]).astype(dtype) for r in range(size)]


def in_rank_order(arrays, op):
    """Return the sum or maximum, one rank after another, sixteen-bit floats in float32."""
    dtype = arrays[0].dtype
    wide = np.float32 if dtype.itemsize == 2 else dtype
    total = arrays[0].astype(wide)
    for array in arrays[1:]:
        total = (np.add if op == "sum" else np.maximum)(total, array.astype(wide))
    return total.astype(dtype)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 2000),
    st.sampled_from(DTYPES),
    st.sampled_from(["sum", "max"]),
    st.sampled_from([64, 256, 4096]),
    st.data(),
)
def test_every_owner_together_gives_the_sum_in_rank_order(size, count, dtype, op, block_bytes, data):
    """In place: each owner writes its slice to all buffers, and no other owner reads it."""
    arrays = numbers(data.draw(st.integers(0, 99)), dtype, size, count)
    expected = in_rank_order(arrays, op)
    bounds = slices(count, np.dtype(dtype).itemsize, size)
    for owner in data.draw(st.permutations(range(size))):
        targets = arrays[owner:] + arrays[:owner]
        Combiner(block_bytes).combine(op, arrays, targets, bounds[owner], bounds[owner + 1])
    for array in arrays:
        assert array.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_target_that_is_no_source(dtype, size):
    arrays = numbers(1, dtype, size, 65)
    target = np.zeros(65, dtype)
    Combiner(64).combine("sum", arrays, [target], 0, 65)
    assert target.tobytes() == in_rank_order(arrays, "sum").tobytes()
    few = np.zeros(65, dtype)
    Combiner().combine_few("sum", arrays, few)
    assert few.tobytes() == target.tobytes()


@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_nan_and_infinity_are_results_like_others(dtype):
    one = np.array([1, np.inf, np.inf, np.nan, -0.0], dtype)
    other = np.array([np.nan, 1, -np.inf, np.nan, 0.0], dtype)
    for op, expected in (
        ("sum", [np.nan, np.inf, np.nan, np.nan, 0]),
        ("max", [np.nan, np.inf, np.inf, np.nan, 0]),
    ):
        target = np.zeros(5, dtype)
        Combiner().combine(op, [one, other], [target], 0, 5)
        assert np.array_equal(target.astype(float), expected, equal_nan=True)
        Combiner().combine_few(op, [one, other], target)
        assert np.array_equal(target.astype(float), expected, equal_nan=True)


def test_an_overflow_is_no_warning():
    """Warnings are errors in this test suite."""
    top = np.full(3, np.finfo(np.float16).max)
    target = np.zeros(3, np.float16)
    Combiner().combine("sum", [top, top], [target], 0, 3)
    assert np.all(np.isinf(target))
    wide = np.full(3, np.finfo(np.float64).max)
    Combiner().combine_few("sum", [wide, wide.copy()], np.zeros(3))


@pytest.mark.parametrize("count", [0, *LENGTHS])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_slices_share_no_cache_line(count, size, itemsize):
    bounds = slices(count, itemsize, size)
    assert (len(bounds), bounds[0], bounds[-1]) == (size + 1, 0, count)
    assert list(bounds) == sorted(bounds)
    assert all(bound * itemsize % 64 == 0 for bound in bounds if bound != count)
