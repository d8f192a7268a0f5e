"""Arithmetic with broadcasting: each gradient is summed over the axes along which its input was repeated.

An integer or boolean array beside a float takes the float's dtype, as a Python number does (NumPy itself
would widen float32 with int64 to float64).
"""

from __future__ import annotations

from typing import Any

from ...kernels.precision import is_floating, is_half
from ..operation import Operation
from ..wants import deliver


def _match(a: Any, b: Any) -> tuple[Any, Any]:
    """Return both operands with integers and booleans as the other's floating dtype."""
    da, db = getattr(a, "dtype", None), getattr(b, "dtype", None)
    if da is None or db is None or da == db:
        return a, b
    if is_floating(da):
        return a, b.astype(da)
    if is_floating(db):
        return a.astype(db), b
    return a, b


def _kept(out: Any, a: Any, b: Any) -> Any:
    """Return a result in its operands' 16 bits, where the array module widened them.

    Older ml_dtypes do so beside a Python number, and CuPy where a function has no bfloat16 of its own.
    """
    dtype = a.dtype if hasattr(a, "dtype") else b.dtype
    return out.astype(dtype) if is_half(dtype) and out.dtype != dtype else out


def _shape(a: Any) -> tuple[int, ...] | None:
    return getattr(a, "shape", None)


def _add(k, a, b):
    a, b = _match(a, b)
    shape = _shape(a)
    if shape is not None and shape == _shape(b) and a.dtype == b.dtype:
        return k.add(a, b), (shape, shape)
    return _kept(k.xp.add(a, b), a, b), (shape, _shape(b))


def _add_backward(k, saved, g, wants):
    return tuple(deliver(want, k.sum_to, g, shape) for want, shape in zip(wants, saved))


def _subtract(k, a, b):
    a, b = _match(a, b)
    return _kept(k.xp.subtract(a, b), a, b), (_shape(a), _shape(b))


def _subtract_backward(k, saved, g, wants):
    left = deliver(wants[0], k.sum_to, g, saved[0])
    right = None if wants[1] is None else k.xp.negative(k.sum_to(g, saved[1]))
    return left, right


def _multiply(k, a, b):
    a, b = _match(a, b)
    return _kept(k.xp.multiply(a, b), a, b), (a, b)


def _multiply_backward(k, saved, g, wants):
    a, b = saved
    left = None if wants[0] is None else deliver(wants[0], k.sum_to, g * b, a.shape)
    right = None if wants[1] is None else deliver(wants[1], k.sum_to, g * a, b.shape)
    return left, right


def _divide(k, a, b):
    a, b = _match(a, b)
    out = _kept(k.xp.true_divide(a, b), a, b)
    return out, (_shape(a), b, out)


def _divide_backward(k, saved, g, wants):
    shape, b, out = saved
    g = g / b
    left = deliver(wants[0], k.sum_to, g, shape)
    right = None if wants[1] is None else k.xp.negative(k.sum_to(g * out, b.shape))
    return left, right


def _negative(k, a):
    return k.xp.negative(a), None


def _negative_backward(k, saved, g, wants):
    return (k.xp.negative(g),)


def _power(k, a, b):
    a, b = _match(a, b)
    out = _kept(a**b, a, b)
    return out, (a, b, out)


def _power_backward(k, saved, g, wants):
    a, b, out = saved
    left = right = None
    if wants[0] is not None:
        if hasattr(b, "dtype"):
            # Where the exponent is 0 the slope is 0, also at a = 0, where a**-1 is infinite.
            slope = b * k.xp.where(b == 0, 1, a) ** k.xp.where(b == 0, 1, b - 1)
        elif b == 0:
            slope = k.xp.zeros_like(a)
        else:
            slope = a * 2 if b == 2 else b * a ** (b - 1)
        left = deliver(wants[0], k.sum_to, g * slope, a.shape)
    if wants[1] is not None:
        base = a if hasattr(a, "dtype") else k.xp.full_like(b, a)
        # d/db a^b = a^b log a, which tends to 0 where a is 0 and b positive.
        log = k.xp.log(k.xp.where(out == 0, 1, base))
        right = deliver(wants[1], k.sum_to, g * out * log, b.shape)
    return left, right


def _absolute(k, a):
    return k.xp.abs(a), a


def _absolute_backward(k, a, g, wants):
    return (g * k.xp.sign(a),)


def _choose(xp_name: str):
    """Return forward and backward of maximum or minimum; equal operands share the gradient."""

    def forward(k, a, b):
        a, b = _match(a, b)
        return _kept(getattr(k.xp, xp_name)(a, b), a, b), (a, b)

    def backward(k, saved, g, wants):
        a, b = saved
        half = (a == b) * g.dtype.type(0.5)
        first = (a > b) if xp_name == "maximum" else (a < b)
        share = half + first
        left = None if wants[0] is None else deliver(wants[0], k.sum_to, g * share, a.shape)
        right = None if wants[1] is None else deliver(wants[1], k.sum_to, g * (1 - share), b.shape)
        return left, right

    return forward, backward


def _where(k, condition, a, b):
    a, b = _match(a, b)
    out = _kept(k.xp.where(condition, a, b), a, b)
    return out, (condition, _shape(a), _shape(b))


def _where_backward(k, saved, g, wants):
    condition, left, right = saved
    zero = g.dtype.type(0)
    return (
        None,
        None if wants[1] is None else deliver(wants[1], k.sum_to, k.xp.where(condition, g, zero), left),
        None if wants[2] is None else deliver(wants[2], k.sum_to, k.xp.where(condition, zero, g), right),
    )


add = Operation("add", _add, _add_backward)
subtract = Operation("subtract", _subtract, _subtract_backward)
multiply = Operation("multiply", _multiply, _multiply_backward)
divide = Operation("divide", _divide, _divide_backward)
negative = Operation("negative", _negative, _negative_backward)
power = Operation("power", _power, _power_backward)
absolute = Operation("absolute", _absolute, _absolute_backward)
maximum = Operation("maximum", *_choose("maximum"))
minimum = Operation("minimum", *_choose("minimum"))
where = Operation("where", _where, _where_backward)
