"""Attention. Shapes: N sequences, H heads, T queries, S keys, D features of a head."""

from __future__ import annotations

import math
from typing import Any

from ...device import same_device
from ...kernels.base import ATTENTIONS
from ..operation import Operation
from ..tensor import Tensor, unwrap


def _attention(k, q, key, value, scale, causal, keys, keep, keep_scale, engine, deterministic):
    return k.attention(q, key, value, scale, causal, keys, keep, keep_scale, engine)


def _attention_backward(k, saved, g, wants, scale, causal, keys, keep, keep_scale, engine, deterministic):
    return k.attention_backward(g, saved, scale, keep, keep_scale, deterministic)


def _self_attention(k, qkv, heads, scale, causal, keys, keep, keep_scale, engine, deterministic):
    n, t, width = qkv.shape
    shape = n, t, 3, heads, width // (3 * heads)
    out, saved = k.self_attention(qkv.reshape(shape), scale, causal, keys, keep, keep_scale, engine)
    return out, (saved, shape)


def _self_attention_backward(
    k, saved, g, wants, heads, scale, causal, keys, keep, keep_scale, engine, deterministic
):
    saved, shape = saved
    gradient = k.self_attention_backward(g, saved, shape, scale, keep, keep_scale, deterministic)
    return (gradient.reshape(*shape[:2], 3 * shape[3] * shape[4]),)


_apply_attention = Operation("attention", _attention, _attention_backward, floats=3)
_apply_self_attention = Operation("self_attention", _self_attention, _self_attention_backward, floats=1)


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: bool = False,
    key_mask: Any = None,
    keep: Any = None,
    p: float = 0.0,
    engine: str = "auto",
    deterministic: bool = True,
) -> Tensor:
    """Return ``softmax(query key^T / sqrt(D)) value``. **Local.**

    Args:
        query: (N, H, T, D).
        key: (N, H, S, D).
        value: (N, H, S, D).
        causal: query t sees the keys up to S - T + t: with as many queries as keys, none that come later.
        key_mask: boolean (N, S), True where a key is one, False where it is padding; a query without any key
            gives 0.
        keep: boolean (N, H, T, S), True where dropout keeps a weight; the others become 0.
        p: the probability with which ``keep`` drops, in [0, 1).
        engine: ``"plain"``: products and a softmax, with all scores in memory; ``"cudnn"``: one kernel without them;
            ``"auto"``: cuDNN for what it has, if it is installed. That is 16-bit floats on a GPU, D a multiple of 8 and
            at most 128, without masks and dropout, and where causal, as many queries as keys.
        deterministic: False lets cuDNN add gradients in an order of its own: faster, with other last bits each time.

    Raises:
        ValueError: shapes that do not fit, or an engine that has not what is asked for.
        TypeError: a mask that is not boolean.
        MissingDependencyError: ``engine="cudnn"`` without its package.

    Source: Vaswani et al., "Attention is all you need" (2017), equation 1.
    """
    q, k, v = (unwrap(part).shape for part in (query, key, value))
    if len(q) != 4 or len(k) != 4 or k != v or q[:2] != k[:2] or q[3] != k[3]:
        raise ValueError(
            "attention: expected a query (N, H, T, D), a key and a value (N, H, S, D), got "
            f"{q}, {k} and {v}; split the width into heads first"
        )
    options = _options(query, (*q[:3], k[2]), q[3], causal, key_mask, keep, p, engine, deterministic)
    return _apply_attention(query, key, value, **options)


def self_attention(
    qkv: Any,
    heads: int,
    *,
    causal: bool = False,
    key_mask: Any = None,
    keep: Any = None,
    p: float = 0.0,
    engine: str = "auto",
    deterministic: bool = True,
) -> Tensor:
    """Return :func:`attention` of what one product made, as the next product reads it. **Local.**

    Nothing is copied where cuDNN runs: it reads the three where they lie, and writes heads side by side.

    Args:
        qkv: (N, T, 3 * H * D): all heads of the queries, then of the keys, then of the values.
        heads: H.
        causal, key_mask, keep, p, engine, deterministic: see :func:`attention`.

    Returns:
        (N, T, H * D).

    Raises:
        ValueError: a width that is no multiple of 3 H, and as :func:`attention`.
    """
    shape = unwrap(qkv).shape
    if len(shape) != 3 or heads < 1 or shape[2] % (3 * heads):
        raise ValueError(
            f"self_attention: expected qkv of shape (N, T, 3 * {heads} * D), got {shape}; check the heads"
        )
    n, t, width = shape
    size = width // (3 * heads)
    options = _options(qkv, (n, heads, t, t), size, causal, key_mask, keep, p, engine, deterministic)
    return _apply_self_attention(qkv, heads=heads, **options)


def _options(
    query: Any,
    scores: tuple[int, ...],
    size: int,
    causal: bool,
    key_mask: Any,
    keep: Any,
    p: float,
    engine: str,
    deterministic: bool,
) -> dict[str, Any]:
    """Return what both operations are called with, after checking it."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"p: expected a probability in [0, 1), got {p}; 0 keeps everything")
    if engine not in ATTENTIONS:
        raise ValueError(f"engine: expected one of {', '.join(ATTENTIONS)}, got {engine!r}; choose one")
    return {
        "scale": 1.0 / math.sqrt(max(size, 1)),
        "causal": bool(causal),
        "keys": _mask("key_mask", key_mask, query, (scores[0], scores[3])),
        "keep": _mask("keep", keep, query, scores),
        "keep_scale": 1.0 / (1.0 - p),
        "engine": engine,
        "deterministic": bool(deterministic),
    }


def _mask(what: str, mask: Any, query: Any, shape: tuple[int, ...]) -> Any:
    """Return a boolean array of ``shape`` on the device of the query, after checking it; None for None."""
    if mask is None:
        return None
    mask = unwrap(mask)
    if not hasattr(mask, "dtype") or mask.dtype.kind != "b":
        raise TypeError(
            f"{what}: expected a boolean array, got {getattr(mask, 'dtype', type(mask).__name__)}; "
            "True is what takes part"
        )
    if mask.shape != shape:
        raise ValueError(f"{what}: expected shape {shape}, got {mask.shape}; one flag a key")
    same_device("attention", unwrap(query), mask)
    return mask
