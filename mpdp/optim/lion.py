"""Lion: steps of one size, along the sign of a momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .groups import Group, decays_in, takes_no_parameters
from .optimizer import Optimizer, Shared


class Lion(Optimizer):
    """Step by the learning rate along the sign of an interpolated momentum; decay is decoupled.

    **Local.** With g the averaged gradient, (b1, b2) = betas, wd = weight_decay::

        p = (1 - lr wd) p - lr sign(b1 m + (1 - b1) g)
        m = b2 m + (1 - b2) g                               (sign(0) is 0; m starts from 0)

    Every weight moves by lr, whatever its gradient: take a learning rate 3 to 10 times below AdamW's, and a decay as
    many times above. It keeps one moment, AdamW two.

    Args:
        lr: learning rate.
        betas: decay of the momentum inside the sign, and of the momentum itself, each in [0, 1).
        weight_decay: decoupled factor, of every parameter unless a group says otherwise.
        groups: own learning rates and decays by name pattern.

    Example:
        >>> Lion(lr=1e-4, weight_decay=1.0)
        Lion(lr=0.0001, weight_decay=1.0, betas=[0.9, 0.99])

    Source: Chen et al., "Symbolic discovery of optimization algorithms" (NeurIPS 2023), program 1 and algorithm 2. As
    in the authors' code the weights shrink before the step.
    """

    slots = ("momentum",)

    @takes_no_parameters
    def __init__(
        self,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        groups: Sequence[Group] = (),
    ) -> None:
        super().__init__(lr, weight_decay, groups)
        self.betas = decays_in("betas", betas)

    def numbers(self, lr: float, ahead: int = 0) -> np.ndarray:
        rates = [lr * factor for factor in self._factors]
        return np.array([rates, [1.0 - rate * decay for rate, decay in zip(rates, self._decays)]])

    def _update_captured(
        self, gradient: Any, start: int, stop: int, shared: Shared, numbers: list[Any], decay: Any
    ) -> None:
        self._run(gradient, start, stop, shared, *numbers)

    def _update(self, gradient: Any, start: int, stop: int, shared: Shared, lr: Any, decay: Any) -> None:
        self._run(gradient, start, stop, shared, lr, 1.0 - lr * decay)

    def _run(self, gradient: Any, start: int, stop: int, shared: Shared, lr: Any, shrink: Any) -> None:
        self._kernels.lion(
            self._weights[start:stop],
            gradient,
            self.state["momentum"][start:stop],
            scale=shared.scale,
            lr=lr,
            betas=self.betas,
            shrink=shrink,
            scratch=self._scratch,
            copy=self._working_copy(start, stop),
            when=shared.when,
            limit=shared.limit,
        )

    def _hyper_parameters(self) -> dict[str, Any]:
        return {"betas": list(self.betas)}
