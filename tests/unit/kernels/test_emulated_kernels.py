"""The CUDA kernels of a transformer's step on the host: their text, and what launches them, without a GPU."""

import ml_dtypes
import numpy as np
import pytest
from emulated_blocks import EmulatedKernels, place

from mpdp.kernels import small_products
from mpdp.kernels.cublaslt import Problem
from mpdp.kernels.cuda_channels import CudaChannels
from mpdp.kernels.cuda_source import types

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
LIMIT = {BF16: 1.6e-2, F32: 3e-6}
random = np.random.default_rng(31)


@pytest.fixture(scope="module")
def k():
    return EmulatedKernels()


def draw(shape, dtype=F32, scale=1.0):
    return place((scale * random.standard_normal(shape)).astype(dtype))


def wide(x):
    return np.asarray(x, np.float64)


def close(found, expected, dtype, factor=1.0):
    limit = factor * LIMIT[dtype] * max(1.0, np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(wide(found), expected, rtol=0, atol=limit)


# A row for a warp, for two and for a whole block; rows that fill no block; rows that are fetched ahead, and one not.
@pytest.mark.parametrize(
    ("rows", "width", "dtype"), [(45, 384, BF16), (21, 1024, BF16), (3, 4096, BF16), (9, 768, F32)], ids=str
)
def test_layer_norm_of_a_sum(k, rows, width, dtype, monkeypatch):
    monkeypatch.setattr("mpdp.kernels.cuda_norms._BLOCKS", 3)
    monkeypatch.setattr("mpdp.kernels.cuda_norms._FORWARD_BLOCKS", 2)
    x, added, g, before = (draw((rows, width), dtype) for _ in range(4))
    weight, bias, old = draw(width), draw(width), draw(width)
    total, out, saved = k.add_layer_norm(x, added, weight, bias, 1e-5)
    close(total, wide(x) + wide(added), dtype)
    summed = wide(total)
    mean, rstd = summed.mean(1, keepdims=True), 1 / np.sqrt(summed.var(1, keepdims=True) + 1e-5)
    normal = (summed - mean) * rstd
    close(out, normal * wide(weight) + wide(bias), dtype)
    assert k.layer_norm(total, weight, bias, 1e-5)[0].tobytes() == out.tobytes()
    h = wide(g) * wide(weight)
    slope = rstd * (h - h.mean(1, keepdims=True) - normal * (h * normal).mean(1, keepdims=True))
    scales, shifts = draw(width), place(old)
    found = k.layer_norm_gradients(g, saved, weight, before, True, (scales, 0.0), (shifts, 1.0))
    close(found, slope + wide(before), dtype)
    close(scales, (wide(g) * normal).sum(0), F32, 10)
    close(shifts, wide(g).sum(0) + wide(old), F32, 10)
    close(k.layer_norm_gradients(g, saved, weight, None, True, None, None), slope, dtype)
    assert k.layer_norm_gradients(g, saved, weight, None, False, None, (shifts, 0.0)) is None
    close(shifts, wide(g).sum(0), F32, 10)


@pytest.mark.parametrize(
    ("count", "rows", "width"),
    [(1, 1, 4), (255, 3, 4), (5000, 40, 4), (300, 60_000, 3), (33, 2, 40)],
)
def test_sums_over_equal_indices(k, count, rows, width):
    index = place(random.integers(-1, rows + 1, count).astype(np.int32))  # some that are no row add nothing
    g, out = draw((count, width), BF16), draw((rows, width))
    expected = wide(out)
    good = (index >= 0) & (index < rows)
    np.add.at(expected, index[good], wide(g)[good])
    k.embedding_backward(g, index, rows, out, 1.0)
    close(out, expected, F32, 10)
    k.embedding_backward(g, index, rows, out, 0.0)
    expected[:] = 0
    np.add.at(expected, index[good], wide(g)[good])
    close(out, expected, F32, 10)


def test_indices_are_sorted_with_their_positions(k):
    index = place(random.integers(0, 7, 4500).astype(np.uint8))  # runs, and two merges
    ordered = np.asarray(k._ordered(index, 7))
    assert np.array_equal(ordered & 0xFFFFFFFF, np.argsort(index, kind="stable"))
    assert np.array_equal(ordered >> 32, np.sort(index))


@pytest.mark.parametrize(("n", "t", "width"), [(3, 5, 16), (2, 3, 5), (20, 2, 8)])
def test_tokens_and_positions(k, n, t, width):
    tokens, positions, index = draw((9, width)), draw((t + 1, width)), place(random.integers(0, 9, (n, t)))
    out = k.token_embedding(tokens, positions, index)
    assert np.array_equal(out, tokens[index] + positions[:t])
    close(k._first_axis_sums(out, None, 0.0), wide(out).sum(0), F32)
    old = draw((t, width))
    close(k._first_axis_sums(out, place(old), 1.0), wide(out).sum(0) + wide(old), F32)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("classes", [2048, 20_488])
def test_cross_entropy_of_many_classes(k, classes, dtype):
    logits = draw((5, classes), dtype, 3.0)
    logits[3] = -np.inf
    logits[3, 9] = 1
    target = place([0, -100, classes - 1, 9, classes])
    shifted = wide(logits) - wide(logits).max(1, keepdims=True)
    sums = np.exp(shifted).sum(1)
    losses, tops, found = (place(np.empty(5, F32)) for _ in range(3))
    saved = logits, target, -100, tops, found
    k._classes("classes_loss", target.dtype, logits, *saved, losses)
    expected = np.log(sums) - shifted[range(5), [0, 0, classes - 1, 9, 0]]
    expected[1], expected[4] = 0, np.nan
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    slope = np.exp(shifted) / sums[:, None]
    slope[[0, 2, 3], [0, classes - 1, 9]] -= 1
    slope[1], slope[4] = 0, np.nan
    out = k.cross_entropy_backward(place(np.full((), 0.25, F32)), saved)
    np.testing.assert_allclose(wide(out), 0.25 * slope, rtol=0, atol=LIMIT[dtype])
    own = k.cross_entropy_backward(place(np.full((), 0.25, F32)), saved, True)
    assert own is logits and own.tobytes() == out.tobytes()


@pytest.mark.parametrize("tile", small_products._TILES, ids=str)
@pytest.mark.parametrize("sizes", [(36, 68, 132), (33, 7, 70)])
def test_small_products(k, tile, sizes, monkeypatch):
    """As exact as sums of float32 are, from operands that lie either way, added to what was there."""
    monkeypatch.setattr(small_products, "_TILES", (tile,))
    rows, columns, inner = sizes
    for turned_a, turned_b in ((0, 1), (1, 0)):
        a, b, bias = draw((rows, inner)), draw((inner, columns)), draw(columns)
        kept_a, kept_b = (
            place(np.ascontiguousarray(x.T) if t else x) for x, t in ((a, turned_a), (b, turned_b))
        )
        problem = Problem(
            "float32", "float32", False, rows, columns, inner, turned_a, kept_a.shape[1], 0, turned_b, kept_b.shape[1],
            0, epilogue="RELU_BIAS",
        )  # fmt: skip
        product = small_products.SmallProduct(
            k.launch, problem, 1
        )  # for a GPU of one multiprocessor: no clusters
        product.point("BIAS_POINTER", bias.data.ptr)
        out = draw((rows, columns))
        plain = np.maximum(np.asarray(a) @ np.asarray(b) + bias, 0) + out
        expected = np.maximum(wide(a) @ wide(b) + wide(bias), 0) + wide(out)
        product.run(kept_a.data.ptr, kept_b.data.ptr, out.data.ptr, True, 0)
        error = np.abs(wide(out) - expected).max()
        assert error <= 3 * max(np.abs(plain - expected).max(), 2.0**-22)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("sizes", [(64, 40, 96), (33, 10, 70)])
def test_the_backward_of_a_small_layer(k, sizes, relu):
    rows, outputs, inputs = sizes
    g, x, weight = draw((rows, outputs)), draw((rows, inputs)), draw((outputs, inputs))
    kept = place(np.maximum(draw((rows, outputs)), 0)) if relu else None
    masked = wide(g) * (wide(kept) > 0 if relu else 1)
    exact = masked @ wide(weight), masked.T @ wide(x), masked.sum(0)
    for wanted in ((1, 1, 1), (0, 1, 1), (1, 0, 0)):
        out = [place(np.ones(e.shape, np.float32)) for e in exact]
        into = tuple((array, i == 1) if want else None for i, (array, want) in enumerate(zip(out, wanted)))
        small_products.linear_backward(k.launch, g, kept, x, weight, into, 1)
        for i, (array, value, want) in enumerate(zip(out, exact, wanted)):
            close(array, value + (i == 1) if want else np.ones(value.shape), F32, 2)


class EmulatedChannels(EmulatedKernels, CudaChannels):
    pass


@pytest.mark.parametrize(("rows", "channels"), [(4097, 64), (700, 12), (1, 4)])
def test_batch_norm(rows, channels):
    """Far from 0, in whole tiles and parts of them; with ReLU, and with a residual and two gradients."""
    k = EmulatedChannels()
    x, weight, bias, g, h = (
        draw(s) for s in ((rows, channels), channels, channels, (rows, channels), (rows, channels))
    )
    x += 50
    count, mean, rstd = k.channel_statistics(x, 1e-5)
    center, spread = wide(x).mean(0), np.sqrt(wide(x).var(0) + 1e-5)
    assert float(count) == rows
    np.testing.assert_allclose(mean, center, rtol=0, atol=1e-6)
    np.testing.assert_allclose(rstd * spread, 1, rtol=0, atol=1e-6)
    mean, rstd = place(mean), place(rstd)
    normal = (wide(x) - center) / spread
    for residual in (None, draw((rows, channels))):
        expected = normal * wide(weight) + wide(bias) + (0 if residual is None else wide(residual))
        out, saved = k.normalise_channels(x, mean, rstd, weight, bias, residual, True)
        close(out, np.maximum(expected, 0), F32, 3)
        gain, shift = draw(channels), draw(channels)
        old = wide(gain)
        both = residual is not None
        sums, masked = k.channel_sums(g, saved, (gain, 1.0), (shift, 0.0), h if both else None)
        slope = (wide(g) + (wide(h) if both else 0)) * (expected > 0)
        close(gain, old + (slope * normal).sum(0), F32, 20)
        close(shift, slope.sum(0), F32, 20)
        found = k.normalise_channels_backward(masked, saved, sums, count)
        exact = slope - slope.mean(0) - normal * (slope * normal).mean(0)
        close(found, exact * wide(weight) / spread, F32, 10)


@pytest.mark.parametrize(("read", "written"), [(F32, BF16), (BF16, F32)])
@pytest.mark.parametrize("start", [0, 1])
def test_casts(k, read, written, start):
    x = draw(5003 + start, read, 100)
    out = place(np.zeros(5003 + start, written))
    k.launch("casts", "cast", types(read, written), 3, 64, x[start:], out[start:], 5003)
    assert out[start:].tobytes() == np.asarray(x[start:]).astype(written).tobytes()
    other, total = draw(5003 + start, read), place(np.zeros(5003 + start, read))
    k.launch("elementwise", "sum", types(read), 3, 64, x[start:], other[start:], total[start:], 5003)
    assert total[start:].tobytes() == (wide(x) + wide(other)).astype(F32).astype(read)[start:].tobytes()
