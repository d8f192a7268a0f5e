"""Calling an operation: what it takes, what it refuses, and operations of one's own."""

import numpy as np
import pytest

from mpdp import autodiff
from mpdp.autodiff import WANTED, Operation, Target, Tensor, check, deliver, ops


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
    assert check(lambda x, y: scale(x, y, power=3), np.array([1.0, 2.0]), np.array([3.0, 4.0])) < 1e-6
    x = Tensor([1.0, 2.0], requires_grad=True)
    scale(x, np.array([1.0, 1.0]), power=2).backward([1.0, 1.0])
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
    assert check(double, np.array([1.0, -3.0])) < 1e-6
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
    x, y = Tensor([1.0, 2.0], requires_grad=True), Tensor([1.0, 2.0], requires_grad=True)
    out = bad(x, y) if leaf else bad(x * 1, y * 1)
    with pytest.raises(ValueError, match=message):
        out.backward(np.ones(2))


@pytest.mark.parametrize("leaf", [True, False])
def test_no_gradient_where_one_is_wanted_is_zero(leaf):
    stop = autodiff.register("stop", lambda k, x: (x, None), lambda k, saved, g, wants: (None,))
    x = Tensor([1.0, 2.0], requires_grad=True)
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
    s = Tensor(np.array(2.0, "f4"), requires_grad=True)
    for _ in range(2):
        t = s if leaf else s * 1
        (
            scaled(np.ones(3, "f4"), t) + scaled(np.ones(3, "f4"), t) + scaled(np.ones(3, "f4"), t)
        ).sum().backward()
    assert type(s.grad) is np.ndarray and s.grad.shape == () and s.grad.dtype == np.float32 and s.grad == 18


def test_dtypes_must_be_equal():
    x, y = Tensor(np.zeros(2, "f4")), Tensor(np.zeros(2, "f8"))
    with pytest.raises(
        TypeError, match=r"add: expected floating inputs of one dtype, got float32, float64; .*\.astype"
    ):
        x + y
    with pytest.raises(
        TypeError, match=r"linear: expected floating inputs of one dtype, got float16, float32"
    ):
        ops.linear(np.zeros((1, 2), "f2"), np.zeros((3, 2), "f4"))
    assert (x + y.astype("float32")).dtype == "float32"


def test_scalars_are_weak():
    x = Tensor(np.ones(2, "f4"))
    for scalar in (2, 2.0, True, np.float64(2), np.int64(2), np.float16(2)):
        assert (x * scalar).dtype == (scalar * x).dtype == np.float32
    with pytest.raises(
        TypeError, match="multiply: expected floating inputs of one dtype, got float32, float64"
    ):
        x * np.array(2.0)


def test_arrays_on_either_side():
    x = Tensor(np.ones(2), requires_grad=True)
    for out in (np.arange(2.0) * x, x * np.arange(2.0), np.eye(2) @ x, np.float64(2) * x, np.arange(2) - x):
        assert isinstance(out, Tensor) and out.requires_grad and out.dtype == np.float64


def test_other_things_are_refused():
    x = Tensor(np.ones(2))
    with pytest.raises(
        TypeError, match=r"add: expected tensors, arrays or numbers, got list; wrap it with Tensor"
    ):
        x + [1, 2]
    with pytest.raises(TypeError, match=r"add: expected at least one tensor or array, got none; use Tensor"):
        ops.add(1, 2)


def test_devices_must_be_equal():
    class Elsewhere:
        dtype, shape, ndim = np.dtype("f8"), (2,), 1

        class device:
            id = 1

    from mpdp.errors import DeviceMismatchError

    with pytest.raises(DeviceMismatchError, match=r"add: expected operands on one device, got cpu, cuda:1"):
        ops.add(np.ones(2), Elsewhere())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda a: ops.linear(a, np.ones((3, 4))),
            r"linear: expected x of shape .* got \(2, 3\) and \(3, 4\)",
        ),
        (
            lambda a: ops.linear(a, np.ones(3)),
            r"linear: expected x of shape .* got \(2, 3\) and \(3,\); the w",
        ),
        (
            lambda a: ops.linear(a, np.ones((4, 3)), np.ones(3)),
            r"linear: expected a bias of shape \(4,\), got \(3,\); one number an output",
        ),
        (lambda a: a @ a, r"matmul: expected .* got \(2, 3\) and \(2, 3\); multiply scalars with \*"),
        (lambda a: ops.matmul(a, np.array(1.0)), r"matmul: expected .* got \(2, 3\) and \(\)"),
        (lambda a: a.sum(2), r"axis: expected distinct integers in -2..1 for 2 axes, got 2; count axes"),
        (lambda a: a.mean((0, -2)), r"axis: expected distinct integers in -2..1 for 2 axes, got \(0, -2\)"),
        (lambda a: a.transpose(0), r"transpose: expected each of the axes 0..1 once, got \(0,\); list all"),
        (lambda a: ops.concatenate([]), r"concatenate: expected one tensor or more, got none"),
        (lambda a: ops.stack([]), r"stack: expected one tensor or more, got none"),
        (lambda a: ops.concatenate([a], 2), r"axis: expected an integer in -2..1, got 2"),
        (lambda a: ops.layer_norm(a), r"layer_norm: expected a weight or a shape, got neither"),
        (
            lambda a: ops.layer_norm(a, np.ones(2)),
            r"layer_norm: expected x to end in axes \(2,\), got \(2, 3\)",
        ),
        (
            lambda a: ops.dropout(a, np.ones((2, 3), bool), 1.0),
            r"p: expected a probability in \[0, 1\), got 1.0",
        ),
        (
            lambda a: ops.embedding(a, np.array([0, 2])),
            r"embedding: expected indices in 0..1, got 2 at sample 1; check the tokens",
        ),
        (lambda a: ops.embedding(a, np.array([[0], [-1]])), r"got -1 at sample 1, position \(0,\)"),
    ],
)
def test_shapes_and_indices_are_checked(call, message):
    with pytest.raises(ValueError, match=message):
        call(Tensor(np.ones((2, 3))))


def test_an_index_must_be_of_integers():
    with pytest.raises(TypeError, match=r"index: expected an array of integers, got float64; convert it"):
        ops.embedding(np.ones((2, 3)), np.ones(2))
    with pytest.raises(TypeError, match=r"index: expected an array of integers, got list"):
        ops.embedding(np.ones((2, 3)), [0])


def test_reshape_of_an_empty_share_infers_from_a_sample():
    x = Tensor(np.ones((0, 4, 6)))
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
