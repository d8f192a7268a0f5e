"""Functions of one element: exponentials, roots, activations, casts."""

from __future__ import annotations

from typing import Any

from ..operation import Operation
from ..tensor import Tensor


def _exp(k, x):
    out = k.xp.exp(x)
    return out, out


def _exp_backward(k, out, g, wants):
    return (g * out,)


def _log(k, x):
    return k.xp.log(x), x


def _log_backward(k, x, g, wants):
    return (g / x,)


def _sqrt(k, x):
    out = k.xp.sqrt(x)
    return out, out


def _sqrt_backward(k, out, g, wants):
    return (g / (out * 2),)


def _tanh(k, x):
    out = k.xp.tanh(x)
    return out, out


def _tanh_backward(k, out, g, wants):
    return (k.tanh_backward(g, out),)


def _sigmoid(k, x):
    out = k.sigmoid(x)
    return out, out


def _sigmoid_backward(k, out, g, wants):
    return (k.sigmoid_backward(g, out),)


def _relu(k, x):
    out = k.relu(x)
    return out, out


def _relu_backward(k, out, g, wants):
    return (k.relu_backward(g, out),)


def _gelu(k, x):
    return k.gelu(x)


def _gelu_backward(k, saved, g, wants):
    return (k.gelu_backward(g, saved),)


def _dropout(k, x, mask, scale):
    return k.dropout(x, mask, scale), mask


def _dropout_backward(k, mask, g, wants, scale):
    return k.dropout(g, mask, scale), None


def _astype(k, x, dtype):
    return x.astype(dtype), x.dtype


def _astype_backward(k, before, g, wants, dtype):
    return (g.astype(before),)


exp = Operation("exp", _exp, _exp_backward)
log = Operation("log", _log, _log_backward)
sqrt = Operation("sqrt", _sqrt, _sqrt_backward)
tanh = Operation("tanh", _tanh, _tanh_backward)
sigmoid = Operation("sigmoid", _sigmoid, _sigmoid_backward, floats=1)
relu = Operation("relu", _relu, _relu_backward)
gelu = Operation("gelu", _gelu, _gelu_backward, floats=1)
_drop = Operation("dropout", _dropout, _dropout_backward, floats=1)
_cast = Operation("astype", _astype, _astype_backward, wide=(0,))


def dropout(x: Any, mask: Any, p: float) -> Tensor:
    """Return x / (1 - p) where ``mask`` is True, else 0. **Local.**

    The mask is the caller's: ``nn.Dropout`` draws it from the position of each sample in the global batch.

    Args:
        x: (N, ...), floating.
        mask: boolean array of x's shape, True where an element is kept.
        p: the probability with which the mask drops, in [0, 1).
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"p: expected a probability in [0, 1), got {p}; 0 keeps everything")
    return _drop(x, mask, scale=1.0 / (1.0 - p))


def astype(x: Any, dtype: Any) -> Tensor:
    """Return the elements of x as ``dtype``; a gradient is cast back. **Local.**

    Of a parameter it casts the float32 master, under every precision: ``p.astype("float32")`` is the way to use one
    that must not be rounded to 16 bits.
    """
    return _cast(x, dtype=dtype)
