"""Convolution, batch norm and pooling in every dtype against plain arithmetic in float64, on the CPU and on a GPU."""

import logging

import ml_dtypes
import numpy as np
import pytest
from on_device import here, host, put, xp

from mpdp.autodiff import Tensor, ops
from mpdp.errors import MissingDependencyError
from mpdp.kernels import cuda_images
from mpdp.kernels.cpu import CpuKernels
from mpdp.kernels.precision import tf32
from mpdp.kernels.windows import PlainWindows, Windows

pytestmark = pytest.mark.usefixtures("device")
random = np.random.default_rng(21)
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = ["bfloat16", "float16", "float32", "float64"]
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5, "float64": 1e-12}


class Plain(CpuKernels):
    """The oracle: plain array calls."""

    conv2d = PlainWindows.conv2d
    conv2d_backward = PlainWindows.conv2d_backward
    max_pool2d = PlainWindows.max_pool2d
    max_pool2d_backward = PlainWindows.max_pool2d_backward


plain = Plain()


def draw(shape, dtype):
    """Return random numbers of a dtype, and the same in float64."""
    dtype = BF16 if dtype == "bfloat16" else np.dtype(dtype)
    given = np.asarray(random.standard_normal(shape)).astype(np.float32).astype(dtype)
    return given, given.astype(np.float64)


def close(found, expected, dtype, scale=1.0):
    found = host(found).astype(np.float64)
    assert found.shape == expected.shape
    if expected.size:
        assert np.abs(found - expected).max() <= scale * TOLERANCE[dtype] * max(np.abs(expected).max(), 1e-3)


def turned(x):
    """Return a batch of images as a view of memory with channels last."""
    return put(np.ascontiguousarray(host(x).transpose(0, 2, 3, 1))).transpose(0, 3, 1, 2)


def is_channels_last(x):
    return x.transpose(0, 2, 3, 1).flags.c_contiguous


CONVOLUTIONS = {
    "colours": ((4, 3, 30, 30), (16, 3, 7, 7), Windows((7, 7), (2, 2), (3, 3)), 1),
    "colours, no padding": ((2, 4, 11, 14), (8, 4, 3, 2), Windows((3, 2), (2, 2)), 1),
    "colours, uneven": ((2, 2, 13, 12), (8, 2, 5, 4), Windows((5, 4), (2, 2), (1, 2)), 1),
    "colours, stride 1": ((2, 3, 9, 8), (16, 3, 3, 3), Windows((3, 3), padding=(1, 1)), 1),
    "usual": ((4, 16, 14, 14), (32, 16, 3, 3), Windows((3, 3), padding=(1, 1)), 1),
    "stride": ((4, 16, 15, 14), (8, 16, 3, 3), Windows((3, 3), (2, 2), (1, 1)), 1),
    "pointwise": ((4, 32, 7, 7), (16, 32, 1, 1), Windows((1, 1)), 1),
    "pointwise, stride": ((4, 32, 7, 8), (64, 32, 1, 1), Windows((1, 1), (2, 2)), 1),
    "odd": ((3, 5, 9, 11), (7, 5, 3, 2), Windows((3, 2), (2, 1), (0, 1)), 1),
    "dilated": ((2, 8, 15, 13), (8, 8, 3, 3), Windows((3, 3), padding=(2, 0), dilation=(2, 3)), 1),
    "grey": ((5, 1, 28, 28), (32, 1, 3, 3), Windows((3, 3)), 1),
    "groups": ((3, 16, 9, 9), (32, 8, 3, 3), Windows((3, 3), padding=(1, 1)), 2),
    "by channel": ((3, 8, 9, 9), (8, 1, 3, 3), Windows((3, 3), padding=(1, 1)), 8),
    "no sample": ((0, 8, 9, 9), (8, 8, 3, 3), Windows((3, 3), padding=(1, 1)), 1),
    "one place": ((2, 8, 3, 3), (8, 8, 3, 3), Windows((3, 3)), 1),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_and_its_gradients(name, dtype):
    shape, kernel, windows, groups = CONVOLUTIONS[name]
    k = here.kernels
    (x, x64), (w, w64), (b, b64) = draw(shape, dtype), draw(kernel, dtype), draw(kernel[0], dtype)
    for relu in (False, True):
        expected = plain.conv2d(x64, w64, b64, windows, groups, relu)
        out = k.conv2d(put(x), put(w), put(b), windows, groups, relu)
        assert out.dtype == x.dtype
        close(out, expected, dtype)
        g, g64 = draw(expected.shape, dtype)
        kept = host(out).astype(np.float64)  # the mask that backward sees
        gradients = plain.conv2d_backward(
            g64, x64, w64, kept if relu else None, windows, groups, (True, True, True)
        )
        arguments = put(x), put(w), out if relu else None, windows, groups
        found = k.conv2d_backward(put(g), *arguments, (True, True, True))
        for one, other in zip(found, gradients):
            close(one, other, dtype)
        wide = np.float64 if dtype == "float64" else np.float32
        for beta in (0.0, 1.0):
            start = np.nan if beta == 0.0 else 3.0
            into = put(np.full(kernel, start, wide)), put(np.full(kernel[:1], start, wide))
            pairs = tuple((a, beta) for a in into)
            results = k.conv2d_backward(put(g), *arguments, (False, True, True), pairs)
            assert results[0] is None
            for one, other, target in zip(results[1:], gradients[1:], into):
                if one is not target:
                    k.store(one, target, beta)
                close(target, other + 3 * beta, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_convolution_repeats_its_bits(dtype):
    shape, kernel, windows, groups = CONVOLUTIONS["usual"]
    k, (x, _), (w, _) = here.kernels, draw(shape, dtype), draw(kernel, dtype)
    first = k.conv2d(put(x), put(w), None, windows, groups, True)
    g, _ = draw(first.shape, dtype)
    gradients = [
        k.conv2d_backward(put(g), put(x), put(w), first, windows, groups, (True, True, False))
        for _ in range(3)
    ]
    assert np.array_equal(host(first), host(k.conv2d(turned(x), put(w), None, windows, groups, True)))
    for other in gradients[1:]:
        assert all(np.array_equal(host(a), host(b)) for a, b in zip(gradients[0][:2], other[:2]))


def test_nan_passes_through_bias_and_relu():
    shape, kernel, windows, groups = CONVOLUTIONS["usual"]
    (x, _), (w, _), (b, _) = draw(shape, "float32"), draw(kernel, "float32"), draw(kernel[0], "float32")
    x[1, 2, 3, 4] = np.nan
    assert np.isnan(host(here.kernels.conv2d(put(x), put(w), put(b), windows, groups, True))).any()
    rows = put(x)
    stats = here.kernels.channel_statistics(rows, 1e-5)
    out, _ = here.kernels.normalise_channels(rows, stats.mean, stats.rstd, None, None, rows, True)
    assert np.isnan(host(out)[:, 2]).all()
    pooled, _ = here.kernels.max_pool2d(rows, Windows((2, 2), (2, 2)), True)
    assert np.isnan(host(pooled)[1, 2]).any()


def test_tf32_where_it_is_allowed():
    shape, kernel, windows, groups = CONVOLUTIONS["usual"]
    (x, x64), (w, w64) = draw(shape, "float32"), draw(kernel, "float32")
    expected = plain.conv2d(x64, w64, None, windows, groups, False)
    with tf32():
        found = host(here.kernels.conv2d(put(x), put(w), None, windows, groups, False))
    assert np.abs(found - expected).max() <= 2e-3 * np.abs(expected).max()


def test_engines(monkeypatch, caplog):
    shape, kernel, windows, _ = CONVOLUTIONS["usual"]
    (x, x64), (w, w64) = draw(shape, "float32"), draw(kernel, "float32")
    expected = plain.conv2d(x64, w64, None, windows, 1, False)
    for engine in ("auto", "plain"):
        close(ops.conv2d(put(x), put(w), padding=1, engine=engine), expected, "float32")
    with pytest.raises(ValueError, match=r"engine: expected one of auto, cudnn, plain, got 'fast'"):
        ops.conv2d(put(x), put(w), engine="fast")
    with pytest.raises(ValueError, match="engine: expected"):
        ops.conv2d(put(x64), put(w64), engine="cudnn")
    if here.device.kind == "cpu":
        with pytest.raises(ValueError, match='engine: expected "auto" or "plain" on cpu, got "cudnn"'):
            ops.conv2d(x, w, engine="cudnn")
        return

    def missing(gpu):
        raise MissingDependencyError("pip install it")

    monkeypatch.setattr(cuda_images, "CudnnConvolution", missing)
    monkeypatch.setattr(here.kernels, "_cudnn", None)
    monkeypatch.setattr(here.kernels, "_without_cudnn", False)
    with caplog.at_level(logging.WARNING, "mpdp.kernels"):
        for _ in range(2):
            close(ops.conv2d(put(x), put(w), padding=1), expected, "float32")
    assert caplog.text.count("pip install it") == 1
    with pytest.raises(MissingDependencyError, match="pip install it"):
        ops.conv2d(put(x), put(w), engine="cudnn")


def test_timed_plans(monkeypatch):
    if here.device.kind == "cpu":
        assert here.kernels.plan_book.missing == 0  # a CPU has one way
        return
    shape, kernel, windows, _ = CONVOLUTIONS["usual"]
    (x, x64), (w, w64) = draw(shape, "bfloat16"), draw(kernel, "bfloat16")
    k, expected = here.kernels, plain.conv2d(x64, w64, None, windows, 1, False)
    k._convolutions(put(x), "cudnn").forget()
    monkeypatch.setattr(k.plan_book, "timed", True)
    k.plan_book.forget_missing()
    before = k.conv2d(put(x), put(w), None, windows, 1, False)
    assert k.plan_book.missing == 1 and k.plan_book.measure() == 1
    key, name = next(
        pair for pair in k.plan_book.plans().items() if "kind='forward', dtype='bfloat16'" in pair[0]
    )
    after = k.conv2d(put(x), put(w), None, windows, 1, False)
    assert k.plan_book.find(key) == name and k.plan_book.missing == 0
    for out in (before, after):
        close(out, expected, "bfloat16")


SHAPES = [
    (6, 8, 5, 7),
    (4, 64, 9, 9),
    (3, 5, 4, 3),
    (2, 272, 3, 3),
    (40, 24),
    (5, 3, 7),
    (1, 4, 1, 1),
    (0, 8, 2, 2),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", ["plain", "relu", "residual", "both"])
def test_batch_norm(shape, dtype, form):
    relu, beside = form in ("relu", "both"), form in ("residual", "both")
    inputs = {name: draw(s, dtype) for name, s in {"x": shape, "residual": shape, "g": shape}.items()}
    w64, b64 = random.standard_normal(shape[1]), random.standard_normal(shape[1])
    results = []
    for which in (1, 0):
        exact = which == 1
        kind = np.float64 if exact or dtype == "float64" else np.float32
        place = (lambda a: a) if exact else put
        x, residual = (Tensor(place(inputs[n][which]), requires_grad=True) for n in ("x", "residual"))
        w, b = (Tensor(place(a.astype(kind)), requires_grad=True) for a in (w64, b64))
        running = place(np.zeros(shape[1], kind)), place(np.ones(shape[1], kind))
        out = ops.batch_norm(x, w, b, residual if beside else None, relu=relu, running=running)
        if exact and relu:  # beside 0 a rounded value may be on the other side: no gradient comes in there
            for g in inputs["g"]:
                g[np.abs(host(out)) < 10 * TOLERANCE[dtype]] = 0
        out.backward(inputs["g"][which])
        results.append([out, x.grad, w.grad, b.grad, residual.grad if beside else out, *running])
    for one, other in zip(results[1], results[0]):
        close(one, host(other).astype(np.float64), dtype, 3.0)
    assert results[1][0].dtype == inputs["x"][0].dtype
    if here.device.kind == "cuda" and len(shape) == 4:
        assert is_channels_last(results[1][0].data)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_moments_of_many_rows_far_from_0(dtype):
    x, _ = draw((37, 16, 61, 9), dtype)
    x = (x.astype(np.float32) + 100).astype(x.dtype)
    x64 = x.astype(np.float64)
    moments = host(here.kernels.channel_moments(put(x)))
    again = host(here.kernels.channel_moments(turned(x)))
    if here.device.kind == "cuda":  # on the CPU the order of sums follows the memory
        assert np.array_equal(moments, again)
    assert moments[0] == 37 * 61 * 9
    np.testing.assert_allclose(moments[1:17], x64.mean((0, 2, 3)), rtol=2e-6)
    np.testing.assert_allclose(moments[17:], x64.var((0, 2, 3)) * moments[0], rtol=1e-4)


POOLINGS = {
    "usual": ((3, 8, 14, 14), Windows((2, 2), (2, 2))),
    "overlapping": ((3, 16, 13, 12), Windows((3, 3), (2, 2), (1, 1))),
    "odd": ((2, 5, 9, 11), Windows((3, 2), (1, 3), (1, 0))),
    "with gaps": ((2, 4, 9, 9), Windows((2, 2), (3, 3))),
    "large": ((2, 3, 20, 20), Windows((17, 16), (1, 1))),
    "no sample": ((0, 8, 6, 6), Windows((2, 2), (2, 2))),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", POOLINGS)
def test_pooling(name, dtype):
    shape, windows = POOLINGS[name]
    x, x64 = draw(shape, dtype)
    if x.size:
        x64 = np.round(x64)  # equal maxima, and zeros
        x = x64.astype(x.dtype)
    k = here.kernels
    for relu in (False, True):
        expected, saved64 = plain.max_pool2d(x64, windows, relu)
        out, saved = k.max_pool2d(put(x), windows, relu)
        assert np.array_equal(host(out).astype(np.float64), expected)
        g, g64 = draw(expected.shape, dtype)
        found = k.max_pool2d_backward(put(g), saved, windows, relu)
        close(found, plain.max_pool2d_backward(g64, saved64, windows, relu), dtype)
    out = k.avg_pool2d(put(x), windows)
    close(out, plain.avg_pool2d(x64, windows), dtype)
    g, g64 = draw(out.shape, dtype)
    close(
        k.avg_pool2d_backward(put(g), shape, windows), plain.avg_pool2d_backward(g64, shape, windows), dtype
    )
    out = k.global_avg_pool2d(put(x))
    close(out, x64.mean((2, 3)) if x.size else np.zeros(shape[:2]), dtype)
    g, g64 = draw(shape[:2], dtype)
    pixels = shape[2] * shape[3]
    expected = np.broadcast_to(g64[:, :, None, None] / pixels, shape)
    close(k.global_avg_pool2d_backward(put(g), shape), expected, dtype)


def test_what_follows_keeps_channels_last():
    x, _ = draw((3, 8, 6, 5), "float32")
    image = turned(x)
    k = here.kernels
    for out in (
        k.relu(image),
        k.relu_backward(image, image),
        k.add(image, image),
        k.max_pool2d(image, Windows((2, 2), (2, 2)), False)[0],
    ):
        if here.device.kind == "cuda":
            assert is_channels_last(out)
    total = xp.zeros((3, 6, 5, 8), np.float32).transpose(0, 3, 1, 2)
    k.store(image, total)
    k.store(image, total, 1.0)
    assert np.array_equal(host(total), 2 * x) and np.array_equal(host(k.add(image, image)), 2 * x)
    flat = Tensor(image, requires_grad=True).reshape(3, -1)
    assert np.array_equal(host(flat), x.reshape(3, -1))
