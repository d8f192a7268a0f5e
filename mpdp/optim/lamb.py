"""LAMB: Adam's steps, scaled for each parameter by the norm of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ..kernels.updates import UpdateKernels
from .adam import Adam
from .groups import Group, takes_no_parameters
from .held import Ranges
from .optimizer import Shared
from .segments import Segments


class LAMB(Adam):
    """Scale Adam's step of each parameter to the norm of its weights, for large batches.

    **Local.** With g the averaged gradient, (b1, b2) = betas, wd = weight_decay, t the number of updates that this
    parameter got, this one included, and norms over the whole parameter::

        m = b1 m + (1 - b1) g               v = b2 v + (1 - b2) g^2
        u = m' / (sqrt(v') + eps) + wd p    with m' = m / (1 - b1^t), v' = v / (1 - b2^t)
        p = p - lr r u                      with r = |p| / |u|, or 1 where either norm is 0

    The norms are float64 sums over fixed spans of 4096 elements of the layout, cut where parameters begin, and added in
    order: they don't depend on which rank holds what. It works in two passes, 10 reads and writes of an array in place
    of AdamW's 7.

    Args:
        lr: learning rate.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root, above 0.
        weight_decay: decoupled factor, of every parameter unless a group says otherwise.
        groups: own learning rates and decays by name pattern.
        unscaled: name patterns of parameters with r = 1, such as biases and the weights of norms.

    Example:
        >>> LAMB(lr=2e-3, groups=[Group("*.bias", weight_decay=0.0)], unscaled=["*.bias"])
        LAMB(lr=0.002, weight_decay=0.01, betas=[0.9, 0.999], eps=1e-06, unscaled=['*.bias'], groups=...)

    Source: You et al., "Large batch optimization for deep learning: training BERT in 76 minutes" (ICLR 2020), algorithm
    2, with phi the identity and both corrections of the moments. The gradient isn't normalised first, as some
    implementations do: take ``clip_norm=1.0`` for that. The authors' code leaves parameters without decay unscaled;
    here ``unscaled`` says so.
    """

    needs_sums = True

    @takes_no_parameters
    def __init__(
        self,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        groups: Sequence[Group] = (),
        unscaled: Sequence[str] = (),
    ) -> None:
        super().__init__(lr, betas, eps, weight_decay, groups)
        if isinstance(unscaled, str) or not all(isinstance(pattern, str) for pattern in unscaled):
            raise TypeError(f"unscaled: expected a list of name patterns, got {unscaled!r}; as in ['*.bias']")
        self.unscaled = tuple(unscaled)
        self._segments: Segments | None = None

    def bind(
        self, layout: Any, weights: Any, kernels: UpdateKernels, copy: Any = None, held: Ranges | None = None
    ) -> None:
        if layout is self._layout and weights is self._weights:
            return
        names = [entry.name for entry in layout.entries]
        for pattern in self.unscaled:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"unscaled: expected each pattern to fit a parameter, got {pattern!r} which fits none of "
                    f"{len(names)}; correct or remove it"
                )
        super().bind(layout, weights, kernels, copy, held)
        scaled = [not any(fnmatchcase(e.name, p) for p in self.unscaled) for e in layout.trainable]
        self._segments = Segments(layout, scaled)
        self._edges = kernels.block_numbers(self._segments.edges)
        self._spans = kernels.block_numbers(self._segments.spans)
        self._owners = kernels.block_numbers(self._plan.parameter_of_block())
        self.sums = kernels.flat_zeros(2 * self._segments.count, np.float64).reshape(-1, 2)

    def unbind(self) -> None:
        super().unbind()
        self._segments = self._edges = self._spans = self.sums = None

    def rows(self, start: int, stop: int) -> slice:
        assert self._segments is not None, "bind() comes first"
        return self._segments.rows(start, stop)

    def numbers(self, lr: float, ahead: int = 0) -> np.ndarray:
        assert self._common is not None, "parameters have different numbers of updates"
        pair = self._correction(self._common + 1 + ahead)
        return np.array(
            [[lr * factor for factor in self._factors], *([x] * len(self._factors) for x in pair)]
        )

    def prepare(
        self,
        gradient: Any,
        start: int,
        stop: int,
        scale: Any,
        *,
        used: Any = None,
        clip_value: float | None = None,
    ) -> Any:
        shared, rows = Shared(scale, clip_value), self._fresh(start, stop, used)
        for first, last, _, decay in self._pieces(start, stop, used, 1.0):
            self._moments(gradient[first:last], first, last, shared, self._corrections(first, last), decay)
        return self.sums[rows]

    def prepare_range_captured(
        self,
        gradient: Any,
        start: int,
        stop: int,
        *,
        scale: Any,
        numbers: Any,
        when: Any,
        used: Any = None,
        clip_value: float | None = None,
    ) -> Any:
        shared, rows = Shared(scale, clip_value, when), self._fresh(start, stop, used)
        numbers = numbers.reshape(-1, len(self._factors))
        for first, last, (_, *corrections), decay in self._captured_pieces(start, stop, numbers, used):
            self._moments(gradient[first:last], first, last, shared, corrections, decay)
        return self.sums[rows]

    def _fresh(self, start: int, stop: int, used: Any) -> slice:
        """Return the rows of a range; those of parameters that are not used, which nothing writes, become 0."""
        rows = self.rows(start, stop)
        if used is not None:
            self.sums[rows] = 0.0
        return rows

    def _moments(
        self, gradient: Any, start: int, stop: int, shared: Shared, corrections: Sequence[Any], decay: Any
    ) -> None:
        rows = self.rows(start, stop)
        self._kernels.lamb_moments(
            self._weights[start:stop],
            gradient,
            self.state["mean"][start:stop],
            self.state["variance"][start:stop],
            edges=self._edges[rows.start : rows.stop + 1],
            offset=start,
            out=self.sums[rows],
            scale=shared.scale,
            correction=corrections[0],
            eps=corrections[1],
            betas=self.betas,
            weight_decay=decay,
            scratch=self._scratch,
            when=shared.when,
            limit=shared.limit,
        )

    def _settled(self, sums: Any) -> Any:
        """Return the ratio of each parameter."""
        return self._kernels.trust_ratios(sums, self._spans)

    def _update_captured(
        self, gradient: Any, start: int, stop: int, shared: Shared, numbers: list[Any], decay: Any
    ) -> None:
        lr, *corrections = numbers
        self._step(start, stop, shared, lr, corrections, decay)

    def _update(self, gradient: Any, start: int, stop: int, shared: Shared, lr: Any, decay: Any) -> None:
        self._step(start, stop, shared, lr, self._corrections(start, stop), decay)

    def _step(
        self, start: int, stop: int, shared: Shared, lr: Any, corrections: Sequence[Any], decay: Any
    ) -> None:
        block = self._layout.BLOCK
        self._kernels.lamb(
            self._weights[start:stop],
            self.state["mean"][start:stop],
            self.state["variance"][start:stop],
            lr=lr,
            ratios=shared.sums,
            owners=self._owners[start // block : stop // block],
            correction=corrections[0],
            eps=corrections[1],
            weight_decay=decay,
            scratch=self._scratch,
            copy=self._working_copy(start, stop),
            when=shared.when,
        )

    def _hyper_parameters(self) -> dict[str, Any]:
        return {**super()._hyper_parameters(), "unscaled": list(self.unscaled)}
