"""Losses: mean, sum and count; empty shares; masked targets; bad targets."""

import numpy as np
import pytest
from on_device import found_later, here, host, put, xp

from mpdp import autodiff, nn
from mpdp.autodiff import Parameter, Tape, Tensor, no_grad, ops

pytestmark = pytest.mark.usefixtures("device")
random = np.random.default_rng(5)


def softmax_loss(logits, target):
    z = logits - logits.max(-1, keepdims=True)
    return np.log(np.exp(z).sum(-1)) - np.take_along_axis(z, target[..., None], -1)[..., 0]


def test_cross_entropy():
    logits, target = random.standard_normal((6, 4)), np.array([0, 3, 1, 1, 2, 0])
    loss = nn.cross_entropy(Tensor(put(logits), requires_grad=True), put(target))
    rows = softmax_loss(logits, target)
    assert isinstance(loss, nn.Loss) and isinstance(loss, Tensor)
    assert np.isclose(float(loss), rows.mean()) and np.isclose(float(loss.sum), rows.sum())
    assert loss.shape == loss.sum.shape == loss.count.shape == ()
    assert loss.count.dtype == np.float64 and loss.count == 6


@pytest.mark.parametrize("ignore_index", [-100, 0, 7])
def test_ignored_targets_do_not_count(ignore_index):
    logits = random.standard_normal((2, 3, 4))
    target = np.array([[1, ignore_index, 2], [ignore_index, 3, 3]])
    loss = nn.cross_entropy(put(logits), put(target), ignore_index=ignore_index)
    kept = target != ignore_index
    rows = softmax_loss(logits, np.where(kept, target, 0))
    assert loss.count == 4 and np.isclose(float(loss), rows[kept].mean())


def test_gradients_are_those_of_mean_or_sum():
    logits, target = put(random.standard_normal((5, 3))), put([0, 1, -100, 2, 2])
    x = Tensor(logits, requires_grad=True)
    nn.cross_entropy(x, target).backward()
    mean = x.grad
    x.grad = None
    Tape(nn.cross_entropy(x, target).sum).backward(0.25)
    assert np.allclose(host(x.grad), host(mean), rtol=0, atol=1e-15)
    autodiff.check(lambda x: nn.cross_entropy(x, target), logits)
    autodiff.check(nn.mse, logits, put(random.standard_normal((5, 3))))


def test_mse_counts_elements():
    a, b = random.standard_normal((3, 4)), random.standard_normal((3, 4))
    loss = nn.mse(put(a), put(b))
    assert loss.count == 12 and np.isclose(float(loss), ((a - b) ** 2).mean())
    scalar = nn.mse(Tensor(put(2.0)), put(0.0))
    assert float(scalar) == 4 and scalar.count == 1


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_an_empty_share_adds_nothing(dtype):
    w = Parameter(xp.ones((3, 4), dtype))
    x = xp.zeros((0, 4), dtype)
    for loss in (
        nn.cross_entropy(ops.linear(x, w), xp.zeros(0, np.int64)),
        nn.cross_entropy(ops.linear(xp.ones((2, 4), dtype), w), put([-100, -100])),
        nn.mse(ops.linear(x, w), xp.zeros((0, 3), dtype)),
    ):
        assert float(loss) == float(loss.sum) == loss.count == 0
        w.grad = None
        loss.backward()
        assert w.grad.dtype == dtype and not w.grad.any()


def test_the_mean_is_on_the_graph_even_if_first_read_without():
    w = Parameter(xp.ones((3, 4)))
    loss = nn.mse(ops.linear(xp.ones((2, 4)), w), xp.zeros((2, 3)))
    with no_grad():
        assert float(loss) == 16
    assert loss.requires_grad
    loss.backward()
    assert np.allclose(host(w.grad), 8 / 3)
    with no_grad():
        assert not nn.mse(w, xp.zeros((3, 4))).requires_grad
        assert not (nn.mse(w, xp.zeros((3, 4))) * 2).requires_grad


def test_a_loss_may_be_read_after_its_sum_was_differentiated():
    w = Parameter(xp.ones((3, 4)))
    loss = nn.mse(w, xp.zeros((3, 4)))
    loss.sum.backward()
    assert float(loss) == 1 and "Loss(1." in repr(loss)


def test_arithmetic_with_a_loss_gives_a_tensor():
    w = Parameter(xp.ones((3, 4), "f4"))
    loss = nn.mse(w, xp.zeros((3, 4), "f4"))
    total = loss + 0.5 * (w * w).sum()
    assert type(total) is Tensor and float(total) == 7 and total.dtype == np.float32
    total.backward()
    assert np.allclose(host(w.grad), 2 / 12 + 1)


def test_a_loss_of_ones_own():
    w = Parameter(put([1.0, 2.0]))
    loss = nn.Loss((w * w).sum(), 4)
    loss.backward()
    assert float(loss) == 1.25 and w.grad.tolist() == [0.5, 1] and loss.count.dtype == np.float64
    weighted = nn.Loss((w * w).sum(), put(0.5))
    assert float(weighted) == 10
    mask = Tensor(put([True, True]))
    assert (
        float(nn.Loss((w * w).sum(), mask.sum())) == 2.5 and nn.Loss(w.sum(), np.int64(2)).count.dtype == "f8"
    )
    with pytest.raises(ValueError, match=r"total: expected a scalar tensor, got shape \(2,\); sum it first"):
        nn.Loss(w * w, 2)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtypes(dtype):
    x = Tensor(put(random.standard_normal((3, 4)).astype(dtype)), requires_grad=True)
    for loss in (nn.cross_entropy(x, put(np.array([0, 1, 2], np.uint8))), nn.mse(x, xp.zeros((3, 4), dtype))):
        assert loss.dtype == loss.sum.dtype == ("float64" if dtype == "float64" else "float32")
        loss.backward()
        assert x.grad.dtype == dtype


def test_bad_targets():
    output = xp.zeros((400, 10), "f4")
    target = np.zeros(400, np.int64)
    target[371] = 12
    end = "$" if here.device.kind == "cpu" else r" \(found on cuda:0 in step 0\)$"
    message = r"^target: expected class indices in 0..9, got 12 at sample 371; check the labels or the model's outputs"
    with found_later(ValueError, match=message + end):
        nn.cross_entropy(output, put(target))
    with found_later(ValueError, match=r"target: expected class indices in 0..9, got -1 at sample 3; check"):
        nn.cross_entropy(output[:4], put([0, 0, 0, -1]))
    with pytest.raises(TypeError, match=r"target: expected integer class indices, got float32; convert them"):
        nn.cross_entropy(output[:2], xp.zeros(2, "f4"))
    with pytest.raises(TypeError, match=r"target: expected integer class indices, got bool"):
        nn.cross_entropy(output[:2], xp.zeros(2, bool))
    with pytest.raises(
        ValueError, match=r"target: expected shape \(2,\) for an output of shape .* got \(2, 1\); give"
    ):
        nn.cross_entropy(output[:2], xp.zeros((2, 1), np.int64))
    with pytest.raises(
        ValueError, match=r"target: expected shape \(2, 1\) of the output, got \(2,\); reshape one"
    ):
        nn.mse(xp.zeros((2, 1)), xp.zeros(2))
    with pytest.raises(
        TypeError, match=r"squared_error: expected floating inputs of one dtype, got float32, float64"
    ):
        nn.mse(xp.zeros(2, "f4"), xp.zeros(2))


def test_a_missing_target_is_named():
    output = xp.zeros((2, 3), "f4")
    for loss in (nn.cross_entropy, nn.mse):
        with pytest.raises(
            TypeError,
            match=rf"target: expected an array for {loss.__name__}, got None; give samples \(x, y\)",
        ):
            loss(output, None)
    with pytest.raises(TypeError, match=r"target: expected an array for cross_entropy, got None"):
        nn.check_class_indices(None, 3)


def test_check_class_indices():
    assert nn.check_class_indices(put([1, -100, 2]), 3) == 2
    assert nn.check_class_indices(Tensor(put([1, 2])), 3, None) == 2
