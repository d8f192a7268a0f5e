"""Rows chosen by index: embedding, with positions too. Shapes: N sequences, T tokens, D features."""

from __future__ import annotations

from typing import Any

from ..operation import Operation
from ..tensor import Tensor, unwrap
from ..wants import Target, deliver


def _embedding(k, weight, index):
    return k.embedding(weight, index), (index, len(weight))


def _embedding_backward(k, saved, g, wants):
    index, rows = saved
    return deliver(wants[0], k.embedding_backward, g, index, rows), None


def _token_embedding(k, tokens, positions, index):
    return k.token_embedding(tokens, positions, index), (index, len(tokens), positions.shape, positions.dtype)


def _token_embedding_backward(k, saved, g, wants):
    index, rows, shape, dtype = saved
    first = deliver(wants[0], k.embedding_backward, g, index, rows)
    want = wants[1]
    if want is None:
        return first, None, None
    if isinstance(want, Target):
        array, beta = want.array, want.beta
    else:
        array, beta = k.xp.empty(shape, dtype), 0.0
    used = index.shape[1]
    k.sum_to(g, (used, shape[1]), array[:used], beta)
    if beta == 0.0 and used < shape[0]:
        array[used:].fill(0)
    return first, want if isinstance(want, Target) else array, None


_apply_embedding = Operation("embedding", _embedding, _embedding_backward)
_apply_token_embedding = Operation("token_embedding", _token_embedding, _token_embedding_backward)


def embedding(weight: Any, index: Any) -> Tensor:
    """Return the rows of ``weight`` (rows, D) that ``index`` names, of shape (*index.shape, D). **Local.**

    Args:
        weight: (rows, D), floating.
        index: integers of any shape, each in 0..rows-1.

    Raises:
        TypeError: an index that is not of integers.
        ValueError: an index out of range; negative ones do not wrap round.
    """
    _check_integers(index)
    return _apply_embedding(weight, index)


def token_embedding(tokens: Any, positions: Any, index: Any) -> Tensor:
    """Return ``tokens[index] + positions[:T]``, of shape (N, T, D), in one pass. **Local.**

    Args:
        tokens: (rows, D), floating.
        positions: (T or more, D).
        index: integers (N, T), each in 0..rows-1.

    Raises:
        TypeError: an index that is not of integers.
        ValueError: shapes that do not fit, or an index out of range.
    """
    _check_integers(index)
    first, second, shape = unwrap(tokens).shape, unwrap(positions).shape, unwrap(index).shape
    if len(first) != 2 or len(second) != 2 or first[1] != second[1]:
        raise ValueError(
            f"token_embedding: expected two tables (rows, D), got {first} and {second}; check the widths"
        )
    if len(shape) != 2 or shape[1] > second[0]:
        raise ValueError(
            f"index: expected shape (N, T) with T of at most {second[0]} positions, got {shape}; cut it"
        )
    return _apply_token_embedding(tokens, positions, index)


def _check_integers(index: Any) -> None:
    kind = getattr(unwrap(index), "dtype", None)
    if kind is None or kind.kind not in "iu":
        raise TypeError(
            f"index: expected an array of integers, got {type(index).__name__ if kind is None else kind}; "
            "convert it with .astype(int64)"
        )
