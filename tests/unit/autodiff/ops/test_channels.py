"""Batch norm, group norm and RMS norm against plain formulas and central differences."""

import numpy as np
import pytest
from on_device import here, host, put

from mpdp.autodiff import Tensor, check, ops

pytestmark = pytest.mark.usefixtures("device")
random = np.random.default_rng(13)
SHAPES = [
    (5, 3),
    (1, 3),
    (0, 3),
    (4, 3, 2),
    (2, 3, 4, 5),
    (1, 3, 2, 2),
    (0, 3, 2, 2),
    (3, 1, 2, 2),
    (2, 3, 0, 2),
]


def array(*shape):
    return random.standard_normal(shape) * 2 + 1


def plain_batch_norm(x, weight, bias, eps=1e-5):
    axes = (0, *range(2, x.ndim))
    column = (-1,) + (1,) * (x.ndim - 2)
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * weight.reshape(column) + bias.reshape(column)


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm(shape):
    x, weight, bias = array(*shape), array(shape[1]), array(shape[1])
    if x.size:
        found = host(ops.batch_norm(put(x), put(weight), put(bias)))
        np.testing.assert_allclose(found, plain_batch_norm(x, weight, bias), rtol=0, atol=1e-12)
    # Of one value a channel the gradient is 0, and eps makes the difference.
    check(lambda *a: ops.batch_norm(*a, eps=0.1), put(x), put(weight), put(bias))
    check(lambda x: ops.batch_norm(x, eps=0.1), put(x))
    check(lambda x, b: ops.batch_norm(x, None, b, eps=0.1), put(x), put(bias))
    check(lambda w: ops.batch_norm(put(x), w, eps=0.1), put(weight))


@pytest.mark.parametrize("shape", SHAPES)
def test_residual_and_relu_in_one_pass(shape):
    x, residual, weight, bias = array(*shape), array(*shape), array(shape[1]), array(shape[1])
    mean, rstd = array(shape[1]), np.linspace(0.5, 2, shape[1])
    arrays = put(x), put(weight), put(bias), put(residual)

    def scaled(x, w, b, residual=None, relu=True):
        return ops.scale_channels(x, put(mean), put(rstd), w, b, residual, relu=relu)

    for one, parts in (
        (
            lambda *a: ops.batch_norm(*a, eps=0.1, relu=True),
            lambda x, w, b, r: ops.relu(ops.batch_norm(x, w, b, eps=0.1) + r),
        ),
        (scaled, lambda x, w, b, r: ops.relu(scaled(x, w, b, relu=False) + r)),
    ):
        np.testing.assert_allclose(host(one(*arrays)), host(parts(*arrays)), rtol=0, atol=1e-12)
        check(one, *arrays)
        check(one, *arrays[:3])
        check(lambda x, r, one=one: one(x, put(weight), None, r), arrays[0], arrays[3])
        check(lambda r, one=one: one(put(x), put(weight), put(bias), r), arrays[3])
    check(lambda *a: ops.batch_norm(*a, eps=0.1), *arrays)
    for used in (2, 3):  # two parts of a gradient reach the operation as they are, more are added before
        for relu in (False, True):

            def several(*inputs, used=used, relu=relu):
                out = ops.batch_norm(*inputs, eps=0.1, relu=relu)
                return ops.concatenate([out * (i + 1.5) for i in range(used)], axis=1)

            check(several, *arrays)
            check(several, *arrays[:3])
    check(lambda x, r: ops.batch_norm(x, None, None, r, eps=0.1), arrays[0], arrays[3])


def test_batch_norm_of_numbers_far_from_0():
    x = random.standard_normal((64, 2, 5)).astype("float32") + np.float32(3000)
    found = host(ops.batch_norm(put(x)))
    exact = plain_batch_norm(x.astype(float), np.ones(2), np.zeros(2))
    assert found.dtype == np.float32 and np.abs(found - exact).max() < 1e-3
    moments = host(here.kernels.channel_moments(put(x)))
    assert moments[0] == 320
    np.testing.assert_allclose(moments[1:3], x.astype(float).mean((0, 2)), rtol=1e-9)
    np.testing.assert_allclose(moments[3:], x.astype(float).var((0, 2)) * 320, rtol=1e-5)


class Recorded:
    """Peers of parts that were all known beforehand: what the other parts would gather and add."""

    def __init__(self, parts, gradients, me):
        self.parts, self.gradients, self.me = parts, gradients, me

    def gather(self, numbers, what):
        assert what == "here forward"
        rows = [host(here.kernels.channel_moments(put(part))) for part in self.parts]
        np.testing.assert_array_equal(host(numbers), rows[self.me])
        return put(np.stack(rows))

    def add(self, numbers, what):
        assert what == "here backward"
        whole = np.concatenate(self.parts)
        normal = plain_batch_norm(whole, np.ones(3), np.zeros(3))
        g = np.concatenate(self.gradients)
        return put(np.concatenate([g.sum((0, 2)), (g * normal).sum((0, 2))]))


@pytest.mark.parametrize("lengths", [(2, 3), (0, 5), (5, 0, 0), (1, 4, 2), (1, 1)])
def test_parts_of_a_batch_give_what_the_whole_gives(lengths):
    parts = [array(n, 3, 2) for n in lengths]
    gradients = [array(n, 3, 2) for n in lengths]
    weight, bias = array(3), array(3)
    whole = [Tensor(put(a), requires_grad=True) for a in (np.concatenate(parts), weight, bias)]
    out = ops.batch_norm(*whole)
    out.backward(np.concatenate(gradients))
    seen, expected = [], [put(np.zeros(3)), put(np.zeros(3))]
    ops.batch_norm(whole[0], running=tuple(expected), momentum=1.0)
    outs, gx, gw, gb = [], [], 0, 0
    for i, part in enumerate(parts):
        own = [Tensor(put(a), requires_grad=True) for a in (part, weight, bias)]
        running = put(np.zeros(3)), put(np.zeros(3))
        result = ops.batch_norm(
            *own, peers=Recorded(parts, gradients, i), what="here", running=running, momentum=1.0
        )
        seen.append([host(a) for a in running])
        result.backward(gradients[i])
        outs.append(host(result))
        gx.append(host(own[0].grad))
        gw, gb = gw + host(own[1].grad), gb + host(own[2].grad)
    close = {"rtol": 0, "atol": 1e-12}
    np.testing.assert_allclose(np.concatenate(outs), host(out), **close)
    np.testing.assert_allclose(np.concatenate(gx), host(whole[0].grad), **close)
    np.testing.assert_allclose(gw, host(whole[1].grad), **close)
    np.testing.assert_allclose(gb, host(whole[2].grad), **close)
    for numbers in seen:
        for one, other in zip(numbers, expected):
            np.testing.assert_allclose(one, host(other), rtol=1e-13, atol=1e-13)
        assert all(
            np.array_equal(a, b) for a, b in zip(numbers, seen[0])
        )  # every part merges to the same bits


@pytest.mark.parametrize("shape", [(2, 6), (1, 6, 3), (3, 6, 2, 2), (0, 6, 2)])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_group_norm(shape, groups):
    x, weight, bias = array(*shape), array(6), array(6)
    rows = x.reshape(shape[0], groups, 6 // groups * int(np.prod(shape[2:])))
    normal = (rows - rows.mean(2, keepdims=True)) / np.sqrt(rows.var(2, keepdims=True) + 1e-5)
    column = (-1,) + (1,) * (len(shape) - 2)
    expected = normal.reshape(shape) * weight.reshape(column) + bias.reshape(column)
    found = host(ops.group_norm(put(x), groups, put(weight), put(bias)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    check(lambda x, w, b: ops.group_norm(x, groups, w, b, eps=0.1), put(x), put(weight), put(bias))
    check(lambda x: ops.group_norm(x, groups, eps=0.1), put(x))


@pytest.mark.parametrize("shape", [(2, 6), (1, 6, 3), (3, 6, 2, 2), (0, 6, 2)])
def test_scale_channels(shape):
    x, weight, bias, mean = array(*shape), array(6), array(6), array(6)
    rstd = np.linspace(0.5, 2, 6)
    column = (-1,) + (1,) * (len(shape) - 2)
    w, b, m, r = (a.reshape(column) for a in (weight, bias, mean, rstd))
    found = host(ops.scale_channels(put(x), put(mean), put(rstd), put(weight), put(bias)))
    np.testing.assert_allclose(found, (x - m) * r * w + b, rtol=0, atol=1e-12)
    check(lambda x, w, b: ops.scale_channels(x, put(mean), put(rstd), w, b), put(x), put(weight), put(bias))
    check(lambda x: ops.scale_channels(x, put(mean), put(rstd)), put(x))


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (4,), (0, 4), (3, 1), (3, 0)])
def test_rms_norm(shape):
    x, weight = array(*shape), array(shape[-1])
    if shape[-1]:
        expected = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight
        np.testing.assert_allclose(host(ops.rms_norm(put(x), put(weight))), expected, rtol=0, atol=1e-12)
    check(lambda x, w: ops.rms_norm(x, w, eps=0.1), put(x), put(weight))
    check(lambda x: ops.rms_norm(x, eps=0.1), put(x))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes_are_kept(dtype):
    given = array(40, 6, 3)
    calls = {
        "batch": lambda x, w: ops.batch_norm(x, w, w),
        "group": lambda x, w: ops.group_norm(x, 2, w, w),
        "rms": lambda x, w: ops.rms_norm(x.transpose(0, 2, 1), w),
    }
    for call in calls.values():
        results = []
        for kind in (dtype, "float64"):
            x = Tensor(put(given.astype(dtype).astype(kind)), requires_grad=True)
            w = Tensor(put(np.linspace(0.5, 2, 6).astype(dtype).astype(kind)), requires_grad=True)
            out = call(x, w)
            out.backward(np.linspace(-1, 1, out.size).reshape(out.shape))
            results.append([host(a) for a in (out, x.grad, w.grad)])
        for one, other in zip(*results):
            assert one.dtype == dtype
            assert (
                np.abs(one - other).max() <= {"float16": 2e-2, "float32": 1e-5}[dtype] * np.abs(other).max()
            )


def test_float16_squares_do_not_overflow():
    x = put(np.full((2, 3), 300, "float16"))
    assert np.allclose(host(ops.rms_norm(x)), 1, atol=1e-3)


BAD = {
    "batch axes": (lambda x: ops.batch_norm(x[0]), r"batch_norm: expected x of shape \(samples, channels"),
    "batch weight": (
        lambda x: ops.batch_norm(x, x[0, :2]),
        r"batch_norm: expected a weight of shape \(4,\), got \(2,",
    ),
    "batch residual": (
        lambda x: ops.batch_norm(x, residual=x[:1]),
        r"batch_norm: expected a residual of x's shape \(2, 4\), got \(1, 4\)",
    ),
    "groups": (
        lambda x: ops.group_norm(x, 3),
        r"group_norm: expected groups that divide the 4 channels, got 3",
    ),
    "rms": (
        lambda x: ops.rms_norm(x, x[0, :2]),
        r"rms_norm: expected x of shape \(\.\.\., D\) and a weight \(D,\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call(put(np.ones((2, 4))))
