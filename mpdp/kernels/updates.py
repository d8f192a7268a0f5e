"""Update kernels: what an optimizer and the trainer's checks do to flat arrays, with NumPy.

:class:`UpdateKernels` is the interface, :class:`CpuUpdates` implements it. A call covers one
contiguous range and works through it in pieces that stay in the cache. Every formula is elementwise,
so the pieces, and the ranges a caller chooses, never change a bit of the result. The kernels know
neither parameters nor groups: a number that differs between parameters comes as a column, one
value for each block of 256 elements. Read next: ``rules`` for Lion, LAMB and averages, ``optim/optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from . import random

BLOCK = 256  # elements that share one value of a column
# Elements worked on at once. Measured (AMD EPYC, 1 MiB of L2 a core, NumPy 2.4): below 64 Ki elements
# the 0.4 us of a NumPy call outweigh what the cache gives, above 256 Ki the scratch leaves the cache.
PIECE = 196_608
_SPANS = 8  # spans squared at once, and WORDS words hashed at once: both fit the L2 cache
_WORDS = 8192
_MASK = 0xFFFFFFFFFFFFFFFF
_MIX = np.uint64(0x9E3779B97F4A7C15)
_32 = np.uint64(32)

# A float for the whole range, or a column: float64 array with one value a block. On a GPU also a 0-d float64
# array, which is read when the kernel runs: what changes from step to step may then live in device memory.
Scalars = Any


def _hash_keys() -> np.ndarray:
    """Return one odd 64-bit number for each word of a hash block."""
    words = random.bits((0x6D706470, 0x73756D73), 0, 0, 1, 2 * _WORDS).reshape(_WORDS, 2).astype(np.uint64)
    keys = (words[:, 0] << _32) | words[:, 1] | np.uint64(1)
    keys.flags.writeable = False
    return keys


_KEYS = _hash_keys()


class UpdateKernels:
    """What a device must do for optimizers and checks; each method is one pass over flat arrays.

    All arrays of a call are one-dimensional and contiguous. Where a number may be a column, the length
    of the arrays is a multiple of 256 and the column has one float64 value for each 256 elements.
    """

    def flat_zeros(self, size: int, dtype: Any) -> Any:
        """Return a flat array of zeros, aligned as the device likes best. **Local.**"""
        raise NotImplementedError

    def update_scratch(self, dtype: Any) -> Any:
        """Return the working memory of one optimizer, for state of ``dtype``. **Local.**

        Two threads must not use one scratch at the same time; an optimizer owns its own.
        """
        raise NotImplementedError

    def block_numbers(self, numbers: np.ndarray) -> Any:
        """Return small integers, one a block, where :meth:`column` wants them. **Local.**

        Done once; slices of the result cost nothing.
        """
        raise NotImplementedError

    def column(self, table: np.ndarray, numbers: Any) -> Scalars:
        """Return the column ``table[numbers]``. **Local.**

        Args:
            table: float64, one value a group.
            numbers: a slice of what :meth:`block_numbers` returned, with the group of each block.
        """
        raise NotImplementedError

    def sgd(
        self,
        weights: Any,
        gradient: Any,
        velocity: Any,
        *,
        scale: Scalars,
        lr: Scalars,
        momentum: float,
        weight_decay: Scalars,
        nesterov: bool,
        scratch: Any,
        copy: Any = None,
        when: Any = None,
        limit: float | None = None,
    ) -> None:
        """Do one step of gradient descent on a range.

        **Local.** With d = gradient * scale + weight_decay * weights::

            velocity = momentum * velocity + d
            weights -= lr * velocity                    (nesterov: lr * (d + momentum * velocity))

        Without momentum (``velocity`` None) the step is ``weights -= lr * d``.

        Args:
            weights: overwritten; of the scratch's dtype or a narrower one.
            gradient: any floating dtype, unscaled sums.
            velocity: overwritten; of the scratch's dtype, or None.
            scale: factor on the gradient.
            lr: learning rate; may be a column.
            momentum: factor on the old velocity.
            weight_decay: L2 factor; may be a column.
            nesterov: look ahead along the velocity.
            scratch: from :meth:`update_scratch`.
            copy: overwritten with the new weights, rounded to its dtype (to nearest, ties to even); or None.
            when: 0-d int64 array, read when the kernel runs: 0 leaves everything as it is. None for always.
            limit: ``gradient * scale`` is cut to [-limit, limit]; None leaves it.
        """
        raise NotImplementedError

    def adam(
        self,
        weights: Any,
        gradient: Any,
        mean: Any,
        variance: Any,
        *,
        scale: Scalars,
        step: Scalars,
        eps: Scalars,
        betas: tuple[float, float],
        weight_decay: Scalars,
        shrink: Scalars,
        scratch: Any,
        copy: Any = None,
        when: Any = None,
        limit: float | None = None,
    ) -> None:
        """Do one step of Adam on a range; the caller has folded the bias corrections into two numbers.

        **Local.** With d = gradient * scale + weight_decay * weights::

            weights *= shrink
            mean = beta1 * mean + (1 - beta1) * d
            variance = beta2 * variance + (1 - beta2) * d^2
            weights -= step * mean / (sqrt(variance) + eps)

        Args:
            weights: overwritten; of the scratch's dtype or a narrower one.
            gradient: any floating dtype, unscaled sums.
            mean: overwritten; of the scratch's dtype.
            variance: overwritten; of the scratch's dtype.
            scale: factor on the gradient.
            step: lr * sqrt(1 - beta2^t) / (1 - beta1^t); may be a column.
            eps: eps * sqrt(1 - beta2^t); may be a column.
            betas: (beta1, beta2).
            weight_decay: L2 factor (Adam), 0.0 for none; may be a column.
            shrink: 1 - lr * decay (AdamW), 1.0 for none; may be a column.
            scratch: from :meth:`update_scratch`.
            copy: overwritten with the new weights, rounded to its dtype (to nearest, ties to even); or None.
            when: 0-d int64 array, read when the kernel runs: 0 leaves everything as it is. None for always.
            limit: ``gradient * scale`` is cut to [-limit, limit]; None leaves it.
        """
        raise NotImplementedError

    def sum_of_squares(self, x: Any, span: int = 4096) -> Any:
        """Return the float64 sum of squares of each span of a flat array.

        **Local.** A span's sum has the same bits wherever the span lies in ``x``, so ranks that hold
        different spans add up the same numbers.

        Args:
            x: flat array of a floating dtype; the last span may be short.
            span: elements a sum.

        Returns:
            float64 array of shape (ceil(len(x) / span),).
        """
        raise NotImplementedError

    def squared_norm(self, x: Any, span: int = 4096) -> Any:
        """Return the float64 sum of :meth:`sum_of_squares` in a fixed order: a float, or on a GPU a 0-d array."""
        raise NotImplementedError

    def total(self, sums: Any) -> Any:
        """Return the sum of span sums, in the order in which :meth:`squared_norm` adds them. **Local.**"""
        raise NotImplementedError

    def checksum(self, array: Any) -> int:
        """Return a checksum of the bytes of an array: equal bytes in equal order give equal numbers.

        **Local.** Exact integer arithmetic modulo 2^64. Shape and dtype do not enter; the order does.

        Returns:
            an integer in [0, 2^63), so that it and its negative fit an int64.
        """
        raise NotImplementedError

    def all_finite(self, x: Any) -> Any:
        """Return whether no element is NaN or infinite: a bool, or on a GPU a 0-d array of one. **Local.**

        On the CPU the common case costs one dot product; only if that overflows are the elements looked at.
        ``bool()`` of a GPU's answer waits for it.
        """
        raise NotImplementedError


class _Scratch:
    """A few cache-aligned arrays of one piece each, made on first use."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self._arrays: list[np.ndarray] = []

    @property
    def nbytes(self) -> int:
        """Bytes that were made so far."""
        return sum(array.nbytes for array in self._arrays)

    def take(self, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return two arrays, and a third for the widened weights where ``dtype`` is narrower."""
        return self.array(0), self.array(1), (None if dtype == self.dtype else self.array(2))

    def array(self, number: int) -> np.ndarray:
        """Return one of the arrays: 0 to 2 are those of :meth:`take`."""
        while len(self._arrays) <= number:
            self._arrays.append(_aligned(PIECE, self.dtype))
        return self._arrays[number]


class CpuUpdates(UpdateKernels):
    """The update kernels of NumPy; scalars become 0-d arrays, which NumPy takes 0.4 us a call faster."""

    def flat_zeros(self, size: int, dtype: Any) -> np.ndarray:
        zeros = _aligned(size, np.dtype(dtype))
        zeros[...] = 0
        return zeros

    def update_scratch(self, dtype: Any) -> _Scratch:
        return _Scratch(dtype)

    def block_numbers(self, numbers: np.ndarray) -> np.ndarray:
        return numbers

    def column(self, table: np.ndarray, numbers: Any) -> np.ndarray:
        return table[numbers]

    def sgd(
        self,
        weights: Any,
        gradient: Any,
        velocity: Any,
        *,
        scale: Scalars,
        lr: Scalars,
        momentum: float,
        weight_decay: Scalars,
        nesterov: bool,
        scratch: Any,
        copy: Any = None,
        when: Any = None,
        limit: float | None = None,
    ) -> None:
        if when is not None and not when:
            return
        work = scratch.dtype
        decays = not (isinstance(weight_decay, float) and weight_decay == 0.0)
        direct = velocity is None and not decays and limit is None
        if direct:
            scale, lr = 1.0, lr * scale  # one pass less: a = gradient * (lr * scale)
        columns = _are_columns(lr, weight_decay)
        rate, decay = _operand(lr, work), _operand(weight_decay, work)
        factor, mu = _operand(scale, work), _operand(momentum, work)
        a_all, b_all, p_all = scratch.take(weights.dtype)
        if columns:
            weights, gradient, velocity, copy = map(_rows, (weights, gradient, velocity, copy))
        for part in _parts(len(weights), columns):
            w, g = weights[part], gradient[part]
            a, b = _fit(a_all, w.shape), _fit(b_all, w.shape)
            p = w if p_all is None else _widened(p_all, w)
            step = rate if rate.ndim == 0 else rate[part]
            if direct:
                _scaled(g, step, a)
                np.subtract(p, a, p)
            else:
                _scaled(g, factor, a, limit)
                if decays:
                    np.multiply(p, decay if decay.ndim == 0 else decay[part], b)
                    np.add(a, b, a)
                if velocity is None:
                    np.multiply(a, step, a)
                else:
                    v = velocity[part]
                    np.multiply(v, mu, v)
                    np.add(v, a, v)
                    if nesterov:
                        np.multiply(v, mu, b)
                        np.add(a, b, a)
                        np.multiply(a, step, a)
                    else:
                        np.multiply(v, step, a)
                np.subtract(p, a, p)
            if p is not w:
                w[...] = p
            if copy is not None:
                np.copyto(copy[part], p)  # while the piece is in the cache

    def adam(
        self,
        weights: Any,
        gradient: Any,
        mean: Any,
        variance: Any,
        *,
        scale: Scalars,
        step: Scalars,
        eps: Scalars,
        betas: tuple[float, float],
        weight_decay: Scalars,
        shrink: Scalars,
        scratch: Any,
        copy: Any = None,
        when: Any = None,
        limit: float | None = None,
    ) -> None:
        if when is not None and not when:
            return
        work = scratch.dtype
        decays = not (isinstance(weight_decay, float) and weight_decay == 0.0)
        shrinks = not (isinstance(shrink, float) and shrink == 1.0)
        columns = _are_columns(step, eps, weight_decay, shrink)
        rate, floor = _operand(step, work), _operand(eps, work)
        decay, keep = _operand(weight_decay, work), _operand(shrink, work)
        factor = _operand(scale, work)
        beta1, beta2 = (_operand(beta, work) for beta in betas)
        rest1, rest2 = (_operand(1.0 - beta, work) for beta in betas)
        a_all, b_all, p_all = scratch.take(weights.dtype)
        if columns:
            weights, gradient, mean, variance, copy = map(_rows, (weights, gradient, mean, variance, copy))
        for part in _parts(len(weights), columns):
            w, g, m, v = weights[part], gradient[part], mean[part], variance[part]
            a, b = _fit(a_all, w.shape), _fit(b_all, w.shape)
            p = w if p_all is None else _widened(p_all, w)
            _scaled(g, factor, a, limit)
            if decays:
                np.multiply(p, decay if decay.ndim == 0 else decay[part], b)
                np.add(a, b, a)
            if shrinks:
                np.multiply(p, keep if keep.ndim == 0 else keep[part], p)
            np.multiply(a, rest1, b)
            np.multiply(m, beta1, m)
            np.add(m, b, m)
            np.multiply(a, a, a)
            np.multiply(a, rest2, a)
            np.multiply(v, beta2, v)
            np.add(v, a, v)
            np.sqrt(v, a)
            np.add(a, floor if floor.ndim == 0 else floor[part], a)
            np.divide(m, a, b)
            np.multiply(b, rate if rate.ndim == 0 else rate[part], b)
            np.subtract(p, b, p)
            if p is not w:
                w[...] = p
            if copy is not None:
                np.copyto(copy[part], p)  # while the piece is in the cache

    def sum_of_squares(self, x: Any, span: int = 4096) -> np.ndarray:
        whole = len(x) // span
        out = np.empty(-(-len(x) // span))
        # squares go through an aligned buffer: BLAS may round by alignment, and spans must not
        buffer = _aligned(min(_SPANS, max(len(out), 1)) * span, np.float64)
        with np.errstate(over="ignore", invalid="ignore"):  # the caller judges a norm that is not finite
            for first in range(0, whole, _SPANS):
                last = min(first + _SPANS, whole)
                rows = buffer[: (last - first) * span].reshape(-1, span)
                rows[...] = x[first * span : last * span].reshape(-1, span)
                np.vecdot(rows, rows, out=out[first:last])
            if whole < len(out):
                tail = buffer[: len(x) - whole * span]
                tail[...] = x[whole * span :]
                out[whole] = np.dot(tail, tail)
        return out

    def squared_norm(self, x: Any, span: int = 4096) -> float:
        return self.total(self.sum_of_squares(x, span))

    def total(self, sums: np.ndarray) -> float:
        return float(sums.sum())

    def checksum(self, array: Any) -> int:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        whole = len(data) // 8 * 8
        total = _hash(data[:whole].view(np.uint64), len(data))
        if whole < len(data):
            tail = np.zeros(8, np.uint8)
            tail[: len(data) - whole] = data[whole:]
            total = _hash(tail.view(np.uint64), total)
        return total >> 1

    def all_finite(self, x: Any) -> bool:
        flat = x.reshape(-1)
        if flat.dtype in (np.float32, np.float64):
            with np.errstate(over="ignore", invalid="ignore"):
                if np.isfinite(np.dot(flat, flat)):
                    return True
        return bool(np.isfinite(flat).all())


def _hash(words: np.ndarray, start: int) -> int:
    """Return the running checksum after ``words``.

    Each word is mixed with its place's key before the sum: a plain weighted sum would miss, among
    others, two flipped sign bits.
    """
    total = start & _MASK
    for first in range(0, len(words), _WORDS):
        block = words[first : first + _WORDS]
        keys = _KEYS[: len(block)]
        mixed = block ^ keys
        np.multiply(mixed, _MIX, mixed)
        np.bitwise_xor(mixed, mixed >> _32, mixed)
        np.multiply(mixed, keys, mixed)
        total = (total * int(_MIX) + int(np.add.reduce(mixed))) & _MASK
        total ^= total >> 29
    return total


def _aligned(count: int, dtype: Any) -> np.ndarray:
    """Return an uninitialised array that starts on a cache line: in-place loops run up to 1.4 x faster."""
    size = count * np.dtype(dtype).itemsize
    memory = np.empty(size + 64, np.uint8)
    offset = -memory.ctypes.data % 64
    return memory[offset : offset + size].view(dtype)


def _parts(length: int, columns: bool) -> Iterator[slice]:
    """Cut a range into pieces of equal size; with columns the unit is a row of one block."""
    most = PIECE // BLOCK if columns else PIECE
    count = -(-length // most)
    size = -(-length // max(count, 1))
    for start in range(0, length, max(size, 1)):
        yield slice(start, min(start + size, length))


def _are_columns(*values: Scalars) -> bool:
    return not all(isinstance(value, float) for value in values)


def _operand(value: Scalars, dtype: np.dtype) -> np.ndarray:
    """Return a 0-d array of a float, or a column of shape (blocks, 1)."""
    array = np.asarray(value, dtype)
    return array if array.ndim == 0 else array.reshape(-1, 1)


def _rows(array: Any) -> Any:
    return None if array is None else array.reshape(-1, BLOCK)


def _fit(buffer: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return buffer[: shape[0]] if len(shape) == 1 else buffer[: shape[0] * shape[1]].reshape(shape)


def _widened(buffer: np.ndarray, narrow: np.ndarray) -> np.ndarray:
    """Return ``narrow`` in the working dtype, in the scratch."""
    wide = _fit(buffer, narrow.shape)
    wide[...] = narrow
    return wide


def _scaled(gradient: np.ndarray, factor: np.ndarray, out: np.ndarray, limit: float | None = None) -> None:
    """Write ``gradient * factor``, cut to [-limit, limit], in the dtype of ``out``, never in a narrower one."""
    if gradient.dtype == out.dtype:
        np.multiply(gradient, factor, out)
    else:
        out[...] = gradient
        np.multiply(out, factor, out)
    if limit is not None:
        np.clip(out, -limit, limit, out)
