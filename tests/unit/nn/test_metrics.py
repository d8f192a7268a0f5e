"""Metrics are sums and counts."""

import functools

import numpy as np
import pytest
from on_device import found_later, put, xp

from mpdp import nn
from mpdp.autodiff import Tensor
from mpdp.nn import metrics

pytestmark = pytest.mark.usefixtures("device")
OUTPUT = np.array([[0.1, 0.9], [0.8, 0.2], [0.5, 0.5], [0.3, 0.7]])


@pytest.mark.parametrize("wrap", [put, lambda values: Tensor(put(values))], ids=["array", "tensor"])
def test_accuracy(wrap):
    right, counted = nn.accuracy(wrap(OUTPUT), wrap([1, 1, 0, -100]))
    assert (float(right), float(counted)) == (2, 3)
    assert right.dtype == counted.dtype == np.float64 and right.shape == counted.shape == ()


def test_accuracy_of_more_axes_and_none():
    assert [float(v) for v in nn.accuracy(put(OUTPUT.reshape(2, 2, 2)), put([[1, 0], [0, 1]]))] == [4, 4]
    assert [float(v) for v in nn.accuracy(put(OUTPUT[:0]), xp.zeros(0, np.int64))] == [0, 0]
    assert [float(v) for v in nn.accuracy(put(OUTPUT), put([0, 0, 0, 1]), ignore_index=0)] == [1, 1]
    assert nn.accuracy.__name__ == "accuracy"


def test_bad_targets():
    with found_later(ValueError, match=r"target: expected class indices in 0..1, got 2 at sample 3; check"):
        nn.accuracy(put(OUTPUT), put([0, 0, 0, 2]))
    with pytest.raises(ValueError, match=r"target: expected shape \(4,\) for an output of shape \(4, 2\)"):
        nn.accuracy(put(OUTPUT), xp.zeros((4, 2), np.int64))
    with pytest.raises(TypeError, match=r"target: expected integer class indices, got float64"):
        nn.accuracy(put(OUTPUT), xp.zeros(4))


def test_top_k_counts_ties_as_accuracy_does():
    random = np.random.default_rng(0)
    output = random.integers(0, 4, (50, 6)).astype("float32")  # many equal ones
    target = random.integers(0, 6, 50)
    target[3] = -100
    order = np.argsort(-output, axis=1, kind="stable")
    for k in (1, 2, 5, 6, 9):
        right = sum(t in row[:k] for t, row in zip(target.tolist(), order.tolist()) if t != -100)
        assert [float(v) for v in nn.top_k(k)(put(output), put(target))] == [right, 49]
    assert nn.top_k(3).__name__ == "top_3"
    one = [float(v) for v in nn.top_k(1)(put(output), put(target))]
    assert one == [float(v) for v in nn.accuracy(put(output), put(target))]


def test_top_k_of_sequences_masks_nan_and_none():
    output = np.zeros((2, 3, 4), "float32")
    output[..., 2] = 1
    target = np.array([[2, 0, 3], [-1, 2, 1]])
    assert [float(v) for v in nn.top_k(2, ignore_index=-1)(put(output), put(target))] == [3, 5]
    output[0, 0, 2] = np.nan
    assert float(nn.top_k(4, ignore_index=-1)(put(output), put(target))[0]) == 4
    assert [float(v) for v in nn.top_k(2)(put(output[:0, 0]), xp.zeros(0, np.int64))] == [0, 0]
    with pytest.raises(ValueError, match=r"k: expected an integer of 1 or more, got 0"):
        nn.top_k(0)


def test_mean_is_over_values():
    def squared(output, target):
        return (output - target) ** 2

    metric = nn.mean(squared)
    total, count = metric(Tensor(put(OUTPUT)), put(np.zeros((4, 2))))
    assert metric.__name__ == "squared" and count == 8
    assert float(total) == pytest.approx((OUTPUT**2).sum(), rel=1e-15)
    assert nn.mean(squared, name="mse").__name__ == "mse"
    total, _ = nn.mean(lambda output, target: output)(put(np.full(3, 60000, "float16")), None)
    assert float(total) == 180000 and total.dtype == np.float64


def test_perplexity_is_finished_after_the_sums():
    logits = np.array([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    target = np.array([0, 2, -100])
    losses = [-np.log(np.exp(2) / (np.exp(2) + 2)), -np.log(1 / (np.exp(1) + 2))]
    pairs = [nn.perplexity(put(logits[i : i + 1]), put(target[i : i + 1])) for i in range(3)]
    total, count = (sum(float(pair[i]) for pair in pairs) for i in range(2))
    assert count == 2
    assert metrics.finished(nn.perplexity, total, count) == pytest.approx(np.exp(sum(losses) / 2), rel=1e-12)
    assert metrics.finished(nn.perplexity, 1e9, 1.0) == float("inf")


def test_finishing():
    class Root:
        def __call__(self, output, target):
            return 4.0, 1

        def finish(self, mean):
            return mean**0.5

    class Bad(Root):
        def finish(self, mean):
            return "much"

    assert metrics.finished(Root(), 8.0, 2) == 2.0
    assert metrics.finished(functools.partial(nn.perplexity, ignore_index=0), 0.0, 1) == 1.0
    assert np.isnan(metrics.finished(Bad(), 0.0, 0))
    with pytest.raises(TypeError, match=r"metrics: expected a number from Bad.finish, got str"):
        metrics.finished(Bad(), 1.0, 1)
    assert metrics.metric_name(functools.partial(nn.accuracy, ignore_index=0)) == "accuracy"


def test_gather_says_what_is_collected():
    metric = nn.Gather(lambda a: float(np.median(a)), rows=lambda o, t: o[:, 0], name="middle")
    assert metric.__name__ == "middle" and len(metric.rows(Tensor(put(OUTPUT)), None)) == 1
    assert metric(put(OUTPUT), None) == pytest.approx(0.4)
