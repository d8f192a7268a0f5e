"""Update kernels: formulas, dtypes, spans, checksums."""

from __future__ import annotations

import numpy as np
import pytest
from on_device import here, host, only_on_the_cpu, put, xp

from mpdp.kernels import updates

pytestmark = pytest.mark.usefixtures("device")
RNG = np.random.default_rng(0)


def normal(size, dtype=np.float32):
    return put(RNG.standard_normal(size).astype(dtype))


def run_sgd(weights, gradient, velocity, lr, decay, scratch=None, **options):
    options = {"scale": 0.5, "momentum": 0.9, "nesterov": False, **options}
    scratch = scratch or here.kernels.update_scratch(np.promote_types(weights.dtype, np.float32))
    here.kernels.sgd(weights, gradient, velocity, lr=lr, weight_decay=decay, scratch=scratch, **options)


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
    np.testing.assert_allclose(host(w), host(expected), rtol=1e-14, atol=1e-15)
    if momentum:
        np.testing.assert_allclose(host(v), host(new_v), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("size", [0, 1, 255, 4096, updates.PIECE, updates.PIECE + 1, 2 * updates.PIECE + 77])
def test_sgd_covers_every_element_once(size):
    w, g, v = xp.zeros(size, np.float32), xp.ones(size, np.float32), xp.zeros(size, np.float32)
    run_sgd(w, g, v, 1.0, 0.0, scale=1.0)
    assert (w == -1).all() and (v == 1).all()


def test_columns_equal_scalars_to_the_bit():
    w, g, v = normal(5 * 256), normal(5 * 256), normal(5 * 256)
    w2, v2 = w.copy(), v.copy()
    run_sgd(w, g, v, 0.01, 0.1)
    run_sgd(w2, g, v2, np.full(5, 0.01), np.full(5, 0.1))
    assert w.tobytes() == w2.tobytes() and v.tobytes() == v2.tobytes()


def test_columns_differ_by_block():
    w, g = xp.zeros(3 * 256), xp.ones(3 * 256)
    run_sgd(w, g, None, np.array([1.0, 2.0, 3.0]), 0.0, scale=1.0)
    assert (host(w).reshape(3, 256) == [[-1], [-2], [-3]]).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_gradient_of_another_dtype_is_scaled_in_the_states(dtype):
    w, g = xp.zeros(256, np.float32), xp.full(256, 6e-8 if dtype == np.float16 else 1e-30, dtype)
    run_sgd(w, g, None, 1.0, 0.0, scale=2.0**-10)
    assert w[0] == np.float32(-float(g[0]) * 2.0**-10) != 0


def test_half_weights_are_worked_on_in_float32():
    w, g = xp.full(256, 1.0, np.float16), xp.full(256, 1e-4, np.float16)
    m, v = xp.zeros(256, np.float32), xp.zeros(256, np.float32)
    here.kernels.adam(
        w, g, m, v, scale=1.0, step=0.01, eps=1e-9, betas=(0.9, 0.999), weight_decay=0.0, shrink=1.0,
        scratch=here.kernels.update_scratch(np.float32),
    )  # fmt: skip
    m1, v1 = 0.1 * float(g[0]), 0.001 * float(g[0]) ** 2  # v1 = 1e-11 is 0 in float16
    assert w[0] == np.float16(1 - 0.01 * m1 / (v1**0.5 + 1e-9))


def test_scratch_is_made_once():
    only_on_the_cpu("a GPU needs none")
    scratch = here.kernels.update_scratch(np.float32)
    first = scratch.take(np.dtype(np.float32))
    second = scratch.take(np.dtype(np.float32))
    assert first[0] is second[0] and first[2] is None
    assert first[0].ctypes.data % 64 == 0


def test_flat_zeros():
    zeros = here.kernels.flat_zeros(1000, np.float64)
    assert zeros.shape == (1000,) and not zeros.any()
    assert (zeros.ctypes.data if here.device.kind == "cpu" else zeros.data.ptr) % 64 == 0
    assert here.kernels.flat_zeros(0, np.float32).shape == (0,)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 40 * 4096 + 5])
def test_sum_of_squares(size, dtype):
    x = normal(size, dtype)
    sums = here.kernels.sum_of_squares(x)
    expected = [np.sum(host(x)[a : a + 4096].astype(float) ** 2) for a in range(0, size, 4096)]
    assert sums.dtype == np.float64 and sums.shape == (len(expected),)
    np.testing.assert_allclose(host(sums), expected, rtol=1e-13)


def test_sum_of_squares_has_the_same_bits_wherever_a_span_lies():
    x = normal(20 * 4096 + 1)
    whole = here.kernels.sum_of_squares(x[: 20 * 4096])
    for first, last in [(0, 1), (3, 4), (1, 20), (7, 12), (19, 20)]:
        part = here.kernels.sum_of_squares(x[first * 4096 : last * 4096])
        assert part.tobytes() == whole[first:last].tobytes()
    shifted = xp.empty(4096 + 1, np.float32)[1:]
    shifted[...] = x[:4096]
    assert here.kernels.sum_of_squares(shifted)[0] == whole[0]


def test_sum_of_squares_of_what_is_not_finite():
    x = xp.ones(8192)
    x[0], x[5000] = np.nan, 1e200
    sums = here.kernels.sum_of_squares(x)
    assert np.isnan(float(sums[0])) and np.isinf(float(sums[1]))


@pytest.mark.parametrize("size", [0, 1, 3, 8, 100, 65536, 65537, 200_003])
def test_checksum_sees_each_byte(size):
    data = put(RNG.integers(0, 256, size, dtype=np.uint8))
    first = here.kernels.checksum(data)
    assert 0 <= first < 2**63 and first == here.kernels.checksum(data.copy())
    for position in {0, size // 2, size - 1} if size else ():
        for bit in (0, 7):
            data[position] ^= 1 << bit
            assert here.kernels.checksum(data) != first
            data[position] ^= 1 << bit
    assert here.kernels.checksum(xp.concatenate([data, xp.zeros(1, np.uint8)])) != first


def test_checksum_sees_order_and_signs():
    x = normal(30_000)
    first = here.kernels.checksum(x)
    for change in (xp.roll(x, 1), x[::-1], -x, xp.roll(x, 16384), x.reshape(2, -1)[::-1]):
        assert here.kernels.checksum(change) != first
    pair = x.copy()
    pair[[0, 1, 2, 3]] *= -1  # the sign bits of whole words: cancels in a plain weighted sum
    assert here.kernels.checksum(pair) != first
    assert here.kernels.checksum(x.reshape(3, -1)) == first
    assert here.kernels.checksum(xp.asfortranarray(x.reshape(3, -1))) == first
    assert here.kernels.checksum(put(np.float32(1.0))) == here.kernels.checksum(xp.ones(1, np.float32))


def test_checksum_does_not_depend_on_alignment():
    only_on_the_cpu("it has no arrays at odd addresses")
    x = normal(1001)
    memory = xp.empty(x.nbytes + 1, np.uint8)
    shifted = memory[1:].view(np.float32)
    shifted[...] = x
    assert here.kernels.checksum(shifted) == here.kernels.checksum(x)


def test_checksums_of_similar_arrays_are_distinct():
    n = 100 if here.device.kind == "cpu" else 20
    seen = {here.kernels.checksum(put(np.array([a, b], np.float32))) for a in range(n) for b in range(n)}
    assert len(seen) == n * n


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_all_finite(dtype):
    x = xp.ones(5000, dtype)
    assert (
        here.kernels.all_finite(x)
        and here.kernels.all_finite(x[:0])
        and here.kernels.all_finite(x.reshape(50, 100))
    )
    x[3] = np.finfo(dtype).max  # its square overflows, it does not
    assert here.kernels.all_finite(x)
    for bad in (np.nan, np.inf, -np.inf):
        x[4321] = bad
        assert not here.kernels.all_finite(x)
