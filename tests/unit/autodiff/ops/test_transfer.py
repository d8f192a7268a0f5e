"""Tensors that move between devices, and gradients that come back."""

import numpy as np
import pytest
from on_device import here, host, put, xp

from mpdp.autodiff import Parameter, Tensor, check, ops
from mpdp.device import CPU

pytestmark = pytest.mark.usefixtures("device")


def test_a_tensor_that_is_there_is_itself():
    x = Tensor(xp.ones(3), name="x")
    assert x.to(here.device) is x and x.to(str(here.device)) is x


def test_values_go_there_and_back():
    x = Tensor(np.arange(6.0).reshape(2, 3))
    away = x.to(here.device)
    assert away.device == here.device and isinstance(away.data, xp.ndarray) and away.shape == (2, 3)
    home = away.to("cpu")
    assert home.device == CPU and type(home.data) is np.ndarray and np.array_equal(home.data, x.data)
    for empty in (np.zeros((0, 3)), np.zeros(()), np.zeros(2, bool)):
        assert Tensor(empty).to(here.device).shape == empty.shape


def test_gradients_come_back_to_where_the_leaf_is():
    w = Parameter(np.array([1.0, 2.0, 3.0]))
    for times in (1, 2):
        y = w.to(here.device) * put([2.0, 3.0, 4.0])
        (y.to("cpu") * w).sum().backward()
        assert w.grad.tolist() == [4 * times, 12 * times, 24 * times] and type(w.grad) is np.ndarray


def test_a_move_may_be_the_last_operation():
    w = Parameter(np.array([1.0, 2.0]))
    (w * 3).to(here.device).backward([1.0, 10.0])
    assert w.grad.tolist() == [3, 30]
    v = Parameter(put([1.0, 2.0]))
    (v * 3).to("cpu").backward([1.0, 10.0])
    assert host(v.grad).tolist() == [3, 30] and v.grad.dtype == np.float64


def test_the_checker_goes_along():
    check(lambda x: ops.to(ops.to(x, CPU) * 2, here.device), put([1.0, -2.0]))
