"""Rules beside SGD and Adam: Lion, LAMB with its norms of parameters, and the moving average of weights.

:class:`RuleKernels` is the interface, :class:`CpuRules` does it with NumPy, ``cuda_rules`` on a GPU. Conventions are
those of ``updates``: a call covers one contiguous range, and its cut never changes a bit. LAMB's sums keep that promise
because they belong to fixed pieces of the index space, never to what a call covers. Read next: ``optim/lamb.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .updates import (
    BLOCK,
    CpuUpdates,
    Scalars,
    UpdateKernels,
    _aligned,
    _fit,
    _operand,
    _parts,
    _rows,
    _scaled,
    _widened,
)

_ROWS = 128  # blocks squared at once: 256 KiB of float64, which fits the L2 cache


class RuleKernels(UpdateKernels):
    """What a device must do for Lion, LAMB and averages; each method is one pass over flat arrays."""

    def lion(
        self,
        weights: Any,
        gradient: Any,
        momentum: Any,
        *,
        scale: Scalars,
        lr: Scalars,
        betas: tuple[float, float],
        shrink: Scalars,
        scratch: Any,
        copy: Any = None,
        when: Any = None,
        limit: float | None = None,
    ) -> None:
        """Do one step of Lion on a range.

        **Local.** With d = gradient * scale::

            weights *= shrink
            weights -= lr * sign(beta1 * momentum + (1 - beta1) * d)
            momentum = beta2 * momentum + (1 - beta2) * d

        Args:
            weights: overwritten; of the scratch's dtype or a narrower one.
            gradient: any floating dtype, unscaled sums.
            momentum: overwritten; of the scratch's dtype.
            scale: factor on the gradient.
            lr: learning rate; may be a column.
            betas: (beta1, beta2).
            shrink: 1 - lr * decay, 1.0 for none; may be a column.
            scratch, copy, when, limit: as for ``UpdateKernels.sgd``.
        """
        raise NotImplementedError

    def lamb_moments(
        self,
        weights: Any,
        gradient: Any,
        mean: Any,
        variance: Any,
        *,
        edges: Any,
        offset: int,
        out: Any,
        scale: Scalars,
        correction: Scalars,
        eps: Scalars,
        betas: tuple[float, float],
        weight_decay: Scalars,
        scratch: Any,
        when: Any = None,
        limit: float | None = None,
    ) -> None:
        """Do the first half of a LAMB step on a range: the moments, and sums of squares for each piece of it.

        **Local.** With d = gradient * scale::

            mean = beta1 * mean + (1 - beta1) * d
            variance = beta2 * variance + (1 - beta2) * d^2
            u = mean / (sqrt(variance) + eps) * correction + weight_decay * weights
            out[piece] = sum of weights^2, sum of u^2            (float64)

        Args:
            weights: read.
            gradient: any floating dtype, unscaled sums.
            mean: overwritten; of the scratch's dtype.
            variance: overwritten; of the scratch's dtype.
            edges: int64 array of pieces + 1 elements, where pieces begin and end: multiples of 256.
            offset: what an edge at the range's first element would be.
            out: float64 array (pieces, 2), overwritten.
            scale: factor on the gradient.
            correction: sqrt(1 - beta2^t) / (1 - beta1^t); may be a column.
            eps: eps * sqrt(1 - beta2^t); may be a column.
            betas: (beta1, beta2).
            weight_decay: factor on the weights in u; may be a column.
            scratch: from ``update_scratch``.
            when: 0-d int64 array, read when the kernel runs: 0 leaves the moments as they are. None for always.
            limit: ``gradient * scale`` is cut to [-limit, limit]; None leaves it.
        """
        raise NotImplementedError

    def trust_ratios(self, sums: Any, spans: Any) -> Any:
        """Return how far each parameter's step is to be scaled: |weights| / |u|, and 1 where either is 0. **Local.**

        Args:
            sums: float64 array (pieces, 2) of :meth:`lamb_moments`, of all pieces.
            spans: int64 array (parameters, 2): first piece of each, and the one behind its last. A parameter without
                pieces gets 1.

        Returns:
            float64 array (parameters,).
        """
        raise NotImplementedError

    def lamb(
        self,
        weights: Any,
        mean: Any,
        variance: Any,
        *,
        lr: Scalars,
        ratios: Any,
        owners: Any,
        correction: Scalars,
        eps: Scalars,
        weight_decay: Scalars,
        scratch: Any,
        copy: Any = None,
        when: Any = None,
    ) -> None:
        """Do the second half of a LAMB step on a range, with u of the moments as :meth:`lamb_moments` left them.

        **Local.** ``weights -= lr * ratios[owner] * u``

        Args:
            weights: overwritten; of the scratch's dtype or a narrower one.
            mean, variance: read.
            lr: learning rate; may be a column.
            ratios: of :meth:`trust_ratios`.
            owners: int32 array, the parameter that each block of the range belongs to.
            correction, eps, weight_decay: as for :meth:`lamb_moments`.
            scratch, copy, when: as for ``UpdateKernels.sgd``.
        """
        raise NotImplementedError

    def average(self, average: Any, weights: Any, *, decay: float, scratch: Any, when: Any = None) -> None:
        """Move an average towards the weights: ``average = decay * average + (1 - decay) * weights``. **Local.**

        Args:
            average: overwritten; of the scratch's dtype.
            weights: read.
            decay: of the average.
            scratch: from ``update_scratch``.
            when: 0-d int64 array, read when the kernel runs: 0 leaves the average as it is. None for always.
        """
        raise NotImplementedError


class CpuRules(CpuUpdates, RuleKernels):
    """The rules of NumPy, in few and large in-place calls."""

    def lion(
        self,
        weights: Any,
        gradient: Any,
        momentum: Any,
        *,
        scale: Scalars,
        lr: Scalars,
        betas: tuple[float, float],
        shrink: Scalars,
        scratch: Any,
        copy: Any = None,
        when: Any = None,
        limit: float | None = None,
    ) -> None:
        if when is not None and not when:
            return
        work = scratch.dtype
        shrinks = not (isinstance(shrink, float) and shrink == 1.0)
        rate, keep, factor = (_operand(value, work) for value in (lr, shrink, scale))
        (beta1, rest1), (beta2, rest2) = ((_operand(b, work), _operand(1.0 - b, work)) for b in betas)
        columns = rate.ndim > 0 or keep.ndim > 0
        a_all, b_all, p_all = scratch.take(weights.dtype)
        c_all = scratch.array(3)
        if columns:
            weights, gradient, momentum, copy = map(_rows, (weights, gradient, momentum, copy))
        for part in _parts(len(weights), columns):
            w, g, m = weights[part], gradient[part], momentum[part]
            a, b, c = (_fit(array, w.shape) for array in (a_all, b_all, c_all))
            p = w if p_all is None else _widened(p_all, w)
            _scaled(g, factor, a, limit)
            if shrinks:
                np.multiply(p, _of(keep, part), p)
            np.multiply(a, rest1, b)
            np.multiply(m, beta1, c)
            np.add(c, b, c)
            np.sign(c, c)
            np.multiply(c, _of(rate, part), c)
            np.subtract(p, c, p)
            np.multiply(a, rest2, a)
            np.multiply(m, beta2, m)
            np.add(m, a, m)
            if p is not w:
                w[...] = p
            if copy is not None:
                np.copyto(copy[part], p)  # while the piece is in the cache

    def lamb_moments(
        self,
        weights: Any,
        gradient: Any,
        mean: Any,
        variance: Any,
        *,
        edges: Any,
        offset: int,
        out: Any,
        scale: Scalars,
        correction: Scalars,
        eps: Scalars,
        betas: tuple[float, float],
        weight_decay: Scalars,
        scratch: Any,
        when: Any = None,
        limit: float | None = None,
    ) -> None:
        if when is not None and not when:
            return
        work = scratch.dtype
        factor = _operand(scale, work)
        (beta1, rest1), (beta2, rest2) = ((_operand(b, work), _operand(1.0 - b, work)) for b in betas)
        steps = _Steps(correction, eps, weight_decay, work)
        a_all, b_all, p_all = scratch.take(weights.dtype)
        weights, gradient, mean, variance = map(_rows, (weights, gradient, mean, variance))
        squares = np.empty((len(weights), 2))  # of each block
        buffer = _aligned(min(_ROWS, max(len(weights), 1)) * BLOCK, np.float64)
        for part in _parts(len(weights), True):
            w, g, m, v = weights[part], gradient[part], mean[part], variance[part]
            a, b = _fit(a_all, w.shape), _fit(b_all, w.shape)
            p = w if p_all is None else _widened(p_all, w)
            _scaled(g, factor, a, limit)
            np.multiply(a, rest1, b)
            np.multiply(m, beta1, m)
            np.add(m, b, m)
            np.multiply(a, a, a)
            np.multiply(a, rest2, a)
            np.multiply(v, beta2, v)
            np.add(v, a, v)
            _adam_step(m, v, p, part, steps, a, b)
            _block_squares(p, buffer, squares[part, 0])
            _block_squares(b, buffer, squares[part, 1])
        if len(out):
            starts = (edges[:-1] - offset) // BLOCK
            out[...] = np.add.reduceat(squares, starts, axis=0)

    def trust_ratios(self, sums: Any, spans: Any) -> np.ndarray:
        ratios = np.ones(len(spans))
        for i, (first, last) in enumerate(spans.tolist()):
            own, step = np.sqrt(sums[first:last].sum(axis=0)).tolist()
            if own > 0 and step > 0:
                ratios[i] = own / step
        return ratios

    def lamb(
        self,
        weights: Any,
        mean: Any,
        variance: Any,
        *,
        lr: Scalars,
        ratios: Any,
        owners: Any,
        correction: Scalars,
        eps: Scalars,
        weight_decay: Scalars,
        scratch: Any,
        copy: Any = None,
        when: Any = None,
    ) -> None:
        if when is not None and not when:
            return
        work = scratch.dtype
        rate = _operand(lr * ratios[owners], work)
        a_all, b_all, p_all = scratch.take(weights.dtype)
        weights, mean, variance, copy = map(_rows, (weights, mean, variance, copy))
        steps = _Steps(correction, eps, weight_decay, work)
        for part in _parts(len(weights), True):
            w = weights[part]
            a, b = _fit(a_all, w.shape), _fit(b_all, w.shape)
            p = w if p_all is None else _widened(p_all, w)
            _adam_step(mean[part], variance[part], p, part, steps, a, b)
            np.multiply(b, rate[part], b)
            np.subtract(p, b, p)
            if p is not w:
                w[...] = p
            if copy is not None:
                np.copyto(copy[part], p)

    def average(self, average: Any, weights: Any, *, decay: float, scratch: Any, when: Any = None) -> None:
        if when is not None and not when:
            return
        keep, rest = _operand(decay, scratch.dtype), _operand(1.0 - decay, scratch.dtype)
        buffer = scratch.array(0)
        for part in _parts(len(average), False):
            e, p = average[part], weights[part]
            a = _fit(buffer, e.shape)
            _scaled(p, rest, a)
            np.multiply(e, keep, e)
            np.add(e, a, e)


class _Steps:
    """The numbers of LAMB's u in the working dtype: 0-d, or one a block."""

    def __init__(self, correction: Scalars, eps: Scalars, weight_decay: Scalars, work: Any) -> None:
        self.decays = not (isinstance(weight_decay, float) and weight_decay == 0.0)
        self.correction, self.eps, self.decay = (_operand(x, work) for x in (correction, eps, weight_decay))


def _adam_step(
    m: np.ndarray, v: np.ndarray, p: np.ndarray, part: slice, steps: _Steps, a: np.ndarray, b: np.ndarray
) -> None:
    """Write u to ``b``, by way of ``a``."""
    np.sqrt(v, a)
    np.add(a, _of(steps.eps, part), a)
    np.divide(m, a, b)
    np.multiply(b, _of(steps.correction, part), b)
    if steps.decays:
        np.multiply(p, _of(steps.decay, part), a)
        np.add(b, a, b)


def _block_squares(rows: np.ndarray, buffer: np.ndarray, out: np.ndarray) -> None:
    """Write the float64 sum of squares of each row, by way of an aligned buffer: BLAS may round by alignment."""
    for first in range(0, len(rows), _ROWS):
        some = rows[first : first + _ROWS]
        wide = _fit(buffer, some.shape)
        wide[...] = some
        with np.errstate(over="ignore", invalid="ignore"):  # a trust ratio of 0, or none
            out[first : first + len(some)] = np.vecdot(wide, wide)


def _of(value: np.ndarray, part: slice) -> np.ndarray:
    """Return a number, or the part of a column."""
    return value if value.ndim == 0 else value[part]
