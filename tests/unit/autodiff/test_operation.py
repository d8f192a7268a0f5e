"""Calling an operation: what it takes, what it refuses, and operations of one's own."""

from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
from on_device import found_later, here, put, xp

from mpdp import autodiff, kernels
from mpdp.autodiff import WANTED, Operation, Target, Tensor, check, deliver, ops
from mpdp.device import CPU, Device
from mpdp.errors import DeviceMismatchError
from mpdp.nn import accuracy, cross_entropy

pytestmark = pytest.mark.usefixtures("device")


def tensor(values):
    return Tensor(put(values), requires_grad=True)


def test_a_registered_operation_is_differentiated_and_checked():
    def forward(k, x, y, *, power):
        return x**power * y, (x, y)

    def backward(k, saved, g, wants, *, power):
        x, y = saved
        left = None if wants[0] is None else g * power * x ** (power - 1) * y
        right = None if wants[1] is None else g * x**power
        return left, right

    scale = autodiff.register("scale", forward, backward)
    assert isinstance(scale, Operation) and repr(scale) == "Operation('scale')"
    assert check(lambda x, y: scale(x, y, power=3), put([1.0, 2.0]), put([3.0, 4.0])) < 1e-6
    x = tensor([1.0, 2.0])
    scale(x, put([1.0, 1.0]), power=2).backward([1.0, 1.0])
    assert x.grad.tolist() == [2, 4]


def test_a_registered_operation_may_write_into_its_target():
    seen = []

    def backward(k, saved, g, wants):
        (want,) = wants
        if want is WANTED:
            return (g * 2,)
        seen.append((want.array.shape, want.beta))
        if want.beta == 0.0:
            want.array[...] = 0
        want.array += g * 2
        return (want,)

    double = autodiff.register("double", lambda k, x: (x * 2, None), backward)
    assert check(double, put([1.0, -3.0])) < 1e-6
    assert seen == [((2,), 0.0), ((2,), 1.0)]


def test_register_refuses_what_is_no_operation():
    with pytest.raises(TypeError, match=r"name: expected a string of one character or more, got 3; name the"):
        autodiff.register(3, len, len)
    with pytest.raises(TypeError, match=r"name: expected a string of one character or more, got ''"):
        autodiff.register("", len, len)
    with pytest.raises(TypeError, match=r"backward: expected a function, got int; see the docs of register"):
        autodiff.register("a", len, 3)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda g: (g,), r"bad: expected its backward rule to return 2 gradients .* got 1; return None"),
        (
            lambda g: (g[0], g),
            r"bad: expected .* float64 \(2,\) for input 0, got float64 \(\); sum over broadcast",
        ),
        (lambda g: (g, g.astype("f4")), r"bad: expected .* float64 \(2,\) for input 1, got float32 \(2,\)"),
        (lambda g: (g, 1.0), r"bad: expected .* float64 \(2,\) for input 1, got float; sum over"),
        (lambda g: (g, WANTED), r"bad: expected .* for input 1, got _Wanted"),
    ],
)
@pytest.mark.parametrize("leaf", [True, False])
def test_a_wrong_backward_rule_is_named(returned, message, leaf):
    bad = autodiff.register("bad", lambda k, x, y: (x + y, None), lambda k, saved, g, wants: returned(g))
    x, y = tensor([1.0, 2.0]), tensor([1.0, 2.0])
    out = bad(x, y) if leaf else bad(x * 1, y * 1)
    with pytest.raises(ValueError, match=message):
        out.backward(np.ones(2))


@pytest.mark.parametrize("leaf", [True, False])
def test_no_gradient_where_one_is_wanted_is_zero(leaf):
    stop = autodiff.register("stop", lambda k, x: (x, None), lambda k, saved, g, wants: (None,))
    x = tensor([1.0, 2.0])
    out = stop(x) if leaf else stop(x * 3)
    out.backward(np.ones(2))
    assert x.grad.tolist() == [0, 0]
    (x * 1 + stop(x)).sum().backward()
    assert x.grad.tolist() == [1, 1]


@pytest.mark.parametrize("leaf", [True, False])
def test_a_gradient_may_come_as_a_scalar(leaf):
    def backward(k, saved, g, wants):
        x, s = saved
        return g * s, (g * x).sum()  # the second is numpy.float32, not an array

    scaled = autodiff.register("scaled", lambda k, x, s: (x * s, (x, s)), backward)
    s = tensor(np.array(2.0, "f4"))
    for _ in range(2):
        t = s if leaf else s * 1
        (
            scaled(xp.ones(3, "f4"), t) + scaled(xp.ones(3, "f4"), t) + scaled(xp.ones(3, "f4"), t)
        ).sum().backward()
    assert type(s.grad) is xp.ndarray and s.grad.shape == () and s.grad.dtype == np.float32 and s.grad == 18


def test_dtypes_must_be_equal():
    x, y = Tensor(xp.zeros(2, "f4")), Tensor(xp.zeros(2, "f8"))
    with pytest.raises(
        TypeError, match=r"add: expected floating inputs of one dtype, got float32, float64; .*\.astype"
    ):
        x + y
    with pytest.raises(
        TypeError, match=r"linear: expected floating inputs of one dtype, got float16, float32"
    ):
        ops.linear(xp.zeros((1, 2), "f2"), xp.zeros((3, 2), "f4"))
    assert (x + y.astype("float32")).dtype == "float32"


@pytest.mark.parametrize("dtype", ["uint8", "int64", "bool", "complex64"])
def test_what_writes_results_in_the_dtype_of_its_input_wants_floats(dtype):
    rows, images, weight = xp.ones((2, 4), dtype), xp.ones((2, 3, 5, 5), dtype), xp.ones((3, 4), "f4")
    one, filters = xp.ones(4, "f4"), xp.ones((4, 3, 3, 3), "f4")
    for call in (
        lambda: ops.linear(rows, weight),
        lambda: ops.conv2d(images, filters),
        lambda: ops.avg_pool2d(images, 2),
        lambda: ops.global_avg_pool2d(images),
        lambda: ops.layer_norm(rows, one, one),
        lambda: ops.rms_norm(rows, one),
        lambda: ops.softmax(rows),
        lambda: ops.log_softmax(rows),
        lambda: ops.gelu(rows),
        lambda: ops.sigmoid(rows),
        lambda: ops.cross_entropy(rows, xp.zeros(2, "i8")),
        lambda: ops.squared_error(rows, xp.ones((2, 4), "f4")),
    ):
        with pytest.raises(TypeError, match=rf"expected floating inputs, got {dtype}; convert it with"):
            call()
    with pytest.raises(TypeError, match=rf"linear: expected floating inputs, got {dtype}"):
        ops.linear(rows, Tensor(weight, requires_grad=True))


def test_scalars_are_weak():
    x = Tensor(xp.ones(2, "f4"))
    for scalar in (2, 2.0, True, np.float64(2), np.int64(2), np.float16(2)):
        assert (x * scalar).dtype == (scalar * x).dtype == np.float32
    with pytest.raises(
        TypeError, match="multiply: expected floating inputs of one dtype, got float32, float64"
    ):
        x * put(2.0)


def test_arrays_on_either_side():
    x = tensor(np.ones(2))
    for out in (xp.arange(2.0) * x, x * xp.arange(2.0), xp.eye(2) @ x, np.float64(2) * x, xp.arange(2) - x):
        assert isinstance(out, Tensor) and out.requires_grad and out.dtype == np.float64


def test_other_things_are_refused():
    x = Tensor(xp.ones(2))
    with pytest.raises(
        TypeError, match=r"add: expected tensors, arrays or numbers, got list; wrap it with Tensor"
    ):
        x + [1, 2]
    with pytest.raises(TypeError, match=r"add: expected at least one tensor or array, got none; use Tensor"):
        ops.add(1, 2)


class Elsewhere:
    """Looks like an array of another GPU: there need not be one to test what is refused."""

    class device:
        id = 7

    def __init__(self, *shape, dtype="f8"):
        self.shape, self.ndim, self.dtype = shape, len(shape), np.dtype(dtype)


def index():
    return Elsewhere(3, dtype="i8")


MISMATCHES = {
    "add": lambda x: x + Elsewhere(3, 3),
    "subtract": lambda x: Elsewhere(3, 3) - x,
    "multiply": lambda x: x * Elsewhere(3, 3),
    "divide": lambda x: ops.divide(x, Elsewhere(3, 3)),
    "power": lambda x: ops.power(x, Elsewhere(3, 3)),
    "maximum": lambda x: ops.maximum(x, Elsewhere(3, 3)),
    "minimum": lambda x: ops.minimum(x, Elsewhere(3, 3)),
    "where": lambda x: ops.where(Elsewhere(3, 3, dtype="?"), x, x),
    "matmul": lambda x: x @ Elsewhere(3, 3),
    "linear": lambda x: ops.linear(x, x, Elsewhere(3)),
    "layer_norm": lambda x: ops.layer_norm(x, x[0], Elsewhere(3)),
    "embedding": lambda x: ops.embedding(x, index()),
    "getitem": lambda x: x[index()],
    "concatenate": lambda x: ops.concatenate([x, Elsewhere(3, 3)]),
    "dropout": lambda x: ops.dropout(x, Elsewhere(3, 3, dtype="?"), 0.5),
    "cross_entropy": lambda x: ops.cross_entropy(x, index()),
    "squared_error": lambda x: ops.squared_error(x, Elsewhere(3, 3)),
    "grad": lambda x: setattr(x, "grad", Elsewhere(3, 3)),
    "accuracy": lambda x: accuracy(x, index()),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_devices_must_be_equal(name):
    x = Tensor(xp.ones((3, 3)))
    devices = f"({here.device}, )+cuda:7|cuda:7(, {here.device})+"
    with pytest.raises(
        DeviceMismatchError, match=f"^{name}: expected operands on one device, got ({devices}); move"
    ):
        MISMATCHES[name](x)


def test_rules_run_with_the_arrays_device_as_the_current_one(monkeypatch):
    """Arrays that a rule makes land on the device of its operands, also where another GPU is current."""
    seen = []

    class Away(type(kernels.for_device(CPU))):
        device, current = Device("cuda", 7), False

        def is_current(self):
            return self.current

        @contextmanager
        def active(self):
            self.current = True
            yield
            self.current = False

    def forward(k, x):
        seen.append(k.is_current())
        return np.ones(2), None

    def backward(k, saved, g, wants):
        seen.append(k.is_current())
        return (g * 3,)

    monkeypatch.setattr(kernels, "_cuda", cache(lambda ordinal, holder: Away()))
    x = Tensor(Elsewhere(2))
    x._requires_grad = True
    autodiff.register("away", forward, backward)(x).backward([1.0, 1.0])
    assert seen == [True, True] and not kernels.for_device(Device("cuda", 7)).current
    assert x.grad.tolist() == [3, 3]


def test_losses_of_nn_check_devices_too():
    with pytest.raises(
        DeviceMismatchError, match=r"cross_entropy: expected operands on one device, got .*cuda:7"
    ):
        cross_entropy(Tensor(xp.ones((3, 3))), index())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda a: ops.linear(a, xp.ones((3, 4))),
            r"linear: expected x of shape .* got \(2, 3\) and \(3, 4\)",
        ),
        (
            lambda a: ops.linear(a, xp.ones(3)),
            r"linear: expected x of shape .* got \(2, 3\) and \(3,\); the w",
        ),
        (
            lambda a: ops.linear(a, xp.ones((4, 3)), xp.ones(3)),
            r"linear: expected a bias of shape \(4,\), got \(3,\); one number an output",
        ),
        (lambda a: a @ a, r"matmul: expected .* got \(2, 3\) and \(2, 3\); multiply scalars with \*"),
        (lambda a: ops.matmul(a, put(1.0)), r"matmul: expected .* got \(2, 3\) and \(\)"),
        (lambda a: a.sum(2), r"axis: expected distinct integers in -2..1 for 2 axes, got 2; count axes"),
        (lambda a: a.mean((0, -2)), r"axis: expected distinct integers in -2..1 for 2 axes, got \(0, -2\)"),
        (lambda a: a.transpose(0), r"transpose: expected each of the axes 0..1 once, got \(0,\); list all"),
        (lambda a: ops.concatenate([]), r"concatenate: expected one tensor or more, got none"),
        (
            lambda a: ops.stack([a, a], axis=7),
            r"axis: expected an integer in -3..2, got 7; count axes from 0",
        ),
        (lambda a: ops.stack([]), r"stack: expected one tensor or more, got none"),
        (lambda a: ops.concatenate([a], 2), r"axis: expected an integer in -2..1, got 2"),
        (lambda a: ops.layer_norm(a), r"layer_norm: expected a weight or a shape, got neither"),
        (
            lambda a: ops.layer_norm(a, xp.ones(2)),
            r"layer_norm: expected x to end in axes \(2,\), got \(2, 3\)",
        ),
        (
            lambda a: ops.dropout(a, xp.ones((2, 3), bool), 1.0),
            r"p: expected a probability in \[0, 1\), got 1.0",
        ),
        (
            lambda a: ops.embedding(a, put([0, 2])),
            r"embedding: expected indices in 0..1, got 2 at sample 1; check the tokens",
        ),
        (lambda a: ops.embedding(a, put([[0], [-1]])), r"got -1 at sample 1, position \(0,\)"),
    ],
)
def test_shapes_and_indices_are_checked(call, message):
    with found_later(ValueError, match=message):
        call(Tensor(xp.ones((2, 3))))


def test_an_index_must_be_of_integers():
    with pytest.raises(TypeError, match=r"index: expected an array of integers, got float64; convert it"):
        ops.embedding(xp.ones((2, 3)), xp.ones(2))
    with pytest.raises(TypeError, match=r"index: expected an array of integers, got list"):
        ops.embedding(np.ones((2, 3)), [0])


def test_reshape_of_an_empty_share_infers_from_a_sample():
    x = Tensor(xp.ones((0, 4, 6)))
    assert x.reshape(0, -1).shape == (0, 24)
    assert x.reshape(len(x), 3, -1).shape == (0, 3, 8)
    assert x.reshape(-1, 24).shape == (0, 24)


def test_deliver():
    kernel = Tensor  # never called
    assert deliver(None, kernel) is None
    target = Target(np.zeros(2), 1.0)
    seen = []
    assert deliver(target, lambda *arguments: seen.append(arguments), 5) is target
    assert seen[0][0] == 5 and seen[0][1] is target.array and seen[0][2] == 1.0
    assert repr(WANTED) == "WANTED"


def test_a_float64_first_operand_is_compared_like_any_other():
    with pytest.raises(TypeError, match="expected floating inputs of one dtype"):
        ops.add(np.ones(3), np.ones(3, dtype="float32"))
    with pytest.raises(TypeError, match="expected floating inputs of one dtype"):
        ops.linear(np.ones((3, 2)), np.ones((2, 2), dtype="float32"))
