"""Every kernel of the GPU against its twin on the CPU: dtypes, odd, empty and non-contiguous arrays, equal bits."""

from __future__ import annotations

import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from on_device import host, leave, put, use, xp

from mpdp import kernels
from mpdp.device import Device
from mpdp.kernels import random as generator
from mpdp.kernels.base import Kernels
from mpdp.kernels.cpu import KERNELS as CPU
from mpdp.kernels.cuda_source import FOLDER, integer, loop_blocks, program, stored

FLOATS = ["float16", "float32", "float64"]
TOLERANCE = {"float16": 3e-3, "float32": 3e-6, "float64": 3e-14}
RNG = np.random.default_rng(11)
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def k():
    """The kernels of the GPU."""
    yield kernels.for_device(use("cuda"))
    leave()


def draw(shape, dtype="float64", scale=1.0):
    return np.asarray(scale * RNG.standard_normal(shape)).astype(dtype)


def close(found, expected, dtype, scale=1.0):
    """Check dtype, shape and values; the tolerance is relative to the largest value."""
    found, expected = host(found), np.asarray(expected)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    if expected.size:
        found, expected = found.astype(np.float64), expected.astype(np.float64)
        largest = max(1.0, np.abs(expected[np.isfinite(expected)]).max(initial=0.0))
        np.testing.assert_allclose(found, expected, rtol=0, atol=scale * TOLERANCE[dtype] * largest)


def layouts(x):
    """Return the array on the GPU in three layouts: as it is, transposed in memory, and with gaps."""
    if x.ndim == 0:
        return [put(x)]
    gaps = xp.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)[..., ::2]
    gaps[...] = put(x)
    return [put(x), xp.asfortranarray(put(x)), gaps]


# -- without a GPU: what can be known of the sources --------------------------------------------------------


def test_sources_are_there_and_completed():
    code, options = program("updates", ("P", "f16", "G", "float", "S", "float"))
    assert (
        "typedef f16 P;" in code and "--fmad=false" in options and 'extern "C" __global__ void adam' in code
    )
    assert "#define LANES 32" in program("rows", ("T", "float", "W", "float", "LANES", 32, "INDEX", "i64"))[0]
    for path in FOLDER.glob("*.cu*"):
        text = path.read_text()
        sums = text.replace("atomicAdd((u32*)(board + TICKET), 1)", "")  # counts blocks, adds no numbers
        assert "\n#include" not in text and "atomic" not in sums, path
        assert max(map(len, text.splitlines())) <= 120, path


def test_sources_are_part_of_the_package():
    declared = (Path(__file__).resolve().parents[3] / "setup.cfg").read_text()
    assert "kernels/cuda_src/*.cu\n" in declared and "kernels/cuda_src/*.cuh\n" in declared
    assert {path.suffix for path in FOLDER.iterdir()} == {".cu", ".cuh"}


def test_names_of_types():
    assert [stored(d) for d in (*FLOATS, BF16)] == ["f16", "float", "double", "bf16"]
    assert integer("uint8") == "u8" and integer(np.int64) == "i64"
    with pytest.raises(
        TypeError, match=r"kernel: expected float16, bfloat16, .* on a GPU, got int32; convert"
    ):
        stored("int32")
    assert loop_blocks(0) == loop_blocks(1) == 1 and loop_blocks(1025) == 2 and loop_blocks(2**40) == 4096


# -- the class ----------------------------------------------------------------------------------------------


def test_every_method_of_the_interface_is_implemented():
    from mpdp.kernels.cuda import CudaKernels  # needs no CuPy until it is made

    names = [name for name in vars(Kernels) if not name.startswith("_") and name != "device"]
    own = [name for name in names if getattr(CudaKernels, name) is not getattr(Kernels, name)]
    assert set(names) == set(own)


def test_kernels_of_a_gpu(k):
    assert kernels.of(xp.zeros(1)) is k is kernels.for_device(Device("cuda"))
    assert k.device == Device("cuda", 0) and k.xp.__name__ == "cupy" and k.is_current()
    with k.active():
        assert k.is_current()


# -- storage and products -----------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize(("read", "written"), list(itertools.product(FLOATS, FLOATS)))
def test_store(k, read, written, beta):
    value, out = draw((5, 7), read), draw((5, 7), written)
    expected = CPU.store(value, out.copy(), beta)
    target = put(out)
    assert k.store(put(value), target, beta) is target
    close(target, expected, "float16" if "float16" in (read, written) else "float32")
    with pytest.raises(TypeError, match=r"[Cc]an.*cast"):
        k.store(xp.ones(2), xp.ones(2, np.int64))


SHAPES = [
    ((3, 5), (5, 4)),
    ((1, 1), (1, 1)),
    ((0, 5), (5, 4)),
    ((3, 0), (0, 4)),
    ((3, 5), (5, 0)),
    ((130, 70), (70, 257)),
    ((2, 3, 5), (2, 5, 4)),
    ((1, 3, 5), (2, 5, 4)),
    ((2, 1, 3, 5), (4, 5, 6)),
    ((0, 3, 5), (5, 4)),
    ((6, 1, 1), (6, 1, 9)),
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_gemm(k, left, right, dtype):
    a, b = draw(left, dtype), draw(right, dtype)
    expected = np.matmul(a.astype("f8"), b.astype("f8")).astype(dtype)
    for x in layouts(a):
        for y in layouts(b):
            close(k.gemm(x, y), expected, dtype, 10)
    swapped = np.ascontiguousarray(np.swapaxes(b, -1, -2))
    close(k.gemm(put(a), put(swapped).swapaxes(-1, -2)), expected, dtype, 10)
    for beta in (0.0, 1.0):
        before = draw(expected.shape, dtype) if beta else np.full(expected.shape, np.nan, dtype)
        out = put(before)
        assert k.gemm(put(a), put(b), out, beta) is out
        close(out, expected + before if beta else expected, dtype, 10)


@pytest.mark.parametrize("written", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_gemm_into_a_wider_out(k, shape, written):
    a, b = draw((*shape, 4, 8), "float16"), draw((*shape, 8, 5), "float16")
    out = xp.ones((*shape, 4, 5), written)
    k.gemm(put(a), put(b), out, 1.0)
    close(out, (np.matmul(a.astype("f8"), b.astype("f8")) + 1).astype(written), "float16")
    half = xp.ones((*shape, 4, 5), np.float32)[..., ::-1]
    k.gemm(put(a), put(b), half, 1.0)
    close(half, (np.matmul(a.astype("f8"), b.astype("f8")) + 1).astype("f4"), "float16")


@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
def test_products_of_bfloat16(k, shape):
    a, b = draw((*shape, 16, 24), BF16), draw((*shape, 24, 8), BF16)
    expected = np.matmul(a.astype("f4"), b.astype("f4"))
    assert k.gemm(put(a), put(b)).dtype == BF16
    assert np.abs(host(k.gemm(put(a), put(b))).astype("f4") - expected).max() < 0.02 * np.abs(expected).max()


def test_products_of_broadcast_views_integers_and_heads(k):
    twos = xp.broadcast_to(put(np.float32(2)), (3, 4))
    assert host(k.gemm(twos, xp.ones((4, 2), np.float32))).tolist() == [[8, 8]] * 3
    whole = np.arange(12).reshape(3, 4)
    assert np.array_equal(host(k.gemm(put(whole), put(whole.T))), whole @ whole.T)
    heads = draw((2, 7, 3, 4), "float32").transpose(0, 2, 1, 3)
    device = put(np.ascontiguousarray(heads.transpose(0, 2, 1, 3))).transpose(0, 2, 1, 3)
    close(k.gemm(device, device.swapaxes(-1, -2)), heads @ heads.swapaxes(-1, -2), "float32", 10)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(3, 4, 5), (0, 4, 5), (3, 0, 5), (3, 4, 0)])
def test_linear(k, shape, dtype):
    n, i, o = shape
    x, w, b = draw((n, i), dtype), draw((o, i), dtype), draw(o, dtype)
    for bias in (b, None):
        expected, _ = CPU.linear(x, w, bias)
        close(k.linear(put(x), put(w), None if bias is None else put(bias))[0], expected, dtype, 10)


# -- reductions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "bool"])
@pytest.mark.parametrize("shape", [(3, 4, 5), (0, 4), (1,), ()])
def test_sum_and_mean(k, shape, dtype):
    x = draw(shape, "float64", 3.0).astype(dtype)
    for axis in [None, *((0, -1, tuple(range(x.ndim))) if shape else ()), ()]:
        for keepdims in (False, True):
            kind = dtype if dtype in FLOATS else "float64"
            close(k.sum(put(x), axis, keepdims), CPU.sum(x, axis, keepdims), kind, 2)
            close(k.mean(put(x), axis, keepdims), CPU.mean(x, axis, keepdims), kind)


TARGETS = [
    ((5, 4), (4,)), ((2, 5, 4), (4,)), ((5, 4), (5, 4)), ((5, 4), (5, 1)), ((5, 4), (1, 4)), ((5, 4), ()),
    ((0, 4), (4,)), ((0, 4), ()), ((5, 0), (0,)), ((2, 5, 4), (5, 1)), ((1, 1), (1,)), ((), ()),
    ((3000, 33), (33,)), ((700, 1), (1,)), ((9, 4100), (4100,)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("beta", [None, 0.0, 1.0])
@pytest.mark.parametrize(("shape", "target"), TARGETS)
def test_sum_to(k, shape, target, beta, dtype):
    x = draw(shape, dtype)
    for device in layouts(x):
        if beta is None:
            close(k.sum_to(device, target), CPU.sum_to(x, target), dtype, 5)
            continue
        before = draw(target, dtype) if beta else np.full(target, np.nan, dtype)
        expected, out = CPU.sum_to(x, target, before.copy(), beta), put(before)
        assert k.sum_to(device, target, out, beta) is out
        close(out, expected, dtype, 5)


def test_column_sums_are_wide_repeat_and_take_other_outs(k):
    x = np.ones((5000, 3), "float16")
    assert host(k.sum_to(put(x), (3,))).tolist() == [5000] * 3
    many = put(draw((20_000, 70), "float32"))
    assert k.sum_to(many, (70,)).tobytes() == k.sum_to(many, (70,)).tobytes()
    out = xp.ones(6, np.float64)[::2]
    k.sum_to(put(x), (3,), out, 1.0)
    assert host(out).tolist() == [5001] * 3


# -- elementwise --------------------------------------------------------------------------------------------

ELEMENTS = [(3, 5), (1,), (), (0, 4), (7, 1031), (2, 3, 4)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", ELEMENTS)
def test_elementwise(k, shape, dtype):
    x, g = draw(shape, dtype, 3.0), draw(shape, dtype)
    for a in layouts(x):
        for name in ("relu", "sigmoid"):
            expected = getattr(CPU, name)(x)
            close(getattr(k, name)(a), expected, dtype)
            for b in layouts(g):
                back = getattr(k, f"{name}_backward")(b, put(expected))
                close(back, getattr(CPU, f"{name}_backward")(g, expected), dtype)
        close(k.tanh_backward(put(g), a), CPU.tanh_backward(g, x), dtype, 10)
        expected, saved = CPU.gelu(x)
        found, kept = k.gelu(a)
        close(found, expected, dtype)
        close(k.gelu_backward(put(g), kept), CPU.gelu_backward(g, saved), dtype, 3)


def test_relu_of_integers(k):
    assert host(k.relu(put([-1, 2]))).tolist() == [0, 2]


@pytest.mark.parametrize("dtype", FLOATS)
def test_extreme_values(k, dtype):
    x = np.array([-60_000, -50, -1, 0, 1, 50, 60_000, np.nan, np.inf, -np.inf], dtype)
    np.testing.assert_allclose(host(k.sigmoid(put(x))), CPU.sigmoid(x), rtol=TOLERANCE[dtype], atol=0)
    assert np.array_equal(host(k.relu(put(x))), CPU.relu(x), equal_nan=True)
    finite = x[:7]
    value, saved = k.gelu(put(finite))
    grad = host(k.gelu_backward(xp.ones(7, dtype), saved))
    assert np.isfinite(host(value)).all() and np.isfinite(grad).all() and grad[-1] == 1 and grad[0] == 0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", ELEMENTS)
def test_dropout(k, shape, dtype):
    x, mask = draw(shape, dtype), RNG.random(shape) < 0.6
    expected = CPU.dropout(x, mask, 1 / 0.6)
    for a, m in zip(layouts(x), layouts(mask)):
        assert host(k.dropout(a, m, 1 / 0.6)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("elements", [0, 1, 3, 4, 7, 256, 1030])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_masks_have_the_same_bits(k, count, elements):
    key, threshold = generator.dropout_key(5, "layers.2"), generator.keep_threshold(0.3)
    for step, start in ((0, 0), (7, 2**33 + 5), (2**32 + 3, 11)):
        expected = CPU.keep_mask(key, step, start, count, elements, threshold)
        found = k.keep_mask(key, step, start, count, elements, threshold)
        assert found.dtype == bool and np.array_equal(host(found), expected)
        later = k.keep_mask(key, put(np.int64(step)), put(np.int64(start)), count, elements, threshold)
        assert np.array_equal(host(later), expected)


# -- rows ---------------------------------------------------------------------------------------------------

ROWS = [(3, 4), (1, 1), (9, 1), (5, 33), (2, 1024), (3, 1025), (4, 5000), (0, 4), (3, 0)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", ROWS)
def test_softmax(k, shape, dtype):
    if shape[1] == 0:
        assert k.softmax(put(draw(shape, dtype)), 1).shape == shape
        return
    x, g = draw(shape, dtype, 4.0), draw(shape, dtype)
    for name in ("softmax", "log_softmax"):
        expected = getattr(CPU, name)(x, 1)
        for a in layouts(x):
            close(getattr(k, name)(a, -1), expected, dtype, 3)
        back = getattr(k, f"{name}_backward")(put(g), put(expected), 1)
        close(back, getattr(CPU, f"{name}_backward")(g, expected, 1), dtype, 10)


@pytest.mark.parametrize("axis", [0, 1, -2, -3])
def test_softmax_along_other_axes(k, axis):
    x, g = draw((3, 4, 5)), draw((3, 4, 5))
    for name in ("softmax", "log_softmax"):
        expected = getattr(CPU, name)(x, axis)
        close(getattr(k, name)(put(x), axis), expected, "float64")
        back = getattr(k, f"{name}_backward")(put(g), put(expected), axis)
        close(back, getattr(CPU, f"{name}_backward")(g, expected, axis), "float64")


@pytest.mark.parametrize("width", [4, 40, 2000])
def test_softmax_of_masked_and_large_scores(k, width):
    x = draw((5, width))
    x[0, : width // 2] = -np.inf
    x[1, 1:] = -np.inf
    x[2] += 1e4
    x[3, 0] = np.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        for name in ("softmax", "log_softmax"):
            expected = getattr(CPU, name)(x, 1)
            np.testing.assert_allclose(host(getattr(k, name)(put(x), 1)), expected, rtol=1e-12, atol=1e-14)
    none = np.full((1, width), -np.inf)
    assert np.isnan(host(k.softmax(put(none), 1))).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("parts", ["both", "weight", "bias", "none"])
@pytest.mark.parametrize("shape", ROWS)
def test_layer_norm(k, shape, parts, dtype):
    x, g = draw(shape, dtype, 2.0), draw(shape, dtype)
    weight = draw(shape[1], dtype) if parts in ("both", "weight") else None
    bias = draw(shape[1], dtype) if parts in ("both", "bias") else None
    expected, saved = CPU.layer_norm(x, weight, bias, 1e-3)
    w, b = (None if p is None else put(p) for p in (weight, bias))
    for a in layouts(x):
        found, kept = k.layer_norm(a, w, b, 1e-3)
        close(found, expected, dtype, 4)
    close(k.layer_norm_backward(put(g), kept, w), CPU.layer_norm_backward(g, saved, weight), dtype, 40)
    close(k.layer_norm_weight_gradient(put(g), kept), CPU.layer_norm_weight_gradient(g, saved), dtype, 10)
    for beta in (0.0, 1.0):
        before = draw(shape[1], dtype) if beta else np.full(shape[1], np.nan, dtype)
        out = put(before)
        assert k.layer_norm_weight_gradient(put(g), kept, out, beta) is out
        close(out, CPU.layer_norm_weight_gradient(g, saved, before.copy(), beta), dtype, 10)


def test_layer_norm_takes_its_statistics_in_two_passes(k):
    x = (1e4 + RNG.standard_normal((2, 1000))).astype("float32")
    out, _ = k.layer_norm(put(x), None, None, 0.0)
    exact = (x - x.mean(1, keepdims=True, dtype="float64")) / x.std(1, keepdims=True, dtype="float64")
    assert np.abs(host(out) - exact).max() < 2e-3


@pytest.mark.parametrize("index", ["int8", "int32", "int64", "uint8", "uint64"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(6, 10), (1, 1), (0, 7), (300, 33), (5, 3000)])
def test_cross_entropy(k, shape, dtype, index):
    rows, classes = shape
    x, target = draw(shape, dtype, 3.0), RNG.integers(0, min(classes, 100), rows).astype(index)
    seed = np.asarray(0.25, "float64" if dtype == "float64" else "float32")
    for ignore in (-100, 1):
        expected, saved = CPU.cross_entropy(x, target, ignore)
        for a, t in zip(layouts(x), layouts(target)):
            total, kept = k.cross_entropy(a, t, ignore)
            np.testing.assert_allclose(float(total), float(expected), rtol=TOLERANCE[str(expected.dtype)])
            assert total.dtype == expected.dtype and total.shape == ()
        grad = k.cross_entropy_backward(put(seed), kept)
        close(grad, CPU.cross_entropy_backward(seed, saved), dtype)


@pytest.mark.parametrize("index", ["int64", "int32", "uint8"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (128, 10), (37, 33), (5, 1024), (1500, 7)])
def test_cross_entropy_with_its_check(k, shape, dtype, index):
    x, seed = draw(shape, dtype, 3.0), np.asarray(1.7, "float64" if dtype == "float64" else "float32")
    target = RNG.integers(0, min(shape[1], 200), shape[0]).astype(index)
    for ignore in (-100, int(target[0])):
        expected, saved = CPU.cross_entropy(x, target, ignore)
        a, t, count = put(x), put(target), xp.zeros(())
        assert k.checks_with_loss(a, t) and not CPU.checks_with_loss(x, target)
        total, kept = k.cross_entropy(a, t, ignore, count, check=True)
        close(total, expected, "float32" if dtype == "float16" else dtype, scale=10)
        assert float(count) == (target != ignore).sum()
        close(k.cross_entropy_backward(put(seed), kept), CPU.cross_entropy_backward(seed, saved), dtype)
    assert k.pending_error() is None


def test_the_check_beside_the_loss_finds_what_the_other_finds(k):
    k.begin_step(3)
    target = put([0, -100, 4, 9])
    total, _ = k.cross_entropy(xp.zeros((4, 4)), target, -100, xp.zeros(()), check=True)
    assert np.isnan(float(total))
    first = str(k.pending_error())
    k.check_class_indices(target, 4, -100)
    xp.cuda.get_current_stream().synchronize()
    assert first == str(k.pending_error()) and "got 4 at sample 2" in first and "in step 3" in first
    total, _ = k.cross_entropy(xp.full((4, 4), np.nan), put([0, 1, 2, 3]), -100, xp.zeros(()), check=True)
    assert np.isnan(float(total))


def test_cross_entropy_of_a_bad_label_is_not_a_number(k):
    total, saved = k.cross_entropy(xp.zeros((3, 4)), put([0, 4, -1]), -100)
    assert np.isnan(float(total))
    grad = host(k.cross_entropy_backward(xp.ones(()), saved))
    assert np.isfinite(grad[0]).all() and np.isnan(grad[1:]).all()


def test_cross_entropy_of_many_rows_repeats_its_bits(k):
    x, target = put(draw((70_000, 9), "float32")), put(RNG.integers(0, 9, 70_000))
    totals = {float(k.cross_entropy(x, target, -100)[0]) for _ in range(3)}
    assert len(totals) == 1
    exact, _ = CPU.cross_entropy(host(x).astype("f8"), host(target), -100)
    assert abs(totals.pop() / float(exact) - 1) < 1e-6


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [*ELEMENTS, (100_000,)])
def test_squared_error(k, shape, dtype):
    x, y = draw(shape, dtype), draw(shape, dtype)
    seed = np.asarray(0.5, "float64" if dtype == "float64" else "float32")
    expected, saved = CPU.squared_error(x, y)
    for a, b in zip(layouts(x), layouts(y)):
        total, kept = k.squared_error(a, b)
        assert total.dtype == expected.dtype and total.shape == ()
        np.testing.assert_allclose(float(total), float(expected), rtol=2 * TOLERANCE[str(expected.dtype)])
    close(k.squared_error_backward(put(seed), kept), CPU.squared_error_backward(seed, saved), dtype)


# -- indices ------------------------------------------------------------------------------------------------


def later(k):
    xp.cuda.get_current_stream().synchronize()
    return k.pending_error()


@pytest.mark.parametrize("index", ["int8", "int32", "int64", "uint8", "uint64"])
@pytest.mark.parametrize("shape", [(3,), (0,), (), (4, 5), (200, 1000)])
def test_labels_are_counted(k, shape, index):
    labels = RNG.integers(0, 10, shape).astype(index)
    for ignore in (-100, 3, None):
        expected = CPU.check_class_indices(labels, 10, ignore)
        for device in layouts(labels):
            found = k.check_class_indices(device, 10, ignore)
            assert found.dtype == np.float64 and found.shape == () and float(found) == float(expected)
    assert later(k) is None


def test_a_bad_label_is_told_later_once_with_its_step(k):
    k.begin_step(41)
    labels = np.zeros((300, 700), np.int64)
    labels[200, 5], labels[299, 1], labels[200, 6] = 12, -3, 99
    k.check_class_indices(put(labels), 10, None)
    k.begin_step(42)
    k.check_class_indices(put(np.array([0, 77])), 10, None)
    error = later(k)
    assert type(error) is ValueError and str(error) == (
        "target: expected class indices in 0..9, got 12 at sample 200, position (5,); check the labels or the "
        "model's outputs (found on cuda:0 in step 41)"
    )
    assert later(k) is None
    k.begin_step(put(np.int64(43)))
    k.embedding(xp.zeros((4, 2)), put(np.array([[[0, 1]], [[2, 4]]])))
    assert str(later(k)) == (
        "embedding: expected indices in 0..3, got 4 at sample 1, element 1 of it; check the tokens or the size "
        "of the table (found on cuda:0 in step 43)"
    )
    k.begin_step(0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(5,), (0,), (), (3, 4), (1000,)])
@pytest.mark.parametrize("width", [0, 1, 3, 130])
def test_embedding(k, shape, width, dtype):
    table, index = draw((6, width), dtype), RNG.integers(0, 6, shape)
    for t, i in zip(layouts(table), layouts(index)):
        assert host(k.embedding(t, i)).tobytes() == table[index].tobytes()
    assert host(k.embedding(put(table), put(index.astype("uint8")))).tobytes() == table[index].tobytes()


def test_an_embedding_of_a_bad_index_is_not_a_number(k):
    out = host(k.embedding(xp.ones((4, 2)), put(np.array([1, 4, -1]))))
    assert (out[0] == 1).all() and np.isnan(out[1:]).all()
    assert later(k) is not None


SEGMENTS = {
    "few": lambda: RNG.integers(0, 6, 20),
    "none": lambda: np.zeros(0, np.int64),
    "one": lambda: np.array([7]),
    "all the same": lambda: np.full(1000, 3),
    "two": lambda: np.repeat([2, 5], [300, 129]),
    "many": lambda: RNG.integers(0, 8, (40, 50)),
    "skewed": lambda: np.minimum(RNG.geometric(0.5, 5000) - 1, 7),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [1, 3, 130])
@pytest.mark.parametrize("name", SEGMENTS)
def test_embedding_gradient(k, name, width, dtype):
    index = SEGMENTS[name]()
    g = draw((*index.shape, width), dtype)
    expected = CPU.embedding_backward(g.astype("f8"), index, 8).astype(dtype)
    for a in layouts(g):
        close(k.embedding_backward(a, put(index), 8), expected, dtype, 20)
    close(k.embedding_backward(put(g), put(index.astype("uint8")), 8), expected, dtype, 20)
    for beta in (0.0, 1.0):
        before = draw((8, width), dtype) if beta else np.full((8, width), np.nan, dtype)
        out = put(before)
        assert k.embedding_backward(put(g), put(index), 8, out, beta) is out
        close(out, expected + before if beta else expected, dtype, 20)
    again = [k.embedding_backward(put(g), put(index), 8).tobytes() for _ in range(2)]
    assert again[0] == again[1]


def test_embedding_gradient_into_a_wider_out(k):
    g = np.ones((5000, 1), "float16")
    out = xp.full((2, 1), np.nan, np.float32)
    k.embedding_backward(put(g), xp.zeros(5000, np.int64), 2, out, 0.0)
    assert host(out).tolist() == [[5000], [0]]


INDEX = {
    "integer": 1,
    "slice": slice(None, None, -2),
    "ellipsis": (..., 0),
    "new axis": (slice(None), None, 1),
    "list": [0, 2, 0],
    "array": np.array([2, 2, -1, -3]),
    "unsigned": np.array([[2], [0]], np.uint8),
    "two arrays": (np.array([0, 1, 0]), np.array([3, 3, 3])),
    "array and slice": (slice(0, 2), np.array([0, 0])),
    "boolean": np.array([True, False, True]),
    "boolean of all": np.array([[True, False, True, False]] * 3),
    "none": np.zeros(0, np.int64),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", INDEX)
def test_scatter(k, name, dtype):
    index = INDEX[name]
    on_gpu = (
        tuple(put(p) if isinstance(p, np.ndarray) else p for p in index)
        if isinstance(index, tuple)
        else index
    )
    on_gpu = put(index) if isinstance(index, np.ndarray) else on_gpu
    g = draw(np.empty((3, 4))[index].shape, dtype)
    close(k.scatter(put(g), on_gpu, (3, 4)), CPU.scatter(g, index, (3, 4)), dtype)


# -- updates ------------------------------------------------------------------------------------------------

RULES = ["sgd", "momentum", "nesterov", "adam", "lion", "lamb"]
COMBINATIONS = [
    ("float32", "float32", "float32"),
    ("float32", "float16", "float32"),
    ("float16", "float32", "float32"),
    ("float64", "float64", "float64"),
    ("float32", "float64", "float32"),
]
SIZES = [0, 256, 5 * 256, 300 * 256, 1, 255, 4097]


def run(kernel, rule, arrays, place, **numbers):
    weights, gradient, first, second = (place(a.copy()) for a in arrays)
    scratch = kernel.update_scratch(np.promote_types(arrays[0].dtype, np.float32))
    lr, decay, scale, limit = numbers["lr"], numbers["decay"], numbers["scale"], numbers.get("limit")
    if rule == "adam":
        kernel.adam(
            weights, gradient, first, second, scale=scale, step=lr, eps=1e-8, betas=(0.9, 0.999),
            weight_decay=decay, shrink=numbers["shrink"], scratch=scratch, limit=limit,
        )  # fmt: skip
    elif rule == "lion":
        kernel.lion(
            weights, gradient, first, scale=scale, lr=lr, betas=(0.9, 0.99), shrink=numbers["shrink"],
            scratch=scratch, limit=limit,
        )  # fmt: skip
    elif rule == "lamb":
        blocks = weights.size // 256
        edges = place(256 * np.array(sorted({0, *range(1, blocks, 16), *range(5, blocks, 7), blocks})))
        out, common = (
            place(np.zeros(2 * len(edges) - 2)).reshape(-1, 2),
            {"scratch": scratch, "weight_decay": decay},
        )
        common |= {"correction": lr, "eps": numbers["shrink"]}
        kernel.lamb_moments(
            weights, gradient, first, second, edges=edges + 512, offset=512, out=out, scale=scale,
            betas=(0.9, 0.999), limit=limit, **common,
        )  # fmt: skip
        kernel.lamb(
            weights, first, second, lr=lr, ratios=place(np.array([1.0, 0.37])),
            owners=place((np.arange(blocks) % 2).astype(np.int32)), copy=None, **common,
        )  # fmt: skip
    else:
        velocity = None if rule == "sgd" else first
        kernel.sgd(
            weights, gradient, velocity, scale=scale, lr=lr, momentum=0.9, weight_decay=decay,
            nesterov=rule == "nesterov", scratch=scratch, limit=limit,
        )  # fmt: skip
    return [host(a).tobytes() for a in (weights, first, second)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtypes", COMBINATIONS, ids="-".join)
@pytest.mark.parametrize("rule", RULES)
def test_rules_have_numpys_bits(k, rule, dtypes, size):
    p, g, s = dtypes
    if rule == "lamb" and size % 256:
        size = 8 * 256  # ranges of its first pass are whole blocks
    arrays = draw(size, p), draw(size, g), draw(size, s), np.abs(draw(size, s))
    for decay, shrink, limit in ((0.0, 1.0, None), (0.1, 0.999, None), (0.1, 0.999, 0.2), (0.0, 1.0, 0.2)):
        numbers = {"lr": 0.01, "decay": decay, "shrink": shrink, "scale": 0.3, "limit": limit}
        expected = run(CPU, rule, arrays, lambda a: a, **numbers)
        assert run(k, rule, arrays, put, **numbers) == expected
        named = {"lr", "decay", "shrink", "scale"}
        later = {name: put(np.float64(v)) if name in named else v for name, v in numbers.items()}
        if decay:  # a number in device memory is never left out as 0 or 1 is
            assert run(k, rule, arrays, put, **later) == expected
    if size % 256 == 0 and size:
        column = np.linspace(0.01, 0.1, size // 256)
        numbers = {"lr": column, "decay": column, "shrink": 1 - column, "scale": 0.3}
        expected = run(CPU, rule, arrays, lambda a: a, **numbers)
        assert run(k, rule, arrays, put, **numbers) == expected
        there = {name: put(v) if name in ("lr", "decay", "shrink") else v for name, v in numbers.items()}
        assert run(k, rule, arrays, put, **there) == expected


def test_rules_at_odd_addresses(k):
    arrays = [draw(1001, "float32") for _ in range(3)] + [np.abs(draw(1001, "float32"))]
    numbers = {"lr": 0.01, "decay": 0.1, "shrink": 0.9, "scale": 0.3}

    def shifted(a):
        memory = xp.empty(len(a) + 1, a.dtype)
        memory[1:] = put(a)
        return memory[1:]

    for rule in RULES:
        if rule != "lamb":
            assert run(k, rule, arrays, shifted, **numbers) == run(CPU, rule, arrays, lambda a: a, **numbers)
    arrays = [a[:768] for a in arrays]
    assert run(k, "lamb", arrays, shifted, **numbers) == run(CPU, "lamb", arrays, lambda a: a, **numbers)


@pytest.mark.parametrize("dtypes", COMBINATIONS, ids="-".join)
def test_sums_of_lamb(k, dtypes):
    """The sums of a piece have the same bits whatever range it is summed with, and NumPy's value."""
    p, g, s = dtypes
    size = 64 * 256
    arrays = draw(size, p), draw(size, g), draw(size, s), np.abs(draw(size, s))
    edges = 256 * np.array([0, 1, 16, 17, 32, 48, 64])
    common = {"scale": 0.3, "correction": 0.7, "eps": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
    found = []
    for kernel, place, cuts in ((CPU, np.copy, [0, 6]), (k, put, [0, 6]), (k, put, [0, 2, 5, 6])):
        there, out = [place(a.copy()) for a in arrays], place(np.zeros((6, 2)))
        scratch = kernel.update_scratch(np.dtype(s))
        for a, b in itertools.pairwise(cuts):
            part = slice(edges[a], edges[b])
            kernel.lamb_moments(
                *(array[part] for array in there), edges=place(edges)[a : b + 1], offset=int(edges[a]), out=out[a:b],
                scratch=scratch, **common,
            )  # fmt: skip
        spans = place(np.array([[0, 2], [2, 2], [2, 6]]))
        found.append([host(a) for a in (*there, out, kernel.trust_ratios(out, spans))])
    cpu, whole, parts = found
    assert [a.tobytes() for a in whole] == [a.tobytes() for a in parts]
    assert [a.tobytes() for a in cpu[:4]] == [a.tobytes() for a in whole[:4]]
    for one, other in zip(cpu[4:], whole[4:]):
        np.testing.assert_allclose(one, other, rtol=1e-13)
    assert whole[5][1] == 1.0 and whole[5][0] == np.sqrt(whole[4][:2, 0].sum()) / np.sqrt(
        whole[4][:2, 1].sum()
    )
    zero = put(np.array([[0.0, 1.0], [1.0, 0.0]]))
    assert host(k.trust_ratios(zero, put(np.array([[0, 1], [1, 2]])))).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("size", [0, 1, 1001, 300 * 256])
@pytest.mark.parametrize(("p", "s"), [("float32", "float32"), ("float64", "float64"), ("float16", "float32")])
def test_averages_have_numpys_bits(k, p, s, size):
    average, weights = draw(size, s), draw(size, p)
    found = []
    for kernel, place in ((CPU, np.copy), (k, put)):
        e, w = place(average.copy()), place(weights)
        kernel.average(e, w, decay=0.99, scratch=kernel.update_scratch(np.dtype(s)))
        for when in (0, 1):
            flag = place(np.array(when, np.int64))
            kernel.average(e, w, decay=0.9, scratch=kernel.update_scratch(np.dtype(s)), when=flag)
        found.append(host(e).tobytes())
    assert found[0] == found[1]


def test_a_captured_rule_reads_its_numbers_when_it_runs(k):
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        weights, gradient, scale = xp.zeros(256), xp.ones(256), xp.zeros(())

        def update():
            k.sgd(
                weights, gradient, None, scale=scale, lr=0.5, momentum=0.0, weight_decay=0.0, nesterov=False,
                scratch=k.update_scratch(np.float64),
            )  # fmt: skip

        update()
        stream.begin_capture()
        update()
        graph = stream.end_capture()
        for value in (1.0, 3.0):
            scale.fill(value)
            graph.launch(stream)
        stream.synchronize()
    assert (host(weights) == -2.0).all()


def test_columns(k):
    numbers = k.block_numbers(np.array([0, 2, 1, 1], np.uint8))
    assert host(k.column(np.array([0.5, 1.5, 2.5]), numbers[1:])).tolist() == [2.5, 1.5, 1.5]
    zeros = k.flat_zeros(1000, np.float32)
    assert zeros.shape == (1000,) and not host(zeros).any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 40 * 4096 + 5])
def test_norms(k, size, dtype):
    x = draw(size, dtype)
    sums = k.sum_of_squares(put(x))
    assert sums.dtype == np.float64
    np.testing.assert_allclose(host(sums), CPU.sum_of_squares(x), rtol=1e-13)
    assert sums.tobytes() == k.sum_of_squares(put(x)).tobytes()


@pytest.mark.parametrize("size", [0, 1, 3, 7, 8, 9, 100, 65_535, 65_536, 65_537, 200_003, 70_000_001])
def test_checksums_are_the_same_integers(k, size):
    data = RNG.integers(0, 256, size, dtype=np.uint8)
    assert k.checksum(put(data)) == CPU.checksum(data)
    if size == 200_003:
        shifted = put(data)[1:]
        assert k.checksum(shifted) == CPU.checksum(data[1:])


@pytest.mark.parametrize("dtype", [*FLOATS, "int64", "bool"])
def test_checksums_of_arrays(k, dtype):
    x = draw((31, 17), "float64", 5.0).astype(dtype)
    for device in layouts(x):
        assert k.checksum(device) == CPU.checksum(x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [0, 1, 5, 5000])
def test_all_finite(k, size, dtype):
    x = np.full(size, np.finfo(dtype).max, dtype)
    assert bool(k.all_finite(put(x))) and k.all_finite(put(x)).shape == ()
    for bad in (np.nan, np.inf, -np.inf):
        for at in {0, size // 2, size - 1} if size else ():
            y = put(x)
            y[at] = bad
            assert not k.all_finite(y)


@pytest.mark.parametrize("name", ["relu", "sigmoid"])
def test_bfloat16_runs_where_it_is_cheap(k, name):
    x = draw((5, 300), BF16)
    expected = getattr(CPU, name)(x.astype("f4"))
    found = getattr(k, name)(put(x))
    assert found.dtype == BF16 and np.abs(host(found).astype("f4") - expected).max() < 0.02
    value, saved = k.layer_norm(put(x), None, None, 1e-5)
    assert np.abs(host(value).astype("f4") - CPU.layer_norm(x.astype("f4"), None, None, 1e-5)[0]).max() < 0.05
    assert k.layer_norm_backward(put(x), saved, None).dtype == BF16
    assert (
        abs(float(k.sum_of_squares(put(x).reshape(-1)).sum()) / float((x.astype("f8") ** 2).sum()) - 1)
        < 1e-12
    )
