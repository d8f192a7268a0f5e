"""The CPU kernels that work on rows: softmax, layer norm, and the losses.

Part of ``kernels.cpu``, which assembles them; the docstrings are in ``kernels.base``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .base import Array
from .norms import NormsInParts
from .precision import wide


class CpuRows(NormsInParts):
    """Softmax, layer norm and losses with NumPy. **Local.**"""

    # -- softmax -------------------------------------------------------------------------------------------

    def softmax(self, x: Array, axis: int) -> Array:
        out = x.astype(wide(x.dtype)) if wide(x.dtype) is not x.dtype else x
        out = np.subtract(out, np.maximum.reduce(out, axis=axis, keepdims=True))
        np.exp(out, out=out)
        out /= np.add.reduce(out, axis=axis, keepdims=True)
        return out.astype(x.dtype, copy=False)

    def softmax_backward(self, g: Array, out: Array, axis: int) -> Array:
        grad = np.multiply(g, out, dtype=wide(g.dtype))
        total = np.add.reduce(grad, axis=axis, keepdims=True)
        grad -= out * total
        return grad.astype(g.dtype, copy=False)

    def log_softmax(self, x: Array, axis: int) -> Array:
        out = x.astype(wide(x.dtype)) if wide(x.dtype) is not x.dtype else x
        out = np.subtract(out, np.maximum.reduce(out, axis=axis, keepdims=True))
        out -= np.log(np.add.reduce(np.exp(out), axis=axis, keepdims=True))
        return out.astype(x.dtype, copy=False)

    def log_softmax_backward(self, g: Array, out: Array, axis: int) -> Array:
        grad = np.exp(out, dtype=wide(g.dtype))
        grad *= np.add.reduce(g, axis=axis, keepdims=True, dtype=wide(g.dtype))
        np.subtract(g, grad, out=grad)
        return grad.astype(g.dtype, copy=False)

    # -- layer norm ----------------------------------------------------------------------------------------

    def layer_norm(self, x: Array, weight: Array | None, bias: Array | None, eps: float) -> tuple[Array, Any]:
        width = max(x.shape[1], 1)
        wider = x.astype(wide(x.dtype), copy=False)
        mean = np.add.reduce(wider, axis=1, keepdims=True) / width
        normal = wider - mean
        rstd = np.vecdot(normal, normal)[:, None] / width  # variance, from the second pass
        rstd += eps
        np.sqrt(rstd, out=rstd)
        np.divide(1, rstd, out=rstd)
        normal *= rstd
        out = normal
        if weight is not None:
            out = normal * weight
        if bias is not None:
            out = np.add(out, bias, out=out if out is not normal else None)
        if out is normal:
            out = normal.copy()
        return out.astype(x.dtype, copy=False), (normal, rstd)

    def layer_norm_backward(self, g: Array, saved: Any, weight: Array | None) -> Array:
        normal, rstd = saved
        width = max(normal.shape[1], 1)
        # With h = g * weight: rstd * (h - mean(h) - normal * mean(h * normal)).
        grad = np.multiply(g, weight, dtype=normal.dtype) if weight is not None else g.astype(normal.dtype)
        mean = np.add.reduce(grad, axis=1, keepdims=True) / width
        along = np.vecdot(grad, normal)[:, None] / width
        grad -= mean
        grad -= normal * along
        grad *= rstd
        return grad.astype(g.dtype, copy=False)

    def layer_norm_weight_gradient(
        self, g: Array, saved: Any, out: Array | None = None, beta: float = 0.0
    ) -> Array:
        normal, _ = saved
        total = np.einsum("nd,nd->d", g.astype(normal.dtype, copy=False), normal)
        return total.astype(g.dtype, copy=False) if out is None else self.store(total, out, beta)

    # -- losses --------------------------------------------------------------------------------------------

    def checks_with_loss(self, logits: Array, target: Array) -> bool:
        return False

    def cross_entropy(
        self, logits: Array, target: Array, ignore_index: int, count: Array | None = None, check: bool = False
    ) -> tuple[Array, Any]:
        assert not check, "checks_with_loss() says so"
        rows, classes = logits.shape
        dtype = wide(logits.dtype)
        if rows == 0:
            return np.zeros((), dtype), (logits, None, None, None, logits.dtype)
        index = target.astype(np.intp, copy=False)
        ignored = None
        if count is None or count != rows:
            ignored = np.equal(index, ignore_index)
            index = np.where(ignored, 0, index)
        where = np.arange(0, rows * classes, classes)
        where += index
        top = np.maximum.reduce(logits, axis=1, keepdims=True)
        power = np.subtract(logits, top, dtype=dtype, order="C")  # flat indices below need C order
        chosen = power.reshape(-1)[where]
        np.exp(power, out=power)
        norm = np.add.reduce(power, axis=1)
        losses = np.log(norm)
        losses -= chosen
        if ignored is not None:
            losses[ignored] = 0
        total = np.add.reduce(losses, dtype=np.float64)
        return np.asarray(total, dtype=dtype), (power, norm, where, ignored, logits.dtype)

    def cross_entropy_backward(self, g: Array, saved: Any, own: bool = False) -> Array:
        power, norm, where, ignored, dtype = saved
        if norm is None:
            return np.zeros(power.shape, dtype)
        # The saved exponentials become the gradient: the probabilities never have memory of their own.
        scale = np.divide(g, norm, out=norm)
        if ignored is not None:
            scale[ignored] = 0
        power *= scale[:, None]
        power.reshape(-1)[where] -= g if ignored is None else np.where(ignored, 0, g)
        return power.astype(dtype, copy=False)

    def squared_error(self, output: Array, target: Array) -> tuple[Array, Any]:
        difference = np.asarray(np.subtract(output, target, dtype=wide(output.dtype)))
        flat = difference.reshape(-1)
        return np.asarray(np.dot(flat, flat)), (difference, output.dtype)

    def squared_error_backward(self, g: Array, saved: Any) -> Array:
        difference, dtype = saved
        difference *= 2 * g
        return difference.astype(dtype, copy=False)
