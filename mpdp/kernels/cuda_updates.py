"""Update kernels on a GPU: the optimizers' rules, norms, checksums. Part of ``kernels.cuda``.

One launch a call. No method decides anything on the host that depends on the device: numbers that change from
step to step may be given as 0-d arrays in device memory, which makes a call fit for a captured graph. The
docstrings are in ``kernels.updates``, whose bits the rules have too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import updates
from .cuda_source import THREADS, CudaBase, loop_blocks, number, stored, summed, types

_HASH_BYTES = 65_536  # bytes of a hash block: 8192 words


class CudaUpdates(CudaBase):
    """sgd, adam, norms, checksums and finite checks. **Local.**"""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self._keys: Any = None

    def flat_zeros(self, size: int, dtype: Any) -> Any:
        with self.active():
            return self.xp.zeros(size, dtype)

    def update_scratch(self, dtype: Any) -> np.dtype:
        return np.dtype(dtype)  # the kernels need no memory, only to know what to compute in

    def block_numbers(self, numbers: np.ndarray) -> Any:
        return self.from_host(numbers)

    def column(self, table: np.ndarray, numbers: Any) -> Any:
        return self.xp.asarray(table, np.float64)[numbers]

    def sgd(
        self,
        weights: Any,
        gradient: Any,
        velocity: Any,
        *,
        scale: Any,
        lr: Any,
        momentum: float,
        weight_decay: Any,
        nesterov: bool,
        scratch: Any,
        copy: Any = None,
        when: Any = None,
        limit: float | None = None,
    ) -> None:
        if weights.size == 0:
            return
        built = built_types(weights, gradient, scratch, copy)
        decays = not (isinstance(weight_decay, float) and weight_decay == 0.0)
        scale, lr, weight_decay = self.there(scale), self.there(lr), self.there(weight_decay)
        self.launch(
            "updates", "sgd", built, blocks_of(weights), THREADS, weights, copy, gradient, velocity, weights.size,
            *number(scale), *number(lr), *number(momentum), *number(weight_decay), decays, nesterov,
            *limits(limit), when,
        )  # fmt: skip

    def adam(
        self,
        weights: Any,
        gradient: Any,
        mean: Any,
        variance: Any,
        *,
        scale: Any,
        step: Any,
        eps: Any,
        betas: tuple[float, float],
        weight_decay: Any,
        shrink: Any,
        scratch: Any,
        copy: Any = None,
        when: Any = None,
        limit: float | None = None,
    ) -> None:
        if weights.size == 0:
            return
        built = built_types(weights, gradient, scratch, copy)
        decays = not (isinstance(weight_decay, float) and weight_decay == 0.0)
        shrinks = not (isinstance(shrink, float) and shrink == 1.0)
        scale, step, eps = self.there(scale), self.there(step), self.there(eps)
        weight_decay, shrink = self.there(weight_decay), self.there(shrink)
        self.launch(
            "updates", "adam", built, blocks_of(weights), THREADS, weights, copy, gradient, mean, variance,
            weights.size, *number(scale), *number(step), *number(eps), *(float(beta) for beta in betas),
            *number(weight_decay), decays, *number(shrink), shrinks, *limits(limit), when,
        )  # fmt: skip

    def there(self, value: Any) -> Any:
        """Return a number with a column that still lies on the host copied; the caller keeps it until the launch."""
        return self.xp.asarray(value) if isinstance(value, np.ndarray) else value

    def sum_of_squares(self, x: Any, span: int = 4096) -> Any:
        out = self.xp.empty(-(-x.size // span), np.float64)
        if x.size:
            built = types(x.dtype, np.float64)
            self.launch("spans", "span_squares", built, len(out), THREADS, self.flat(x), out, x.size, span)
        return out

    def squared_norm(self, x: Any, span: int = 4096) -> Any:
        return self.total(self.sum_of_squares(x, span))

    def total(self, sums: Any) -> Any:
        out = self.xp.empty((), np.float64)
        built = types(np.float64, np.float64)
        self.launch("spans", "total", built, 1, THREADS, sums, out, sums.size)  # as `decide` of step.cu adds
        return out

    def checksum(self, array: Any) -> int:
        xp = self.xp
        flat = self.flat(array).reshape(-1)
        if flat.data.ptr % 8:
            flat = flat.copy()
        if self._keys is None:
            self._keys = xp.asarray(updates._KEYS)
        size = flat.nbytes
        blocks = -(-(size // 8 * 8) // _HASH_BYTES) + (size % 8 > 0)
        sums, out = xp.empty(blocks, np.uint64), xp.empty((), np.uint64)
        if blocks:
            self.launch("checksum", "hash_blocks", (), blocks, THREADS, flat, self._keys, sums, size)
        self.launch("checksum", "hash_fold", (), 1, 1024, sums, out, blocks, size)
        return int(out)

    def all_finite(self, x: Any) -> Any:
        flag = self.xp.ones((), self.xp.bool_)
        if x.size:
            arguments = self.flat(x), flag, x.size
            self.launch("elementwise", "all_finite", types(x.dtype), loop_blocks(x.size), THREADS, *arguments)
        return flag


def built_types(weights: Any, gradient: Any, scratch: Any, copy: Any) -> tuple[str, ...]:
    """Return the types of a rule: weights, working copy (any where there is none), gradient, state."""
    working = weights if copy is None else copy
    return (
        *("P", stored(weights.dtype), "C", stored(working.dtype)),
        *("G", stored(gradient.dtype), "S", summed(scratch)),
    )


def blocks_of(x: Any) -> int:
    return -(-x.size // (4 * THREADS))


def limits(limit: float | None) -> tuple[float, bool]:
    """Return the two kernel arguments of what cuts a gradient's elements. **Local.**"""
    return (0.0, False) if limit is None else (float(limit), True)
