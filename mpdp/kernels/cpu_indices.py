"""The CPU kernels that work with indices: label checks, embedding, scatter.

Part of ``kernels.cpu``, which assembles them; the docstrings are in ``kernels.base``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .base import Array, Kernels, Shape
from .precision import wide

_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


class CpuIndices(Kernels):
    """Label checks, embedding and scatter with NumPy. **Local.**"""

    def check_class_indices(self, target: Array, classes: int, ignore_index: int | None) -> Array:
        if target.size == 0:
            return np.zeros((), np.float64)
        if all_within(target, classes) and not (ignore_index is not None and 0 <= ignore_index < classes):
            return np.asarray(float(target.size))
        counted = np.ones(target.shape, bool) if ignore_index is None else target != ignore_index
        bad = counted & ((target < 0) | (target >= classes))
        if bad.any():
            raise ValueError(
                f"target: expected class indices in 0..{classes - 1}, got {_first(target, bad)}; "
                "check the labels or the model's outputs"
            )
        return np.asarray(float(np.count_nonzero(counted)))

    def embedding(self, weight: Array, index: Array) -> Array:
        if index.size and not all_within(index, len(weight)):
            bad = (index < 0) | (index >= len(weight))
            raise ValueError(
                f"embedding: expected indices in 0..{len(weight) - 1}, got {_first(index, bad)}; "
                "check the tokens or the size of the table"
            )
        return weight[index]

    def token_embedding(self, tokens: Array, positions: Array, index: Array) -> Array:
        out = self.embedding(tokens, index)
        return self.store(positions[: index.shape[1]], out, 1.0)

    def embedding_backward(
        self, g: Array, index: Array, rows: int, out: Array | None = None, beta: float = 0.0
    ) -> Array:
        width = g.shape[-1]
        if out is None:
            out = np.zeros((rows, width), g.dtype)
        elif beta == 0.0:
            out.fill(0)
        if index.size == 0 or width == 0:
            return out
        # Sorted segments: a stable sort fixes the order of the sums, and each row is written once.
        index = index.reshape(-1)
        order = np.argsort(index, kind="stable")
        ordered = index[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        sums = np.add.reduceat(g.reshape(-1, width)[order], starts, axis=0, dtype=wide(g.dtype))
        if beta == 0.0:
            out[ordered[starts]] = sums
        else:
            out[ordered[starts]] += sums
        return out

    def scatter(self, g: Array, index: Any, shape: Shape) -> Array:
        single = index if isinstance(index, np.ndarray) else None
        if single is not None and single.dtype.kind in "iu" and len(shape) > 1:  # 5 times as fast as add.at
            rows = np.where(single < 0, single + shape[0], single)
            flat = g.reshape(single.size, math.prod(shape[1:]))
            return self.embedding_backward(flat, rows, shape[0]).reshape(shape)
        out = np.zeros(shape, g.dtype)
        parts = index if isinstance(index, tuple) else (index,)
        if (single is None or single.dtype.kind != "b") and any(
            isinstance(part, np.ndarray | list) for part in parts
        ):
            np.add.at(out, index, g)  # an element may be chosen more than once
        else:
            out[index] = g
        return out


def all_within(index: Array, length: int) -> bool:
    """Return whether all of an array of integers (not empty) lie in 0..length-1. **Local.**"""
    # Read as unsigned, negative numbers are the largest ones: one reduction in place of two.
    return bool(np.maximum.reduce(index.view(_UNSIGNED[index.dtype.itemsize]), axis=None) < length)


def _first(values: Array, bad: Array) -> str:
    """Name the first bad value and where it stands."""
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    inner = f", position {at[1:]}" if len(at) > 1 else ""
    return f"{int(values[at])} at sample {at[0] if at else 0}{inner}"
