"""The CUDA kernels of a transformer's step on the host: their text, and what launches them, without a GPU."""

import ml_dtypes
import numpy as np
import pytest
from emulated_blocks import EmulatedKernels, place

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
