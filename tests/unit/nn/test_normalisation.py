"""Batch norm, group norm and RMS norm as layers: running statistics, modes, small and empty batches, errors."""

import numpy as np
import pytest
from on_device import here, host, put, xp

from mpdp import nn
from mpdp.autodiff import check, ops

pytestmark = pytest.mark.usefixtures("device")
random = np.random.default_rng(4)


def batch(*shape, dtype="float64"):
    return (random.standard_normal(shape) * 3 + 1).astype(dtype)


@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.BatchNorm1d, (6, 3)), (nn.BatchNorm1d, (6, 3, 4)), (nn.BatchNorm2d, (6, 3, 4, 2))]
)
def test_batch_norm_trains_on_the_batch_and_evaluates_on_what_ran(kind, shape):
    layer = kind(
        3, momentum=0.25, dtype="float64", weight_init=nn.init.uniform(1, 2), bias_init=nn.init.uniform()
    )
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert [name for name, _ in layer.named_buffers()] == ["running_mean", "running_var"]
    layer.to(here.device)
    weight, bias = (host(p).reshape((-1,) + (1,) * (len(shape) - 2)) for p in (layer.weight, layer.bias))
    axes = (0, *range(2, len(shape)))
    mean, variance = np.zeros(3), np.ones(3)
    for _ in range(3):
        x = batch(*shape)
        normal = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)
        np.testing.assert_allclose(host(layer(put(x))), normal * weight + bias, rtol=0, atol=1e-12)
        mean += 0.25 * (x.mean(axes) - mean)
        variance += 0.25 * (x.var(axes, ddof=1) - variance)
    np.testing.assert_allclose(host(layer.running_mean), mean, rtol=1e-12)
    np.testing.assert_allclose(host(layer.running_var), variance, rtol=1e-12)
    layer.eval()
    x = batch(*shape)
    column = (-1,) + (1,) * (len(shape) - 2)
    expected = (x - mean.reshape(column)) / np.sqrt(variance.reshape(column) + 1e-5) * weight + bias
    np.testing.assert_allclose(host(layer(put(x))), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(host(layer.running_mean), mean, rtol=1e-12)
    assert layer(put(x[:0])).shape == (0, *shape[1:])


def test_gradients_in_evaluation_flow_through_fixed_statistics():
    layer = nn.BatchNorm2d(2, dtype="float64").to(here.device)
    layer(put(batch(5, 2, 3, 3)))
    layer.eval()
    layer(put(batch(3, 2, 2, 2))).sum().backward()
    assert layer.weight.grad is not None and host(layer.bias.grad).tolist() == [12, 12]
    check(layer, put(batch(3, 2, 2, 2)))


def test_batches_without_a_mean_or_a_variance_leave_the_statistics_alone():
    layer = nn.BatchNorm1d(2, dtype="float64").to(here.device)
    out = layer(put(np.zeros((0, 2))))
    assert out.shape == (0, 2)
    out.sum().backward()
    assert host(layer.running_mean).tolist() == [0, 0] and host(layer.running_var).tolist() == [1, 1]
    assert host(layer(put(np.array([[3.0, 4.0]])))).tolist() == [[0, 0]]  # the bias
    assert host(layer.running_var).tolist() == [1, 1]
    np.testing.assert_allclose(host(layer.running_mean), [0.3, 0.4])
    layer(put(np.array([[np.nan, 1.0], [1.0, 3.0]])))  # the run ends; its checkpoint holds numbers
    assert np.isfinite(host(layer.running_mean)).all() and host(layer.running_var)[0] == 1


def test_options():
    plain = nn.BatchNorm2d(3, affine=False).to(here.device)
    assert (
        list(plain.named_parameters()) == []
        and plain(put(batch(2, 3, 2, 2, dtype="float32"))).dtype == "float32"
    )
    assert plain.eval()(put(batch(2, 3, 2, 2, dtype="float32"))).requires_grad is False
    assert nn.BatchNorm1d(3).communicates and nn.BatchNorm1d(3).global_stats
    local = nn.BatchNorm1d(3, global_stats=False)
    assert not local.communicates and local.averaged_buffers == ("running_mean", "running_var")
    assert nn.BatchNorm1d(3, dtype="float64").running_var.dtype == "float64"


def test_float16_is_normalised_in_float32():
    layer = nn.BatchNorm1d(2, dtype="float16").to(here.device)
    x = batch(5000, 2, dtype="float16") * np.float16(50)
    out = layer(put(x))
    assert out.dtype == "float16" and layer.running_mean.dtype == "float16"
    exact = (x - x.astype(float).mean(0)) / x.astype(float).std(0)
    assert np.abs(host(out) - exact).max() < 5e-3


def test_group_norm_and_rms_norm():
    x = put(batch(3, 6, 2, dtype="float32"))
    group = nn.GroupNorm(3, 6, weight_init=nn.init.constant(2.0)).to(here.device)
    assert np.allclose(host(group(x)), 2 * host(ops.group_norm(x, 3)), atol=1e-6)
    assert group(x[:0]).shape == (0, 6, 2)
    rms = nn.RMSNorm(2).to(here.device)
    assert [name for name, _ in rms.named_parameters()] == ["weight"]
    assert np.array_equal(host(rms(x)), host(ops.rms_norm(x)))


BAD = {
    "axes": (
        lambda: nn.BatchNorm2d(3)(xp.zeros((2, 3))),
        r"x: expected 4 axes \(samples, 3 channels, .*\(2, 3\)",
    ),
    "axes1": (lambda: nn.BatchNorm1d(3)(xp.zeros((2, 3, 1, 1))), r"x: expected 2 or 3 axes"),
    "channels": (
        lambda: nn.BatchNorm1d(3)(xp.zeros((2, 4))),
        r"x: expected .*3 channels.*got shape \(2, 4\)",
    ),
    "eps": (lambda: nn.BatchNorm1d(3, eps=0), r"eps: expected a number above 0, got 0"),
    "momentum": (lambda: nn.BatchNorm1d(3, momentum=2), r"momentum: expected a number in 0\.\.1, got 2"),
    "groups": (lambda: nn.GroupNorm(4, 6), r"groups: expected a divisor of 6 channels, got 4"),
    "width": (lambda: nn.RMSNorm(3)(xp.zeros((2, 4), "f4")), r"rms_norm: expected x of shape .*got \(2, 4\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()
