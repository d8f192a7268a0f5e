"""Batch norm over all replicas, group norm and RMS norm.

A module with statistics over replicas exchanges numbers through its ``peers``, which whoever wraps the model
(``DataParallel``) sets; nothing here knows ranks. Shapes: N samples, C channels, D features.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import kernels
from ..autodiff import Buffer, Tensor, ops
from ..autodiff.tensor import unwrap
from . import init
from .init import Initialiser
from .layers import length
from .module import Module


class BatchNorm(Module):
    """What :class:`BatchNorm1d` and :class:`BatchNorm2d` share.

    ``(x - mean) / sqrt(variance + eps) * weight + bias``, channel by channel. In training, mean and (biased) variance
    are those of the *global* micro-batch, over the shares of all replicas: n ranks compute what one rank computes.
    They are merged by count, in the order of ranks, in float64. In evaluation they are the running ones.

    **Collective** in training where a ``Trainer`` or ``DataParallel`` of several ranks holds the model, forward and
    backward: one small message each. Every rank runs it, also on an empty share. **Local** otherwise.

    Args:
        channels: C.
        eps: added to the variance.
        momentum: weight of a new batch in the running mean and (unbiased) variance.
        affine: whether there are weight and bias.
        global_stats: False takes the statistics of this rank's share alone, without a message, so results depend on
            the number of ranks; running statistics are then averaged over ranks after each update.
        dtype: of parameters and running statistics.
        weight_init, bias_init: initialisers; left out, ones and zeros.

    Attributes:
        weight, bias: (C,), or None.
        running_mean, running_var: buffers (C,), the same on every rank.

    Source: Ioffe, Szegedy, "Batch normalization" (2015), algorithms 1 and 2. Deviation: running statistics move by
    ``momentum`` with each batch; a batch of one value a channel gives the bias and leaves the running variance alone.
    """

    static = True
    axes: tuple[int, ...] = ()

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        global_stats: bool = True,
        dtype: Any = "float32",
        *,
        weight_init: Initialiser | None = None,
        bias_init: Initialiser | None = None,
    ) -> None:
        channels = length("channels", channels)
        if not eps > 0:
            raise ValueError(f"eps: expected a number above 0, got {eps}; 1e-5 is the default")
        if not 0.0 <= momentum <= 1.0:
            raise ValueError(f"momentum: expected a number in 0..1, got {momentum}; 0.1 is the default")
        self.eps, self.momentum = float(eps), float(momentum)
        self.communicates = bool(global_stats)
        self.averaged_buffers = () if global_stats else ("running_mean", "running_var")
        self.weight = self.bias = None
        if affine:
            self.weight = init.parameter(weight_init or init.ones, (channels,), dtype, "weight_init")
            self.bias = init.parameter(bias_init or init.zeros, (channels,), dtype, "bias_init")
        self.running_mean = Buffer(np.zeros(channels, dtype))
        self.running_var = Buffer(np.ones(channels, dtype))

    def extra_repr(self) -> str:
        """Return the arguments. **Local.**"""
        return (
            f"channels={self.running_mean.shape[0]}, eps={self.eps}, momentum={self.momentum}, "
            f"affine={self.weight is not None}, global_stats={self.communicates}"
        )

    @property
    def global_stats(self) -> bool:
        """Whether statistics are those of the global micro-batch."""
        return self.communicates

    def forward(self, x: Any, residual: Any = None, relu: bool = False) -> Tensor:
        """Apply the layer to x of shape (N, C, ...), add the residual, and take ReLU of that where it is asked for."""
        shape = unwrap(x).shape
        if len(shape) not in self.axes or shape[1] != len(self.running_mean):
            axes = " or ".join(str(count) for count in self.axes)
            raise ValueError(
                f"x: expected {axes} axes (samples, {len(self.running_mean)} channels, ...), got shape {shape}; "
                "channels are the second axis"
            )
        if self.training:
            return ops.batch_norm(
                x,
                self.weight,
                self.bias,
                residual,
                eps=self.eps,
                relu=relu,
                peers=self.peers if self.communicates else None,
                what=f"batch norm {self.path or ''}",
                running=(self.running_mean.data, self.running_var.data),
                momentum=self.momentum,
            )
        xp, mean = kernels.of(unwrap(x)).xp, self.running_mean.data
        rstd = 1 / xp.sqrt(self.running_var.data + self.eps)
        return ops.scale_channels(x, mean, rstd, self.weight, self.bias, residual, relu=relu)


class BatchNorm1d(BatchNorm):
    """Batch norm of vectors (N, C), or of sequences (N, C, L). **Collective** in training; see :class:`BatchNorm`.

    Example:
        >>> out = BatchNorm1d(2)(np.float32([[1, 5], [3, 5]]))
        >>> out.data.round(2).tolist()
        [[-1.0, 0.0], [1.0, 0.0]]
    """

    axes = (2, 3)


class BatchNorm2d(BatchNorm):
    """Batch norm of images (N, C, H, W). **Collective** in training; see :class:`BatchNorm`."""

    axes = (4,)


class GroupNorm(Module):
    """Normalise groups of channels of each sample, then scale and shift each channel. **Local.**

    Args:
        groups: parts into which the channels are cut.
        channels: C, a multiple of groups.
        eps: added to the variance.
        dtype: of the parameters.
        weight_init, bias_init: initialisers; left out, ones and zeros.

    Attributes:
        weight, bias: (C,).
    """

    static = True

    def __init__(
        self,
        groups: int,
        channels: int,
        eps: float = 1e-5,
        dtype: Any = "float32",
        *,
        weight_init: Initialiser | None = None,
        bias_init: Initialiser | None = None,
    ) -> None:
        groups, channels = length("groups", groups), length("channels", channels)
        if groups < 1 or channels % groups:
            raise ValueError(
                f"groups: expected a divisor of {channels} channels, got {groups}; 1 is one group"
            )
        self.groups, self.eps = groups, float(eps)
        self.weight = init.parameter(weight_init or init.ones, (channels,), dtype, "weight_init")
        self.bias = init.parameter(bias_init or init.zeros, (channels,), dtype, "bias_init")

    def extra_repr(self) -> str:
        """Return the arguments. **Local.**"""
        return f"groups={self.groups}, channels={self.weight.shape[0]}, eps={self.eps}"

    def forward(self, x: Any) -> Tensor:
        """Apply the layer to x of shape (N, C, ...)."""
        return ops.group_norm(x, self.groups, self.weight, self.bias, eps=self.eps)


class RMSNorm(Module):
    """Divide by the root mean square of the last axis, then scale. **Local.**

    Args:
        width: D.
        eps: added to the mean square.
        dtype: of the weight.
        weight_init: an initialiser; left out, ones.

    Attributes:
        weight: (D,).
    """

    static = True

    def __init__(
        self,
        width: int,
        eps: float = 1e-6,
        dtype: Any = "float32",
        *,
        weight_init: Initialiser | None = None,
    ) -> None:
        self.eps = float(eps)
        self.weight = init.parameter(
            weight_init or init.ones, (length("width", width),), dtype, "weight_init"
        )

    def extra_repr(self) -> str:
        """Return the arguments. **Local.**"""
        return f"width={self.weight.shape[0]}, eps={self.eps}"

    def forward(self, x: Any) -> Tensor:
        """Apply the layer to x of shape (..., D)."""
        return ops.rms_norm(x, self.weight, eps=self.eps)
