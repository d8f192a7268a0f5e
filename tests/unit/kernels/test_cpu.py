"""The CPU kernels' own promises: out and beta, sums of 16-bit floats, label checks."""

import numpy as np
import pytest

from mpdp import kernels
from mpdp.device import CPU
from mpdp.kernels.base import Kernels
from mpdp.kernels.cpu import KERNELS as k

random = np.random.default_rng(3)


def test_kernels_of_the_cpu():
    assert kernels.of(np.zeros(1)) is k is kernels.for_device(CPU)
    assert k.xp is np and k.device_kind == "cpu"


def test_every_method_of_the_interface_is_implemented():
    defaults = {"device", "is_current", "active", "begin_step", "pending_error"}
    defaults |= {"linear_backward"}  # made of others
    names = [name for name in vars(Kernels) if not name.startswith("_") and name not in defaults]
    assert len(names) > 25
    assert [name for name in names if getattr(type(k), name) is getattr(Kernels, name)] == []


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(3, 4, 5), (0, 4, 5), (3, 0, 5), (700, 8, 300), (3, 8, 200_000)])
def test_gemm_writes_into_out(shape, beta):
    n, i, o = shape
    a, b = random.standard_normal((n, i)), random.standard_normal((i, o))
    before = random.standard_normal((n, o)) if beta else np.full((n, o), np.nan)
    out = before.copy()
    assert k.gemm(a, b, out, beta) is out
    assert np.allclose(out, a @ b + (before if beta else 0.0), rtol=0, atol=1e-12)


def test_gemm_into_a_wider_out_and_from_broadcast_views():
    a = np.broadcast_to(np.float32(2), (3, 4))
    out = np.ones((3, 3))
    k.gemm(a, np.ones((4, 3), np.float32), out, 1.0)
    assert np.array_equal(out, np.full((3, 3), 9.0))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("beta", [None, 0.0, 1.0])
@pytest.mark.parametrize(
    ("shape", "target"),
    [
        ((5, 4), (4,)),
        ((2, 5, 4), (4,)),
        ((5, 4), (5, 4)),
        ((5, 4), (5, 1)),
        ((5, 4), (1, 4)),
        ((5, 4), ()),
        ((0, 4), (4,)),
        ((0, 4), ()),
        ((5, 0), (0,)),
        ((2, 5, 4), (5, 1)),
        ((1, 1), (1,)),
        ((), ()),
    ],
)
def test_sum_to_undoes_broadcasting(shape, target, beta, dtype):
    x = random.integers(-8, 8, shape).astype(dtype)
    ones = np.ones(target)
    expected = np.einsum(x, list(range(len(shape))), ones, _axes(shape, target), _kept(shape, target))
    expected = expected.reshape(target)
    if beta is None:
        found = k.sum_to(x, target)
    else:
        out = np.full(target, 3.0 if beta else np.nan, dtype)
        found = k.sum_to(x, target, out, beta)
        assert found is out
        expected = expected + 3.0 * beta
    assert found.dtype == dtype and found.shape == target and np.array_equal(found, expected)


def _axes(shape, target):
    """Name the axes of a target for einsum; those of length 1 get names of their own."""
    lead = len(shape) - len(target)
    return [i + lead if n == shape[i + lead] else 20 + i for i, n in enumerate(target)]


def _kept(shape, target):
    lead = len(shape) - len(target)
    return [i + lead for i, n in enumerate(target) if n == shape[i + lead]]


def test_sum_of_16_bits_and_of_integers():
    assert k.sum(np.ones(5000, "float16")) == 5000
    assert k.sum(np.ones(300, bool)) == 300
    assert k.sum(np.full(300, 200, np.uint8)) == 60_000
    assert k.mean(np.array([1, 2], np.int32)) == 1.5
    assert k.mean(np.full(5000, 40_000, "float16")) == 40_000
    assert k.mean(np.zeros((0, 3)), 0).tolist() == [0, 0, 0]


def test_store_casts_between_floats_only():
    out = np.ones(2, np.float32)
    assert k.store(np.array([1.0, 2.0]), out, 1.0) is out and out.tolist() == [2, 3]
    with pytest.raises(TypeError, match="Cannot cast"):
        k.store(np.ones(2), np.ones(2, np.int64))


def test_sigmoid_and_gelu_of_large_numbers():
    for dtype in ("float16", "float32", "float64"):
        x = np.array([-60_000, -50, -1, 0, 1, 50, 60_000], dtype)
        out = k.sigmoid(x)
        assert out.dtype == dtype and out[0] == 0 and out[-1] == 1 and out[3] == 0.5
        value, saved = k.gelu(x)
        grad = k.gelu_backward(np.ones_like(x), saved)
        assert np.isfinite(value).all() and np.isfinite(grad).all() and grad[-1] == 1 and grad[0] == 0
    assert np.allclose(k.sigmoid(np.array([-30.0])) / np.exp(-30.0), 1, rtol=1e-12)


def test_softmax_of_large_numbers():
    x = np.array([[1000.0, 0.0], [-1000.0, -1000.0]])
    assert k.softmax(x, 1).tolist() == [[1, 0], [0.5, 0.5]]
    assert np.allclose(k.log_softmax(x, 1), [[0, -1000], [-np.log(2)] * 2])


def test_layer_norm_takes_its_statistics_in_two_passes():
    x = (1e4 + random.standard_normal((2, 1000))).astype("float32")
    out, _ = k.layer_norm(x, None, None, 0.0)
    exact = (x - x.mean(1, keepdims=True, dtype="float64")) / x.std(1, keepdims=True, dtype="float64")
    assert np.abs(out - exact).max() < 2e-3
    half = np.full((1, 4), 300, "float16") + np.arange(4, dtype="float16")
    assert np.allclose(k.layer_norm(half, None, None, 0.0)[0].mean(), 0, atol=1e-3)


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "uint64"])
def test_labels_are_checked_and_counted(dtype):
    labels = np.array([0, 9, 3], dtype)
    count = k.check_class_indices(labels, 10, -100)
    assert count.shape == () and count.dtype == np.float64 and count == 3
    assert k.check_class_indices(labels, 10, 3) == 2
    assert k.check_class_indices(labels, 10, None) == 3
    assert k.check_class_indices(labels[:0], 10, None) == 0
    with pytest.raises(ValueError, match=r"target: expected class indices in 0..8, got 9 at sample 1; check"):
        k.check_class_indices(labels, 9, -100)
    assert k.check_class_indices(labels, 9, 9) == 2


def test_bad_labels_name_sample_and_position():
    labels = np.array([[0, -100], [1, -1]])
    with pytest.raises(ValueError, match=r"in 0..4, got -1 at sample 1, position \(1,\); check the labels"):
        k.check_class_indices(labels, 5, -100)
    with pytest.raises(ValueError, match=r"in 0..4, got -100 at sample 0, position \(1,\)"):
        k.check_class_indices(labels, 5, None)
    with pytest.raises(ValueError, match=r"in 0..-1, got 0 at sample 0"):
        k.check_class_indices(np.array(0), 0, None)


@pytest.mark.parametrize("beta", [None, 0.0, 1.0])
def test_embedding_gradient_writes_every_row(beta):
    index = random.integers(0, 6, (3, 50))
    g = random.standard_normal((3, 50, 4))
    expected = np.zeros((8, 4))
    np.add.at(expected, index, g)
    if beta is None:
        found = k.embedding_backward(g, index, 8)
    else:
        found = np.full((8, 4), 2.0 if beta else np.nan)
        k.embedding_backward(g, index, 8, found, beta)
        expected += 2.0 * beta
    assert np.allclose(found, expected, rtol=0, atol=1e-12)


def test_embedding_gradient_of_16_bits_is_summed_in_32():
    g = np.ones((5000, 1), "float16")
    assert k.embedding_backward(g, np.zeros(5000, np.int64), 2).tolist() == [[5000], [0]]


def test_keep_mask_is_the_public_one():
    from mpdp.kernels import random as generator

    mask = k.keep_mask(generator.dropout_key(1, "a"), 2, 3, 4, 5, generator.keep_threshold(0.4))
    assert np.array_equal(mask, generator.dropout_mask(1, "a", 2, 3, (4, 5), 0.4))
