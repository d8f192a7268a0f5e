"""SGD: gradient descent with momentum and Nesterov's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .groups import Group, non_negative, takes_no_parameters
from .optimizer import Optimizer, Shared


class SGD(Optimizer):
    """Descend along the gradient, with momentum.

    **Local.** With g the averaged gradient, wd = weight_decay, mu = momentum::

        d = g + wd p
        v = mu v + d                p = p - lr v                  (first v is d)
        nesterov:                   p = p - lr (d + mu v)

    Args:
        lr: learning rate.
        momentum: factor on the old velocity, in [0, 1).
        weight_decay: L2 factor, of every parameter unless a group says otherwise.
        nesterov: look ahead along the velocity; needs momentum.
        groups: own learning rates and decays by name pattern.

    Example:
        >>> SGD(lr=0.1, momentum=0.9, groups=[Group("*.bias", weight_decay=0.0)])
        SGD(lr=0.1, weight_decay=0.0, momentum=0.9, nesterov=False, groups=...)

    Source: Sutskever, Martens, Dahl, Hinton, "On the importance of initialization and momentum in deep
    learning" (ICML 2013), equations 1 to 4, in PyTorch's form: the learning rate is not inside v, so a
    schedule does not rescale it.
    """

    @takes_no_parameters
    def __init__(
        self,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        groups: Sequence[Group] = (),
    ) -> None:
        super().__init__(lr, weight_decay, groups)
        self.momentum = non_negative("momentum", momentum)
        if self.momentum >= 1.0:
            raise ValueError(f"momentum: expected a number in [0, 1), got {momentum}; 0.9 is usual")
        self.nesterov = bool(nesterov)
        if self.nesterov and self.momentum == 0.0:
            raise ValueError("nesterov: expected momentum above 0 with it, got 0.0; pass momentum=0.9")
        self.slots = ("momentum",) if self.momentum else ()

    def _update_captured(
        self, gradient: Any, start: int, stop: int, shared: Shared, numbers: list[Any], decay: Any
    ) -> None:
        self._update(gradient, start, stop, shared, numbers[0], decay)

    def _update(self, gradient: Any, start: int, stop: int, shared: Shared, lr: Any, decay: Any) -> None:
        self._kernels.sgd(
            self._weights[start:stop],
            gradient,
            self.state["momentum"][start:stop] if self.slots else None,
            scale=shared.scale,
            lr=lr,
            momentum=self.momentum,
            weight_decay=decay,
            nesterov=self.nesterov,
            scratch=self._scratch,
            copy=self._working_copy(start, stop),
            when=shared.when,
            limit=shared.limit,
        )

    def _hyper_parameters(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "nesterov": self.nesterov}
