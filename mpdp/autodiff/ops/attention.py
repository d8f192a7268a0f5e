"""Attention. Shapes: N sequences, H heads, T queries, S keys, D features of a head."""

from __future__ import annotations

import math
from typing import Any

from ...device import same_device
from ..operation import Operation
from ..tensor import Tensor, unwrap


def _attention(k, q, key, value, scale, causal, keys, keep, keep_scale):
    return k.attention(q, key, value, scale, causal, keys, keep, keep_scale)


def _attention_backward(k, saved, g, wants, scale, causal, keys, keep, keep_scale):
    return k.attention_backward(g, saved, scale, keep, keep_scale)


_apply_attention = Operation("attention", _attention, _attention_backward)


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: bool = False,
    key_mask: Any = None,
    keep: Any = None,
    p: float = 0.0,
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

    Raises:
        ValueError: shapes that do not fit.
        TypeError: a mask that is not boolean.

    Source: Vaswani et al., "Attention is all you need" (2017), equation 1.
    """
    q, k, v = (unwrap(part).shape for part in (query, key, value))
    if len(q) != 4 or len(k) != 4 or k != v or q[:2] != k[:2] or q[3] != k[3]:
        raise ValueError(
            "attention: expected a query (N, H, T, D), a key and a value (N, H, S, D), got "
            f"{q}, {k} and {v}; split the width into heads first"
        )
    if not 0.0 <= p < 1.0:
        raise ValueError(f"p: expected a probability in [0, 1), got {p}; 0 keeps everything")
    key_mask = _mask("key_mask", key_mask, query, (k[0], k[2]))
    keep = _mask("keep", keep, query, (*q[:3], k[2]))
    return _apply_attention(
        query,
        key,
        value,
        scale=1.0 / math.sqrt(max(q[3], 1)),
        causal=bool(causal),
        keys=key_mask,
        keep=keep,
        keep_scale=1.0 / (1.0 - p),
    )


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
