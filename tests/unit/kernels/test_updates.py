"""Update kernels: formulas, dtypes, spans, checksums."""

from __future__ import annotations

import numpy as np
import pytest

from mpdp.kernels import updates
from mpdp.kernels.updates import CpuUpdates

KERNELS = CpuUpdates()
RNG = np.random.default_rng(0)


def normal(size, dtype=np.float32):
    return RNG.standard_normal(size).astype(dtype)


def run_sgd(weights, gradient, velocity, lr, decay, scratch=None, **options):
    options = {"scale": 0.5, "momentum": 0.9, "nesterov": False, **options}
    scratch = scratch or KERNELS.update_scratch(np.promote_types(weights.dtype, np.float32))
    KERNELS.sgd(weights, gradient, velocity, lr=lr, weight_decay=decay, scratch=scratch, **options)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_formula(nesterov, momentum, decay):
    w, g, v = normal(1024, float), normal(1024, float), normal(1024, float)
    d = g * 0.5 + decay * w
    new_v = 0.9 * v + d
    step = (d + 0.9 * new_v) if nesterov else new_v
    expected = w - 0.01 * (step if momentum else d)
    run_sgd(w, g, v if momentum else None, 0.01, decay, nesterov=nesterov)
    np.testing.assert_allclose(w, expected, rtol=1e-14, atol=1e-15)
    if momentum:
        np.testing.assert_allclose(v, new_v, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("size", [0, 1, 255, 4096, updates.PIECE, updates.PIECE + 1, 2 * updates.PIECE + 77])
def test_sgd_covers_every_element_once(size):
    w, g, v = np.zeros(size, np.float32), np.ones(size, np.float32), np.zeros(size, np.float32)
    run_sgd(w, g, v, 1.0, 0.0, scale=1.0)
    assert (w == -1).all() and (v == 1).all()


def test_columns_equal_scalars_to_the_bit():
    w, g, v = normal(5 * 256), normal(5 * 256), normal(5 * 256)
    w2, v2 = w.copy(), v.copy()
    run_sgd(w, g, v, 0.01, 0.1)
    run_sgd(w2, g, v2, np.full(5, 0.01), np.full(5, 0.1))
    assert w.tobytes() == w2.tobytes() and v.tobytes() == v2.tobytes()


def test_columns_differ_by_block():
    w, g = np.zeros(3 * 256), np.ones(3 * 256)
    run_sgd(w, g, None, np.array([1.0, 2.0, 3.0]), 0.0, scale=1.0)
    assert (w.reshape(3, 256) == [[-1], [-2], [-3]]).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_gradient_of_another_dtype_is_scaled_in_the_states(dtype):
    w, g = np.zeros(256, np.float32), np.full(256, 6e-8 if dtype == np.float16 else 1e-30, dtype)
    run_sgd(w, g, None, 1.0, 0.0, scale=2.0**-10)
    assert w[0] == np.float32(-float(g[0]) * 2.0**-10) != 0


def test_half_weights_are_worked_on_in_float32():
    w, g = np.full(256, 1.0, np.float16), np.full(256, 1e-4, np.float16)
    m, v = np.zeros(256, np.float32), np.zeros(256, np.float32)
    KERNELS.adam(
        w, g, m, v, scale=1.0, step=0.01, eps=1e-9, betas=(0.9, 0.999), weight_decay=0.0, shrink=1.0,
        scratch=KERNELS.update_scratch(np.float32),
    )  # fmt: skip
    m1, v1 = 0.1 * float(g[0]), 0.001 * float(g[0]) ** 2  # v1 = 1e-11 is 0 in float16
    assert w[0] == np.float16(1 - 0.01 * m1 / (v1**0.5 + 1e-9))


def test_scratch_is_made_once():
    scratch = KERNELS.update_scratch(np.float32)
    first = scratch.take(np.dtype(np.float32))
    second = scratch.take(np.dtype(np.float32))
    assert first[0] is second[0] and first[2] is None
    assert first[0].ctypes.data % 64 == 0


def test_flat_zeros():
    zeros = KERNELS.flat_zeros(1000, np.float64)
    assert zeros.shape == (1000,) and not zeros.any() and zeros.ctypes.data % 64 == 0
    assert KERNELS.flat_zeros(0, np.float32).shape == (0,)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 40 * 4096 + 5])
def test_sum_of_squares(size, dtype):
    x = normal(size, dtype)
    sums = KERNELS.sum_of_squares(x)
    expected = [np.sum(x[a : a + 4096].astype(float) ** 2) for a in range(0, size, 4096)]
    assert sums.dtype == np.float64 and sums.shape == (len(expected),)
    np.testing.assert_allclose(sums, expected, rtol=1e-13)


def test_sum_of_squares_has_the_same_bits_wherever_a_span_lies():
    x = normal(20 * 4096 + 1)
    whole = KERNELS.sum_of_squares(x[: 20 * 4096])
    for first, last in [(0, 1), (3, 4), (1, 20), (7, 12), (19, 20)]:
        part = KERNELS.sum_of_squares(x[first * 4096 : last * 4096])
        assert part.tobytes() == whole[first:last].tobytes()
    shifted = np.empty(4096 + 1, np.float32)[1:]
    shifted[...] = x[:4096]
    assert KERNELS.sum_of_squares(shifted)[0] == whole[0]


def test_sum_of_squares_of_what_is_not_finite():
    x = np.ones(8192)
    x[0], x[5000] = np.nan, 1e200
    sums = KERNELS.sum_of_squares(x)
    assert np.isnan(sums[0]) and np.isinf(sums[1])


@pytest.mark.parametrize("size", [0, 1, 3, 8, 100, 65536, 65537, 200_003])
def test_checksum_sees_each_byte(size):
    data = RNG.integers(0, 256, size, dtype=np.uint8)
    first = KERNELS.checksum(data)
    assert 0 <= first < 2**63 and first == KERNELS.checksum(data.copy())
    for position in {0, size // 2, size - 1} if size else ():
        for bit in (0, 7):
            data[position] ^= 1 << bit
            assert KERNELS.checksum(data) != first
            data[position] ^= 1 << bit
    assert KERNELS.checksum(np.append(data, np.uint8(0))) != first


def test_checksum_sees_order_and_signs():
    x = normal(30_000)
    first = KERNELS.checksum(x)
    for change in (np.roll(x, 1), x[::-1], -x, np.roll(x, 16384), x.reshape(2, -1)[::-1]):
        assert KERNELS.checksum(change) != first
    pair = x.copy()
    pair[[0, 1, 2, 3]] *= -1  # the sign bits of whole words: cancels in a plain weighted sum
    assert KERNELS.checksum(pair) != first
    assert KERNELS.checksum(x.reshape(3, -1)) == first
    assert KERNELS.checksum(np.asfortranarray(x.reshape(3, -1))) == first
    assert KERNELS.checksum(np.float32(1.0)) == KERNELS.checksum(np.ones(1, np.float32))


def test_checksum_does_not_depend_on_alignment():
    x = normal(1001)
    memory = np.empty(x.nbytes + 1, np.uint8)
    shifted = memory[1:].view(np.float32)
    shifted[...] = x
    assert KERNELS.checksum(shifted) == KERNELS.checksum(x)


def test_checksums_of_similar_arrays_are_distinct():
    seen = {KERNELS.checksum(np.array([a, b], np.float32)) for a in range(100) for b in range(100)}
    assert len(seen) == 10_000


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_all_finite(dtype):
    x = np.ones(5000, dtype)
    assert KERNELS.all_finite(x) and KERNELS.all_finite(x[:0]) and KERNELS.all_finite(x.reshape(50, 100))
    x[3] = np.finfo(dtype).max  # its square overflows, it does not
    assert KERNELS.all_finite(x)
    for bad in (np.nan, np.inf, -np.inf):
        x[4321] = bad
        assert not KERNELS.all_finite(x)
