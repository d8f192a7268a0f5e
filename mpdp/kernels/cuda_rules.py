"""Lion, LAMB and averages on a GPU: one launch a call, with NumPy's bits but for LAMB's sums. Part of ``kernels.cuda``.

The docstrings are in ``rules``. What changes from step to step may lie in device memory, as for ``cuda_updates``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .cuda_source import THREADS, number, types
from .cuda_updates import CudaUpdates, blocks_of, built_types, limits
from .rules import RuleKernels


class CudaRules(CudaUpdates, RuleKernels):
    """The rules beside sgd and adam. **Local.**"""

    def lion(
        self,
        weights: Any,
        gradient: Any,
        momentum: Any,
        *,
        scale: Any,
        lr: Any,
        betas: tuple[float, float],
        shrink: Any,
        scratch: Any,
        copy: Any = None,
        when: Any = None,
        limit: float | None = None,
    ) -> None:
        if weights.size == 0:
            return
        built = built_types(weights, gradient, scratch, copy)
        shrinks = not (isinstance(shrink, float) and shrink == 1.0)
        scale, lr, shrink = self.there(scale), self.there(lr), self.there(shrink)
        self.launch(
            "updates", "lion", built, blocks_of(weights), THREADS, weights, copy, gradient, momentum, weights.size,
            *number(scale), *number(lr), *(float(beta) for beta in betas), *number(shrink), shrinks, *limits(limit),
            when,
        )  # fmt: skip

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
        scale: Any,
        correction: Any,
        eps: Any,
        betas: tuple[float, float],
        weight_decay: Any,
        scratch: Any,
        when: Any = None,
        limit: float | None = None,
    ) -> None:
        if len(out) == 0:
            return
        built = built_types(weights, gradient, scratch, None)
        decays = not (isinstance(weight_decay, float) and weight_decay == 0.0)
        scale, correction = self.there(scale), self.there(correction)
        eps, weight_decay = self.there(eps), self.there(weight_decay)
        self.launch(
            "updates", "lamb_moments", built, len(out), THREADS, weights, gradient, mean, variance, edges, offset, out,
            *number(scale), *number(correction), *number(eps), *(float(beta) for beta in betas),
            *number(weight_decay), decays, *limits(limit), when,
        )  # fmt: skip

    def trust_ratios(self, sums: Any, spans: Any) -> Any:
        out = self.xp.empty(len(spans), np.float64)
        if len(spans):
            built = types(np.float64, np.float64)
            self.launch("spans", "trust_ratios", built, len(spans), THREADS, sums, spans, out)
        return out

    def lamb(
        self,
        weights: Any,
        mean: Any,
        variance: Any,
        *,
        lr: Any,
        ratios: Any,
        owners: Any,
        correction: Any,
        eps: Any,
        weight_decay: Any,
        scratch: Any,
        copy: Any = None,
        when: Any = None,
    ) -> None:
        if weights.size == 0:
            return
        built = built_types(weights, mean, scratch, copy)
        decays = not (isinstance(weight_decay, float) and weight_decay == 0.0)
        lr, correction = self.there(lr), self.there(correction)
        eps, weight_decay = self.there(eps), self.there(weight_decay)
        self.launch(
            "updates", "lamb", built, blocks_of(weights), THREADS, weights, copy, mean, variance, weights.size,
            *number(lr), ratios, owners, *number(correction), *number(eps), *number(weight_decay), decays, when,
        )  # fmt: skip

    def average(self, average: Any, weights: Any, *, decay: float, scratch: Any, when: Any = None) -> None:
        if average.size:
            built = built_types(weights, weights, scratch, None)
            self.launch(
                "updates", "average", built, blocks_of(average), THREADS, average, weights, average.size,
                float(decay), when,
            )  # fmt: skip
