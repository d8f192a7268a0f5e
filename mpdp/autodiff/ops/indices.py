"""Rows chosen by index: embedding."""

from __future__ import annotations

from typing import Any

from ..operation import Operation
from ..tensor import Tensor, unwrap
from ..wants import deliver


def _embedding(k, weight, index):
    return k.embedding(weight, index), (index, len(weight))


def _embedding_backward(k, saved, g, wants):
    index, rows = saved
    return deliver(wants[0], k.embedding_backward, g, index, rows), None


_apply_embedding = Operation("embedding", _embedding, _embedding_backward)


def embedding(weight: Any, index: Any) -> Tensor:
    """Return the rows of ``weight`` (rows, D) that ``index`` names, of shape (*index.shape, D). **Local.**

    Args:
        weight: (rows, D), floating.
        index: integers of any shape, each in 0..rows-1.

    Raises:
        TypeError: an index that is not of integers.
        ValueError: an index out of range; negative ones do not wrap round.
    """
    kind = getattr(unwrap(index), "dtype", None)
    if kind is None or kind.kind not in "iu":
        raise TypeError(
            f"index: expected an array of integers, got {type(index).__name__ if kind is None else kind}; "
            "convert it with .astype(int64)"
        )
    return _apply_embedding(weight, index)
