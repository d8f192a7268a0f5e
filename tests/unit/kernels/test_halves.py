"""16-bit floats: products and sums in float32, one rounding to nearest even, working copies of the weights."""

import ml_dtypes
import numpy as np
import pytest
from on_device import here, host, only_on_the_cpu, put

from mpdp.kernels.precision import is_half, tf32, tf32_allowed

pytestmark = pytest.mark.usefixtures("device")
BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
HALVES = [BF16, F16]
RNG = np.random.default_rng(0)


def draw(shape, dtype, scale=1.0):
    return (scale * RNG.standard_normal(shape)).astype(np.float32).astype(dtype)


def edges():
    """Return float32 numbers at and beside the ties of bfloat16, its ends, and what is not finite."""
    ties = np.arange(0x3F80_0000, 0x3F90_0000, 0x8000, dtype=np.uint32)  # every half step above 1
    bits = np.concatenate([ties, ties + 1, ties - 1, ties | 0x8000_0000])
    more = np.array([0.0, -0.0, 1e-40, 3.38e38, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan], np.float32)
    return np.concatenate([bits.view(np.float32), more, RNG.standard_normal(1000).astype(np.float32)])


def nearest_even(x):
    """Round float32 to bfloat16 by its definition, in integers."""
    bits = x.view(np.uint32).astype(np.uint64)
    low, high = bits & 0xFFFF, bits >> 16
    up = (low > 0x8000) | ((low == 0x8000) & (high & 1 == 1))
    return (high + up).astype(np.uint16)


def test_ml_dtypes_rounds_to_nearest_even():
    x = edges()
    known = ~np.isnan(x)
    assert np.array_equal(x.astype(BF16).view(np.uint16)[known], nearest_even(x)[known])
    assert np.isnan(x.astype(BF16)[~known]).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_storing_rounds_to_nearest_even(dtype):
    x = edges()
    with np.errstate(over="ignore"):
        expected = x.astype(dtype)
        out = put(np.zeros(len(x), dtype))
        here.kernels.store(put(x), out)
    found, expected = host(out).astype(np.float32), expected.astype(np.float32)
    if here.device.kind == "cuda":  # CuPy's compiler may flush numbers below 1e-38 to zero
        expected[(np.abs(x) < 1e-38) & (found == 0)] = 0
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 255, 256, 4097, 200_000])
def test_the_optimizer_writes_the_rounded_weights(rule, dtype, size):
    """An update of 0 leaves ties as they are; an update of something rounds what it wrote."""
    for scale in (0.0, 0.3):
        usual = edges()[np.abs(edges()) < 6e4]
        if here.device.kind == "cuda":  # CuPy's compiler flushes numbers below 1e-38 to zero
            usual = usual[(usual == 0) | (np.abs(usual) > 1e-38)]
        weights = np.resize(usual, size).astype(np.float32)
        arrays = weights, draw(size, np.float32), draw(size, np.float32), np.abs(draw(size, np.float32))
        w, g, first, second = (put(a.copy()) for a in arrays)
        copy = put(np.full(size, 7, dtype))
        scratch = here.kernels.update_scratch(np.float32)
        if rule == "adam":
            here.kernels.adam(
                w, g, first, second, scale=scale, step=0.01 * scale, eps=1e-8, betas=(0.9, 0.999), weight_decay=0.0,
                shrink=1.0, scratch=scratch, copy=copy,
            )  # fmt: skip
        else:
            velocity = first if rule == "momentum" else None
            here.kernels.sgd(
                w, g, velocity, scale=scale, lr=scale, momentum=0.9, weight_decay=0.0, nesterov=False,
                scratch=scratch, copy=copy,
            )  # fmt: skip
        assert scale or np.array_equal(host(w), arrays[0])
        assert host(copy).tobytes() == host(w).astype(dtype).tobytes()


def test_columns_write_the_copy_too():
    w, g, copy = (
        put(draw(3 * 256, np.float32)),
        put(np.ones(3 * 256, np.float32)),
        put(np.zeros(3 * 256, BF16)),
    )
    scratch = here.kernels.update_scratch(np.float32)
    here.kernels.sgd(
        w, g, None, scale=1.0, lr=np.array([0.1, 0.0, 0.3]), momentum=0.0, weight_decay=0.0, nesterov=False,
        scratch=scratch, copy=copy,
    )  # fmt: skip
    assert host(copy).tobytes() == host(w).astype(BF16).tobytes()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "shapes", [((5, 7), (7, 3)), ((2, 5, 7), (2, 7, 3)), ((0, 7), (7, 3)), ((5, 0), (0, 3))]
)
def test_products_add_in_float32_and_round_once(dtype, shapes):
    k, a, b = here.kernels, draw(shapes[0], dtype), draw(shapes[1], dtype)
    exact = np.matmul(a.astype(np.float64), b.astype(np.float64))
    step = 2.0**-8 if dtype == BF16 else 2.0**-11
    out = k.gemm(put(a), put(b))
    assert out.dtype == dtype
    np.testing.assert_allclose(host(out).astype(np.float64), exact, rtol=1.01 * step, atol=1e-6)
    wide = put(np.ones(exact.shape, np.float32))
    for beta in (0.0, 1.0):  # a gradient goes into float32 memory without a rounding to 16 bits
        before = host(wide).astype(np.float64)
        k.gemm(put(a), put(b), wide, beta)
        np.testing.assert_allclose(host(wide), exact + beta * before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_long_product_loses_nothing(dtype):
    """In 16 bits a sum of ones stops at 256 (bfloat16) or 2048 (float16)."""
    ones = put(np.ones((1, 5000), dtype))
    out = here.kernels.gemm(ones, ones.T, put(np.zeros((1, 1), np.float32)))
    assert host(out).item() == 5000


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_linear_with_bias(dtype):
    x, w, b = draw((4, 6), dtype), draw((3, 6), dtype), draw(3, dtype)
    exact = x.astype(np.float64) @ w.astype(np.float64).T + b.astype(np.float64)
    out, _ = here.kernels.linear(put(x), put(w), put(b))
    roundings = (
        1 if here.device.kind == "cpu" else 2
    )  # a GPU without nvmath-python rounds before it adds the bias
    step = 2.0**-8 if dtype == BF16 else 2.0**-11
    np.testing.assert_allclose(host(out).astype(np.float64), exact, rtol=0, atol=1.01 * step * roundings * 8)
    if here.device.kind == "cpu":
        expected = (x.astype(np.float32) @ w.astype(np.float32).T + b.astype(np.float32)).astype(dtype)
        assert host(out).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [(3,), (1, 3), (2000, 1)])
def test_sums_into_float32_are_not_rounded(dtype, shape):
    x = draw((2000, 3), dtype)
    lead = 2 - len(shape)
    axes = tuple(i for i in range(2) if i < lead or shape[i - lead] == 1)
    exact = x.astype(np.float64).sum(axis=axes).reshape(shape)
    out = here.kernels.sum_to(put(x), shape, put(np.ones(shape, np.float32)), 1.0)
    np.testing.assert_allclose(host(out), exact + 1, rtol=1e-5, atol=2e-5)
    assert here.kernels.sum_to(put(x), shape).dtype == dtype


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "name", ["relu", "sigmoid", "relu_backward", "sigmoid_backward", "tanh_backward", "dropout"]
)
def test_elementwise_kernels_round_once(name, dtype):
    x, other = draw((5, 33), dtype), draw((5, 33), dtype)
    rest = {"dropout": (RNG.random((5, 33)) < 0.5, 1 / 0.7)}.get(name, (other,) if "_" in name else ())
    wider = [r.astype(np.float32) if getattr(r, "dtype", None) == dtype else r for r in rest]
    out = getattr(here.kernels, name)(put(x), *[put(r) if hasattr(r, "dtype") else r for r in rest])
    from mpdp.kernels.cpu import KERNELS

    expected = getattr(KERNELS, name)(x.astype(np.float32), *wider)
    assert out.dtype == dtype
    if here.device.kind == "cpu":
        assert host(out).tobytes() == expected.astype(dtype).tobytes()
    step = 2.0**-8 if dtype == BF16 else 2.0**-11
    np.testing.assert_allclose(host(out).astype(np.float32), expected, rtol=1.01 * step, atol=1e-6)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_relu_keeps_nan(dtype):
    x = np.array([np.nan, -np.nan, -1, -0.0, 2], dtype)
    out = host(here.kernels.relu(put(x))).astype(np.float32)
    assert np.isnan(out[:2]).all() and out[2:].tolist() == [0, 0, 2]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_layer_norm_with_float32_parameters(dtype):
    k, x = here.kernels, draw((6, 40), dtype)
    weight, bias, g = draw(40, np.float32), draw(40, np.float32), draw((6, 40), dtype)
    wide = x.astype(np.float64)
    normal = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    out, saved = k.layer_norm(put(x), put(weight), put(bias), 1e-5)
    step = 2.0**-8 if dtype == BF16 else 2.0**-11
    assert out.dtype == dtype
    np.testing.assert_allclose(
        host(out).astype(np.float64), normal * weight + bias, rtol=1.1 * step, atol=1e-5
    )
    target = put(np.zeros(40, np.float32))
    k.layer_norm_weight_gradient(put(g), saved, target, 0.0)
    np.testing.assert_allclose(host(target), (g.astype(np.float64) * normal).sum(0), rtol=1e-4, atol=1e-4)
    back = k.layer_norm_backward(put(g), saved, put(weight))
    assert back.dtype == dtype
    h = g.astype(np.float64) * weight
    exact = h - h.mean(1, keepdims=True) - normal * (h * normal).mean(1, keepdims=True)
    exact /= np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(host(back).astype(np.float64), exact, rtol=1.1 * step, atol=1e-3)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_squared_error_against_a_float32_target(dtype):
    """The target is not rounded: its small differences count."""
    output, target = put(np.ones((50, 2), dtype)), put(np.full((50, 2), 1.0001, np.float32))
    total, saved = here.kernels.squared_error(output, target)
    assert total.dtype == np.float32
    np.testing.assert_allclose(host(total), 100 * float(np.float32(1.0001) - 1) ** 2, rtol=1e-4)
    grad = host(here.kernels.squared_error_backward(put(np.ones((), np.float32)), saved)).astype(np.float64)
    np.testing.assert_allclose(grad, 2 * (1 - np.float32(1.0001).astype(float)), rtol=1e-2)


def test_what_is_a_half():
    assert [is_half(np.dtype(d)) for d in (BF16, F16, "float32", "int16", "V2")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_tf32_is_a_matter_of_the_context():
    assert not tf32_allowed()
    with tf32():
        assert tf32_allowed()
    assert not tf32_allowed()


def test_tf32_changes_no_bit_on_the_cpu():
    only_on_the_cpu("it has TF32")
    a, b = draw((30, 40), np.float32), draw((40, 20), np.float32)
    with tf32():
        out = here.kernels.gemm(a, b)
    assert out.tobytes() == here.kernels.gemm(a, b).tobytes()


def test_tf32_on_a_gpu_rounds_operands():
    if here.device.kind == "cpu":
        pytest.skip("a CPU has no TF32")
    a, b = draw((64, 512), np.float32), draw((512, 64), np.float32)
    with tf32():
        found = host(here.kernels.gemm(put(a), put(b)))
    plain = host(here.kernels.gemm(put(a), put(b)))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert np.abs(plain - exact).max() < 1e-4 < np.abs(found - exact).max() < 0.1
