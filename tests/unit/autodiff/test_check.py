"""The gradient checker finds what it should."""

import numpy as np
import pytest

from mpdp import autodiff
from mpdp.autodiff import Tensor, check, ops


def rule(backward):
    return autodiff.register("cube", lambda k, x: (x**3, x), backward)


def test_a_right_rule_passes():
    assert check(rule(lambda k, x, g, wants: (3 * g * x**2,)), np.array([1.0, 2.0])) < 1e-8
    assert check(ops.exp, 1.0) < 1e-8
    assert check(lambda x: Tensor(np.ones(2)), np.array([1.0])) == 0  # constant, and no gradient


@pytest.mark.parametrize(
    "backward",
    [
        lambda k, x, g, wants: (2 * g * x**2,),
        lambda k, x, g, wants: (3 * x**2,),  # forgets the incoming gradient
        lambda k, x, g, wants: (g * np.nan,),
        lambda k, x, g, wants: (None,),
    ],
)
def test_a_wrong_rule_is_found(backward):
    message = (
        r"check: expected a derivative of \S+ along a random direction of input 0 \(central difference, eps"
    )
    with pytest.raises(AssertionError, match=message):
        check(rule(backward), np.array([1.0, 2.0]))


def test_a_rule_that_forgets_to_add_is_found():
    def backward(k, x, g, wants):
        want = wants[0]
        if want is autodiff.WANTED:
            return (3 * g * x**2,)
        want.array[...] = 3 * g * x**2  # whatever beta says
        return (want,)

    with pytest.raises(AssertionError, match=r"from backward \(added\); relative difference \S+ > 1e-06"):
        check(rule(backward), np.array([1.0, 2.0]))


def test_the_input_is_named_and_others_pass_through():
    def wrong(x, index, y):
        out = ops.embedding(x, index) * y
        return out + (y * 2).detach() - (y * 2).detach() + (y - y.detach())

    with pytest.raises(AssertionError, match="of input 2"):
        check(wrong, np.ones((3, 2)), np.array([0, 2]), np.ones((2, 2)))


def test_float32_is_taken_as_float64():
    seen = []
    check(lambda x: seen.append(x.dtype) or x * 2, np.ones(2, "f4"))
    assert set(seen) == {np.dtype("f8")}


def test_a_function_that_returns_no_tensor_is_refused():
    with pytest.raises(
        TypeError, match=r"check: expected the function to return a Tensor, got float; use op"
    ):
        check(lambda x: float(x.sum()), np.ones(2))
