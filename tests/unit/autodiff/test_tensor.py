"""What a tensor holds, how it leaves the graph, and copies."""

import copy
import pickle

import numpy as np
import pytest

from mpdp.autodiff import Buffer, Parameter, Tensor
from mpdp.device import CPU
from mpdp.errors import DeviceError, MissingDependencyError, TapeError


def test_attributes():
    x = Tensor(np.arange(6.0).reshape(2, 3), name="x")
    assert (x.shape, x.dtype, x.ndim, x.size, x.device, x.name) == ((2, 3), np.float64, 2, 6, CPU, "x")
    assert not x.requires_grad and x.grad is None and len(x) == 2
    assert repr(x).startswith("Tensor([[0., 1., 2.]") and "name='x'" in repr(x)
    assert "requires_grad=True" in repr(Parameter(np.ones(2, "f4")))


def test_an_array_is_not_copied():
    array = np.zeros(3)
    assert Tensor(array).data is array and Tensor(array).numpy() is array
    assert Tensor(Tensor(array)).data is array


def test_what_data_may_be():
    assert (
        Tensor([1, 2]).dtype == np.int64 and Tensor(2.5).shape == () and Tensor(np.float32(1)).dtype == "f4"
    )
    with pytest.raises(TypeError, match=r"data: expected an array or numbers, got Tape; build an array"):
        from mpdp.autodiff import Tape

        Tensor(Tape(Tensor(1.0)))


def test_only_floats_may_require_a_gradient():
    with pytest.raises(TypeError, match=r"requires_grad: expected a floating dtype, got int64; use .astype"):
        Tensor([1, 2], requires_grad=True)
    with pytest.raises(
        ValueError, match=r"requires_grad: expected a leaf, got the result of an operation; .detach"
    ):
        (Parameter([1.0]) * 2).requires_grad = False


def test_comparison_is_identity():
    a, b = Tensor([1.0]), Tensor([1.0])
    assert a == a and a != b and len({a, b, a}) == 2
    with pytest.raises(
        TypeError, match=r"tensor: expected an array or a number where a truth value is needed"
    ):
        bool(a)


def test_leaving_the_graph():
    x = Parameter([[3.0]])
    y = x * 2
    assert float(y) == y.item() == 6 and int(y) == 6
    assert not y.detach().requires_grad and y.detach().data is y.data
    assert y.to("cpu") is y
    with pytest.raises((DeviceError, MissingDependencyError), match="device cuda:99: expected"):
        y.to("cuda:99")


def test_iteration():
    x = Parameter([[1.0, 2.0], [3.0, 4.0]])
    first, second = x
    assert second.data.tolist() == [3, 4] and first.requires_grad
    with pytest.raises(TypeError, match=r"tensor: expected one axis or more to iterate, got a scalar"):
        iter(Tensor(1.0))


def test_backward_needs_a_seed_and_something_to_differentiate():
    x = Parameter([1.0, 2.0])
    with pytest.raises(
        ValueError, match=r"backward: expected a seed for a tensor that is no scalar, got none .*\(2,\)"
    ):
        (x * 2).backward()
    with pytest.raises(
        ValueError, match=r"backward: expected a tensor computed from one that requires a gradient"
    ):
        Tensor(1.0).backward()
    with pytest.raises(
        ValueError, match=r"seed: expected a number or an array of the tensor's shape \(2,\), got .*\(3,\)"
    ):
        (x * 2).backward(np.ones(3))
    (x * 2).backward(2)
    assert x.grad.tolist() == [4, 4]


def test_gradients_accumulate_until_they_are_dropped():
    x = Parameter([1.0, 2.0])
    for _ in range(2):
        (x * x).sum().backward()
    assert x.grad.tolist() == [4, 8]
    x.grad = None
    (x * x).sum().backward()
    assert x.grad.tolist() == [2, 4]


def test_gradients_of_two_leaves_never_share_memory():
    x, y = Parameter([1.0, 2.0]), Parameter([3.0, 4.0])
    (x + y).backward(np.ones(2))
    assert not np.shares_memory(x.grad, y.grad)
    seed = np.ones(2)
    x.grad = y.grad = None
    (x + y).backward(seed)
    assert not np.shares_memory(x.grad, seed)


def test_a_gradient_may_be_its_own_seed():
    x = Parameter([1.0, 2.0])
    x.grad = np.array([1.0, 1.0])
    (x * 3).backward(x.grad)
    assert x.grad.tolist() == [4, 4]


def test_assigning_data_and_grad():
    x = Parameter(np.zeros(2, "f4"), name="w")
    array = np.ones((3, 3))
    x.data = array
    assert x.data is array
    x.grad = np.ones((3, 3), "f4")
    with pytest.raises(ValueError, match=r"grad: expected shape \(3, 3\) of 'w', got \(2,\); reshape it"):
        x.grad = np.zeros(2)
    with pytest.raises(
        TypeError, match=r"grad: expected float64 of 'w' or a dtype .* got complex128; convert"
    ):
        x.grad = np.zeros((3, 3), complex)


def test_a_leaf_as_its_own_loss():
    x = Parameter(3.0)
    x.backward()
    x.backward(2.0)
    assert x.grad == 3 and x.grad.shape == ()


def test_copies_are_free_of_graph_and_gradient():
    w = Parameter([1.0, 2.0], name="w")
    (w * w).sum().backward()
    frozen = Parameter([1.0])
    frozen.requires_grad = False
    twins = copy.deepcopy({"a": w, "b": w, "frozen": frozen, "buffer": Buffer([1, 2])})
    assert twins["a"] is twins["b"] is not w
    assert type(twins["a"]) is Parameter and twins["a"].name == "w" and twins["a"].grad is None
    assert not np.shares_memory(twins["a"].data, w.data) and np.array_equal(twins["a"].data, w.data)
    assert not twins["frozen"].requires_grad and type(twins["buffer"]) is Buffer
    again = pickle.loads(pickle.dumps(w))
    assert type(again) is Parameter and again.requires_grad and again.data.tolist() == [1, 2]
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(
            ValueError, match=r"copy: expected a leaf, got the result of an operation; copy .detach"
        ):
            make(w * 2)


def test_a_consumed_graph_is_refused():
    x = Parameter([1.0])
    y = x * 2
    z = y.sum()
    z.backward()
    message = (
        r"tape: expected a graph that no backward has run through yet, got one that is consumed; run the fo"
    )
    with pytest.raises(TapeError, match=message):
        z.backward()
    with pytest.raises(TapeError, match=message):
        (y * 3).sum().backward()
    assert float(z) == 2  # the value stays
