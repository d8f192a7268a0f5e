"""Layer norm with what stands beside it, made of its parts: for the CPU, and for rows that a GPU has no kernel for.

The docstrings are in ``kernels.base``.
"""

from __future__ import annotations

from typing import Any

from .base import Array, Kernels


class NormsInParts(Kernels):
    """The sum before a layer norm, and all of its gradients, in one call after the other. **Local.**"""

    def add_layer_norm(
        self, x: Array, added: Array, weight: Array | None, bias: Array | None, eps: float
    ) -> tuple[Array, Array, Any]:
        total = self.store(added, x.copy(), 1.0)
        return total, *self.layer_norm(total, weight, bias, eps)

    def layer_norm_gradients(
        self,
        g: Array,
        saved: Any,
        weight: Array | None,
        before: Array | None,
        x: bool,
        weight_into: tuple[Array, float] | None,
        bias_into: tuple[Array, float] | None,
    ) -> Array | None:
        if weight_into is not None:
            self.layer_norm_weight_gradient(g, saved, *weight_into)
        if bias_into is not None:
            self.sum_to(g, g.shape[1:], *bias_into)
        if not x:
            return None
        gradient = self.layer_norm_backward(g, saved, weight)
        return gradient if before is None else self.store(before, gradient, 1.0)
