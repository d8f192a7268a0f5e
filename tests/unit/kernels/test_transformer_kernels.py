"""What a transformer's step runs on: layer norm beside a sum, attention, tokens and positions, many classes.

Each against a formula in float64, on the device of the test, in every dtype; tolerances are relative to the largest
value: 4 units in the last place of 16 bits, 3e-6 of float32.
"""

import ml_dtypes
import numpy as np
import pytest
from on_device import here, host, put, xp

from mpdp.autodiff import Parameter, Tensor, ops
from mpdp.errors import MissingDependencyError

pytestmark = pytest.mark.usefixtures("device")
random = np.random.default_rng(21)
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [BF16, np.dtype("float16"), np.dtype("float32"), np.dtype("float64")]
TOLERANCE = {"bfloat16": 1.6e-2, "float16": 2e-3, "float32": 3e-6, "float64": 1e-12}


def draw(shape, dtype, scale=1.0):
    return (scale * random.standard_normal(shape)).astype(dtype)


def close(found, expected, dtype, factor=1.0):
    found = host(found).astype(np.float64)
    limit = factor * TOLERANCE[np.dtype(dtype).name] * max(1.0, np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit)


def wide(x):
    return host(x).astype(np.float64)


def masters(dtype):
    """The dtype of parameters beside rows of ``dtype``."""
    return np.float32 if dtype.itemsize == 2 else dtype


# -- layer norm ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "width"),
    [
        (5, 384),
        (1, 64),
        (300, 768),
        (9, 1024),
        (7, 1600),
        (3, 4096),
        (2, 8192),
        (3, 8200),
        (4, 770),
        (6, 3),
        (0, 64),
    ],
)
def test_layer_norm_of_a_sum(rows, width, dtype):
    k, own = here.kernels, masters(dtype)
    x, added, g, before = (draw((rows, width), dtype) for _ in range(4))
    weight, bias, old = draw(width, own), draw(width, own), draw(width, own)
    total, out, saved = k.add_layer_norm(put(x), put(added), put(weight), put(bias), 1e-5)
    close(total, wide(x) + wide(added), dtype)
    summed = wide(total)
    mean, rstd = summed.mean(1, keepdims=True), 1 / np.sqrt(summed.var(1, keepdims=True) + 1e-5)
    normal = (summed - mean) * rstd
    close(out, normal * weight + bias, dtype)
    h = wide(g) * weight
    slope = rstd * (h - h.mean(1, keepdims=True) - normal * (h * normal).mean(1, keepdims=True))
    into, onto = xp.empty(width, own), put(old.copy())
    found = k.layer_norm_gradients(put(g), saved, put(weight), put(before), True, (into, 0.0), (onto, 1.0))
    close(found, slope + wide(before), dtype, 2)
    scale = np.sqrt(max(rows, 1))
    close(into, (wide(g) * normal).sum(0), own, scale)
    close(onto, wide(g).sum(0) + old, own, scale)
    again = xp.empty(width, own)
    assert k.layer_norm_gradients(put(g), saved, put(weight), None, False, (again, 0.0), None) is None
    assert host(again).tobytes() == host(into).tobytes()
    close(k.layer_norm_gradients(put(g), saved, put(weight), None, True, None, None), slope, dtype, 2)
    plain, _ = k.layer_norm(total, put(weight), put(bias), 1e-5)
    assert host(plain).tobytes() == host(out).tobytes()


def test_layer_norm_without_parameters_and_at_an_odd_address():
    k = here.kernels
    x = draw((4, 257), np.float32)
    for view in (put(x)[:, :256], put(x)[:, 1:], put(x[:, :256])):
        rows = wide(view)
        normal = (rows - rows.mean(1, keepdims=True)) / np.sqrt(rows.var(1, keepdims=True) + 1e-5)
        close(k.layer_norm(view, None, None, 1e-5)[0], normal, "float32")
        close(k.add_layer_norm(view, xp.zeros_like(view), None, None, 1e-5)[1], normal, "float32")


def test_a_gradient_that_comes_past_the_norm_is_added_in_its_kernel():
    x, added = (Tensor(put(draw((3, 5, 8), "float64")), requires_grad=True) for _ in range(2))
    weight, bias = (Parameter(put(draw(8, "float64"))) for _ in range(2))
    asked = []
    kernel = type(here.kernels).layer_norm_gradients

    def watched(self, g, saved, weight, before, *others):
        asked.append(before is not None)
        return kernel(self, g, saved, weight, before, *others)

    def run(both):
        total, normal = both(x, added)
        (total * 0.5 + normal.tanh()).sum().backward()
        found = [host(p.grad).copy() for p in (x, added, weight, bias)]
        for p in (x, added, weight, bias):
            p.grad = None
        return found

    def apart(x, added):
        total = x + added
        return total, ops.layer_norm(total, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(here.kernels), "layer_norm_gradients", watched)
        one = run(lambda x, added: ops.add_layer_norm(x, added, weight, bias))
        two = run(apart)
    assert asked == [True, True]
    for a, b in zip(one, two):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)


# -- attention ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("n", "h", "t", "d"),
    [(2, 3, 64, 64), (1, 2, 17, 40), (2, 1, 1, 8), (1, 1, 130, 128), (2, 2, 6, 5), (0, 2, 4, 8)],
)
def test_self_attention_reads_and_writes_packed(n, h, t, d, causal, dtype):
    packed = draw((n, t, 3 * h * d), dtype)
    g = draw((n, t, h * d), dtype)
    x = Tensor(put(packed), requires_grad=True)
    out = ops.self_attention(x, h, causal=causal)
    assert out.shape == (n, t, h * d) and out.dtype == dtype and out.data.flags.c_contiguous
    q, k, v = wide(packed).reshape(n, t, 3, h, d).transpose(2, 0, 3, 1, 4)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(d)
    if causal:
        scores[..., ~np.tri(t, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    close(out, (weights @ v).transpose(0, 2, 1, 3).reshape(n, t, h * d), dtype)
    out.backward(put(g))
    slope = wide(g).reshape(n, t, h, d).transpose(0, 2, 1, 3)
    inner = slope @ v.swapaxes(-1, -2)
    inner = weights * (inner - (inner * weights).sum(-1, keepdims=True)) / np.sqrt(d)
    parts = inner @ k, inner.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ slope
    close(x.grad, np.stack(parts).transpose(1, 3, 0, 2, 4).reshape(packed.shape), dtype, 2)


def test_engines_of_attention():
    packed = put(draw((2, 32, 3 * 2 * 16), "float16"))
    g = np.ones((2, 32, 32))

    def run(**options):
        x = Tensor(packed, requires_grad=True)
        out = ops.self_attention(x, 2, causal=True, **options)
        out.backward(put(g))
        return wide(out), wide(x.grad), host(x.grad).tobytes()

    plain, slope, _ = run(engine="plain")
    for options in ({}, {"deterministic": False}):
        found, gradient, _ = run(**options)
        np.testing.assert_allclose(found, plain, rtol=0, atol=4e-3)
        np.testing.assert_allclose(gradient, slope, rtol=0, atol=2e-2)
    assert run()[2] == run()[2]
    if here.device.kind == "cpu":
        with pytest.raises(ValueError, match=r'engine: expected "auto" or "plain" on cpu, got "cudnn"'):
            run(engine="cudnn")
    else:
        try:
            assert run(engine="cudnn")[2] == run()[2]
        except MissingDependencyError as error:
            assert "pip install" in str(error)
        with pytest.raises(ValueError, match=r"engine: expected an attention that cuDNN has, got float32"):
            ops.self_attention(packed.astype("float32"), 2, engine="cudnn")


# -- tokens and positions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("n", "t", "rows", "width"),
    [(3, 5, 7, 16), (1, 1, 1, 1), (4, 300, 5, 3), (2, 33, 4000, 24), (0, 5, 7, 8), (3, 0, 7, 8)],
)
def test_token_embedding(n, t, rows, width, dtype):
    tokens, positions = draw((rows, width), dtype), draw((t + 2, width), dtype)
    index = random.integers(0, rows, (n, t))
    first, second = Parameter(put(tokens)), Parameter(put(positions))
    out = ops.token_embedding(first, second, put(index))
    expected = (tokens[index].astype(masters(dtype)) + positions[:t].astype(masters(dtype))).astype(dtype)
    assert host(out).tobytes() == expected.tobytes()
    g = draw(out.shape, dtype)
    out.backward(put(g))
    sums = np.zeros((rows, width))
    np.add.at(sums, index, wide(g))
    close(first.grad, sums, dtype, 2)
    close(second.grad, np.concatenate([wide(g).sum(0), np.zeros((2, width))]), dtype, 2)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 1024, 1025, 5000, 40_000])
@pytest.mark.parametrize("rows", [1, 3, 128, 60_000])
def test_sums_over_equal_indices_of_any_length(rows, count):
    k = here.kernels
    index = random.integers(0, rows, count).astype(np.int32)
    g = draw((count, 4), BF16)
    expected = np.zeros((rows, 4))
    np.add.at(expected, index, wide(g))
    out = k.embedding_backward(put(g), put(index), rows, xp.full((rows, 4), 3, np.float32), 1.0)
    close(out, expected + 3, "float32", 10)
    again = k.embedding_backward(put(g), put(index), rows, xp.full((rows, 4), 3, np.float32), 1.0)
    assert host(out).tobytes() == host(again).tobytes()


def test_tables_that_do_not_fit():
    tokens, positions, index = xp.zeros((5, 4)), xp.zeros((3, 4)), xp.zeros((2, 3), np.int64)
    with pytest.raises(ValueError, match=r"expected two tables \(rows, D\), got \(5, 4\) and \(3, 3\)"):
        ops.token_embedding(tokens, positions[:, :3], index)
    with pytest.raises(ValueError, match=r"shape \(N, T\) with T of at most 2 positions, got \(2, 3\)"):
        ops.token_embedding(tokens, positions[:2], index)
    with pytest.raises(TypeError, match=r"index: expected an array of integers, got float64"):
        ops.token_embedding(tokens, positions, index * 0.5)


# -- many classes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "classes"), [(5, 2048), (3, 50_304), (4, 2049), (2, 4100), (7, 128), (0, 4096)]
)
def test_cross_entropy_of_many_classes(rows, classes, dtype):
    k = here.kernels
    logits = draw((rows, classes), dtype, 3.0)
    target = random.integers(0, classes, rows)
    target[:1] = -100
    counted = target >= 0
    label = np.where(counted, target, 0)
    shifted = wide(logits) - wide(logits).max(1, keepdims=True, initial=-np.inf)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    expected = -(logs[np.arange(rows), label] * counted).sum()
    total, saved = k.cross_entropy(put(logits), put(target), -100)
    assert total.dtype == masters(dtype)
    close(total, expected, masters(dtype), 3)
    slope = np.exp(logs)
    slope[np.arange(rows), label] -= 1
    slope *= 0.25 * counted[:, None]
    close(k.cross_entropy_backward(put(np.asarray(0.25, masters(dtype))), saved), slope, dtype)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("shape", [(6, 2048), (2, 3, 2048)])
def test_the_gradient_takes_the_memory_of_logits_that_nothing_else_reads(kept, shape):
    weight = Parameter(put(draw((2048, 4), np.float32)))
    x = put(draw((*shape[:-1], 4), np.float32))
    target = put(random.integers(0, 2048, shape[:-1]))
    asked = []
    kernel = type(here.kernels).cross_entropy_backward

    def watched(self, g, saved, own=False):
        asked.append(own)
        return kernel(self, g, saved, own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(here.kernels), "cross_entropy_backward", watched)
        logits = ops.linear(x, weight)
        before = host(logits).copy()
        loss = ops.cross_entropy(logits, target)
        if not kept:
            del logits
        loss.backward()
        if kept:
            assert np.array_equal(host(logits), before)
    if here.device.kind == "cuda":
        assert asked == [not kept]
    logits = wide(before)
    slope = np.exp(logits - logits.max(-1, keepdims=True))
    slope /= slope.sum(-1, keepdims=True)
    np.put_along_axis(
        slope, host(target)[..., None], np.take_along_axis(slope, host(target)[..., None], -1) - 1, -1
    )
    close(weight.grad, slope.reshape(-1, 2048).T @ wide(x).reshape(-1, 4), "float32", 10)
