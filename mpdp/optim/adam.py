"""Adam and AdamW: steps scaled by running moments of the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .groups import Group, decays_in, non_negative, takes_no_parameters
from .optimizer import Optimizer, Shared


class Adam(Optimizer):
    """Scale each step by running estimates of the gradient's mean and square; decay is L2.

    **Local.** With g the averaged gradient, (b1, b2) = betas, wd = weight_decay and t the number of
    updates that this parameter got, this one included::

        d = g + wd p
        m = b1 m + (1 - b1) d               v = b2 v + (1 - b2) d^2
        p = p - lr m' / (sqrt(v') + eps)    with m' = m / (1 - b1^t), v' = v / (1 - b2^t)

    Args:
        lr: learning rate.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root, above 0.
        weight_decay: L2 factor, of every parameter unless a group says otherwise.
        groups: own learning rates and decays by name pattern.

    Example:
        >>> Adam(lr=0.001)
        Adam(lr=0.001, weight_decay=0.0, betas=[0.9, 0.999], eps=1e-08)

    Source: Kingma, Ba, "Adam: a method for stochastic optimization" (ICLR 2015), algorithm 1. The two
    corrections are folded into the step and eps (its section 2), which changes rounding only.
    """

    slots = ("mean", "variance")
    counted = True
    _coupled = True  # decay acts through the gradient

    @takes_no_parameters
    def __init__(
        self,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        groups: Sequence[Group] = (),
    ) -> None:
        super().__init__(lr, weight_decay, groups)
        self.betas = decays_in("betas", betas)
        self.eps = non_negative("eps", eps)
        if self.eps == 0.0:
            raise ValueError("eps: expected a number above 0, got 0.0; a zero gradient would divide by 0")

    def numbers(self, lr: float, ahead: int = 0) -> np.ndarray:
        assert self._common is not None, "parameters have different numbers of updates"
        ratio, eps = self._correction(self._common + 1 + ahead)
        rates = [lr * factor for factor in self._factors]
        shrinks = [self._decay(rate, decay)[1] for rate, decay in zip(rates, self._decays)]
        return np.array([[rate * ratio for rate in rates], [eps] * len(rates), shrinks])

    def _update_captured(
        self, gradient: Any, start: int, stop: int, shared: Shared, numbers: list[Any], decay: Any
    ) -> None:
        step, eps, shrink = numbers
        coupled, shrinks = self._decay(0.0, decay)
        self._run(gradient, start, stop, shared, step, eps, coupled, shrinks if self._coupled else shrink)

    def _update(self, gradient: Any, start: int, stop: int, shared: Shared, lr: Any, decay: Any) -> None:
        ratio, eps = self._corrections(start, stop)
        coupled, shrink = self._decay(lr, decay)
        self._run(gradient, start, stop, shared, lr * ratio, eps, coupled, shrink)

    def _run(
        self,
        gradient: Any,
        start: int,
        stop: int,
        shared: Shared,
        step: Any,
        eps: Any,
        coupled: Any,
        shrink: Any,
    ) -> None:
        self._kernels.adam(
            self._weights[start:stop],
            gradient,
            self.state["mean"][start:stop],
            self.state["variance"][start:stop],
            scale=shared.scale,
            step=step,
            eps=eps,
            betas=self.betas,
            weight_decay=coupled,
            shrink=shrink,
            scratch=self._scratch,
            copy=self._working_copy(start, stop),
            when=shared.when,
            limit=shared.limit,
        )

    def _decay(self, lr: Any, decay: Any) -> tuple[Any, Any]:
        """Return the L2 factor on the gradient's side and the factor on the weights themselves."""
        return decay, 1.0

    def _corrections(self, start: int, stop: int) -> tuple[Any, Any]:
        """Return sqrt(1 - b2^t) / (1 - b1^t) and eps sqrt(1 - b2^t): floats, or arrays a block.

        Both cases take their numbers from the same function, so they agree to the bit.
        """
        if self._common is not None:
            return self._correction(self._common + 1)
        counts, which = np.unique(self.updates + 1, return_inverse=True)
        table = np.array([self._correction(int(count)) for count in counts])[which]
        return self._column(table[:, 0], start, stop), self._column(table[:, 1], start, stop)

    def _correction(self, count: int) -> tuple[float, float]:
        root = math.sqrt(1.0 - self.betas[1] ** count)
        return root / (1.0 - self.betas[0] ** count), self.eps * root

    def _check_dtype(self, dtype: Any) -> None:
        if np.dtype(dtype).type(self._correction(1)[1]) == 0:
            raise ValueError(
                f"eps: expected a number that {np.dtype(dtype).name} can hold, got {self.eps}; use 1e-8"
            )

    def _hyper_parameters(self) -> dict[str, Any]:
        return {"betas": list(self.betas), "eps": self.eps}


class AdamW(Adam):
    """Adam with decoupled decay: weights shrink by a factor of their own, outside the moments.

    **Local.** As :class:`Adam` with d = g, and before the step::

        p = (1 - lr wd) p

    where lr includes schedule and group.

    Args:
        lr: learning rate.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root, above 0.
        weight_decay: decoupled factor, of every parameter unless a group says otherwise.
        groups: own learning rates and decays by name pattern.

    Example:
        >>> AdamW(lr=3e-4, weight_decay=0.1, groups=[Group("*.bias", weight_decay=0.0)])
        AdamW(lr=0.0003, weight_decay=0.1, betas=[0.9, 0.999], eps=1e-08, groups=...)

    Source: Loshchilov, Hutter, "Decoupled weight decay regularization" (ICLR 2019), algorithm 2, with
    PyTorch's reading: the decay is multiplied by the learning rate.
    """

    @takes_no_parameters
    def __init__(
        self,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        groups: Sequence[Group] = (),
    ) -> None:
        super().__init__(lr, betas, eps, weight_decay, groups)

    _coupled = False

    def _decay(self, lr: Any, decay: Any) -> tuple[Any, Any]:
        return 0.0, 1.0 - lr * decay
