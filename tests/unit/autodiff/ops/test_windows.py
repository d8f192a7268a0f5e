"""Convolution and pooling against plain loops and central differences: strides, paddings, groups, 0 and 1 samples."""

import numpy as np
import pytest
from on_device import host, put

from mpdp.autodiff import Tensor, check, ops

pytestmark = pytest.mark.usefixtures("device")
random = np.random.default_rng(12)


def plain_conv2d(x, weight, bias, stride, padding, dilation, groups):
    """Every output pixel by itself, in float64."""
    x = np.pad(x.astype(float), ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    outputs, channels, tall, broad = weight.shape
    p = (x.shape[2] - dilation[0] * (tall - 1) - 1) // stride[0] + 1
    q = (x.shape[3] - dilation[1] * (broad - 1) - 1) // stride[1] + 1
    out = np.zeros((len(x), outputs, p, q))
    for o in range(outputs):
        first = o // (outputs // groups) * channels
        for row in range(p):
            for column in range(q):
                top, left = row * stride[0], column * stride[1]
                window = x[
                    :,
                    first : first + channels,
                    top : top + dilation[0] * (tall - 1) + 1 : dilation[0],
                    left : left + dilation[1] * (broad - 1) + 1 : dilation[1],
                ]
                out[:, o, row, column] = (window * weight[o]).sum(axis=(1, 2, 3)) + bias[o]
    return out


def plain_pool(x, size, stride, padding, reduce, fill):
    x = np.pad(x, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2), constant_values=fill)
    p, q = ((x.shape[2 + a] - size[a]) // stride[a] + 1 for a in (0, 1))
    out = np.zeros((*x.shape[:2], p, q))
    for row in range(p):
        for column in range(q):
            top, left = row * stride[0], column * stride[1]
            out[:, :, row, column] = reduce(x[:, :, top : top + size[0], left : left + size[1]], axis=(2, 3))
    return out


# height, width, window, stride, padding, dilation, groups
CONVOLUTIONS = {
    "plain": (5, 7, (3, 3), (1, 1), (0, 0), (1, 1), 1),
    "one window": (3, 3, (3, 3), (1, 1), (0, 0), (1, 1), 1),
    "one pixel": (1, 1, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "pointwise": (4, 5, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "pointwise, padded": (4, 5, (1, 1), (1, 1), (1, 1), (1, 1), 1),
    "pointwise, stride": (5, 4, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    "odd window": (6, 9, (3, 2), (1, 1), (1, 0), (1, 1), 1),
    "dilated": (9, 11, (3, 3), (1, 1), (2, 2), (2, 2), 1),
    "dilated down": (9, 6, (2, 3), (1, 1), (0, 1), (3, 1), 1),
    "stride": (7, 8, (3, 3), (2, 2), (1, 1), (1, 1), 1),
    "stride that leaves pixels": (8, 9, (2, 3), (3, 2), (0, 0), (1, 1), 1),
    "stem": (9, 9, (7, 7), (2, 2), (3, 3), (1, 1), 1),
    "groups": (5, 6, (3, 3), (1, 1), (1, 1), (1, 1), 2),
    "depthwise": (5, 6, (3, 3), (1, 1), (1, 1), (1, 1), 4),
    "wide window": (3, 8, (2, 7), (1, 1), (0, 0), (1, 1), 1),
}


def convolution(name, samples):
    height, width, size, stride, padding, dilation, groups = CONVOLUTIONS[name]
    x = random.standard_normal((samples, 4, height, width))
    weight = random.standard_normal((8, 4 // groups, *size))
    bias = random.standard_normal(8)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return x, weight, bias, options


@pytest.mark.parametrize("samples", [0, 1, 3])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_conv2d(name, samples):
    x, weight, bias, options = convolution(name, samples)
    expected = plain_conv2d(x, weight, bias, **options)
    found = host(ops.conv2d(put(x), put(weight), put(bias), **options))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    found = host(ops.conv2d(put(x), put(weight), put(bias), relu=True, **options))
    np.testing.assert_allclose(found, np.maximum(expected, 0), rtol=0, atol=1e-12)
    found = host(ops.conv2d(put(x), put(weight), **options))
    np.testing.assert_allclose(found, expected - bias.reshape(-1, 1, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("samples", [0, 1, 3])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_conv2d_gradients(name, samples):
    x, weight, bias, options = convolution(name, samples)
    for relu in (False, True):
        check(lambda *a, relu=relu: ops.conv2d(*a, relu=relu, **options), put(x), put(weight), put(bias))
    check(lambda x, w: ops.conv2d(x, w, **options), put(x), put(weight))
    check(lambda w: ops.conv2d(put(x), w, put(bias), **options), put(weight))
    check(lambda x: ops.conv2d(x, put(weight), **options), put(x))


def test_conv2d_of_arrays_that_are_no_block_of_memory():
    x, weight, bias, _ = convolution("plain", 3)
    expected = plain_conv2d(x, weight, bias, (1, 1), (0, 0), (1, 1), 1)
    turned = put(np.ascontiguousarray(x.transpose(0, 2, 3, 1))).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(host(ops.conv2d(turned, put(weight), put(bias))), expected, atol=1e-12)
    check(lambda x: ops.conv2d(x.transpose(0, 3, 1, 2), put(weight)), put(x.transpose(0, 2, 3, 1)))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 3e-6), ("float16", 1e-2)])
def test_conv2d_keeps_the_dtype(dtype, tolerance):
    for name in ("plain", "stride"):
        x, weight, bias, options = convolution(name, 3)
        exact = [Tensor(put(a.astype(dtype).astype(float)), requires_grad=True) for a in (x, weight, bias)]
        given = [Tensor(put(a.astype(dtype)), requires_grad=True) for a in (x, weight, bias)]
        outs = [ops.conv2d(*inputs, **options) for inputs in (exact, given)]
        assert outs[1].dtype == dtype
        for out in outs:
            out.backward(np.ones(out.shape))
        for one, other in [(*outs,), *[(e.grad, g.grad) for e, g in zip(exact, given)]]:
            one, other = host(one), host(other)
            assert other.dtype == dtype
            assert np.abs(one - other).max() <= tolerance * np.abs(one).max()


# size, stride, padding, height, width
POOLINGS = [
    (2, None, 0, 4, 6),
    (2, None, 0, 5, 7),
    (2, 1, 0, 3, 3),
    (3, 2, 1, 7, 6),
    ((2, 3), (1, 2), (1, 1), 4, 5),
    (3, 3, 0, 3, 3),
    (1, 2, 0, 3, 3),
]


def distinct(*shape):
    """Return numbers of both signs without ties."""
    return random.permutation(np.linspace(-1.0, 1.1, int(np.prod(shape)))).reshape(shape)


@pytest.mark.parametrize("samples", [0, 1, 3])
@pytest.mark.parametrize(("size", "stride", "padding", "height", "width"), POOLINGS)
def test_pooling(size, stride, padding, height, width, samples):
    x = distinct(samples, 2, height, width)
    sizes = [s if isinstance(s, tuple) else (s, s) for s in (size, stride or size, padding)]
    options = {"stride": stride, "padding": padding}
    found = host(ops.max_pool2d(put(x), size, **options))
    expected = plain_pool(x, *sizes, np.max, -np.inf)
    assert np.array_equal(found, expected)
    assert np.array_equal(host(ops.max_pool2d(put(x), size, relu=True, **options)), np.maximum(expected, 0))
    found = host(ops.avg_pool2d(put(x), size, **options))
    np.testing.assert_allclose(found, plain_pool(x, *sizes, np.mean, 0), rtol=0, atol=1e-14)
    for relu in (False, True):
        check(lambda x, relu=relu: ops.max_pool2d(x, size, relu=relu, **options), put(x))
    check(lambda x: ops.avg_pool2d(x, size, **options), put(x))
    np.testing.assert_allclose(host(ops.global_avg_pool2d(put(x))), x.mean((2, 3)), rtol=0, atol=1e-14)
    check(ops.global_avg_pool2d, put(x))


@pytest.mark.parametrize("stride", [1, 2])
def test_the_first_of_equal_maxima_takes_the_gradient(stride):
    x = Tensor(put(np.ones((1, 1, 2, 2))), requires_grad=True)
    ops.max_pool2d(x, 2, stride=stride).sum().backward()
    assert host(x.grad).tolist() == [[[[1, 0], [0, 0]]]]


BAD = {
    "weight": (
        lambda x, w: ops.conv2d(x, w[0]),
        r"conv2d: expected a weight of shape \(outputs, .*\(4, 3, 3\)",
    ),
    "channels": (
        lambda x, w: ops.conv2d(x[:, :3], w),
        r"conv2d: expected x of shape \(samples, 4, .*\(2, 3, 5, 5",
    ),
    "axes": (
        lambda x, w: ops.conv2d(x[0], w),
        r"conv2d: expected x of shape .*got \(4, 5, 5\); channels come",
    ),
    "bias": (
        lambda x, w: ops.conv2d(x, w, x[0, 0, 0]),
        r"conv2d: expected a bias of shape \(8,\), got \(5,\)",
    ),
    "groups": (
        lambda x, w: ops.conv2d(x, w, groups=3),
        r"conv2d: expected groups that divide the 8 outputs, got 3",
    ),
    "stride": (
        lambda x, w: ops.conv2d(x, w, stride=0),
        r"conv2d: stride: expected an integer of 1 or more, .*got 0",
    ),
    "padding": (
        lambda x, w: ops.conv2d(x, w, padding=(1, 2, 3)),
        r"conv2d: padding: expected .*got \(1, 2, 3\)",
    ),
    "small": (
        lambda x, w: ops.conv2d(x, w, dilation=3),
        r"conv2d: expected an image of at least one window \(3, 3\)",
    ),
    "pool": (
        lambda x, w: ops.max_pool2d(x, 6),
        r"max_pool2d: expected an image of at least .*got \(5, 5\) pixels",
    ),
    "pad": (
        lambda x, w: ops.avg_pool2d(x, 2, padding=2),
        r"avg_pool2d: expected a padding of at most half the",
    ),
    "rows": (
        lambda x, w: ops.max_pool2d(x[0], 2),
        r"max_pool2d: expected x of shape .*got \(4, 5, 5\); reshape",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call(put(np.zeros((2, 4, 5, 5))), put(np.zeros((8, 4, 3, 3))))
