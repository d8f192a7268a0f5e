"""Layers on images (N, C, H, W): convolution and pooling, with PyTorch's default initial values.

Shapes: N samples, C channels, O outputs, H x W pixels, I x J the window.
"""

from __future__ import annotations

import math
from typing import Any

from ..autodiff import Tensor, ops
from ..autodiff.ops.windows import pair
from . import init
from .init import Initialiser
from .layers import length
from .module import Module

Pair = int | tuple[int, int]


class Conv2d(Module):
    """Cross-correlate images with learnt windows; see ``ops.conv2d`` for the formula. **Local.**

    Args:
        inputs, outputs: C and O.
        size: of the window, an integer or a pair (down, across).
        stride, padding, dilation: pixels, an integer or a pair.
        groups: parts into which inputs and outputs are cut; ``groups=inputs`` is a depthwise convolution.
        bias: whether there is one.
        dtype: of the parameters.
        weight_init, bias_init: initialisers; left out, both are uniform on +-1 / sqrt(C / groups * I * J), as in
            PyTorch.

    Attributes:
        weight: (O, C / groups, I, J).
        bias: (O,) or None.

    Example:
        >>> import numpy as np
        >>> Conv2d(3, 8, 3, stride=2, padding=1)(np.zeros((5, 3, 32, 32), "float32")).shape
        (5, 8, 16, 16)
    """

    static = True

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        dtype: Any = "float32",
        *,
        weight_init: Initialiser | None = None,
        bias_init: Initialiser | None = None,
    ) -> None:
        inputs, outputs = length("inputs", inputs), length("outputs", outputs)
        groups = length("groups", groups)
        if groups < 1 or inputs % groups or outputs % groups:
            raise ValueError(
                f"groups: expected a divisor of {inputs} inputs and {outputs} outputs, got {groups}; 1 is no groups"
            )
        size = pair("size", size, 1)
        self.stride, self.padding = pair("stride", stride, 1), pair("padding", padding, 0)
        self.dilation, self.groups = pair("dilation", dilation, 1), groups
        shape = (outputs, inputs // groups, *size)
        bound = 1.0 / math.sqrt(max(math.prod(shape[1:]), 1))
        default = init.uniform(-bound, bound)
        self.weight = init.parameter(weight_init or default, shape, dtype, "weight_init")
        self.bias = init.parameter(bias_init or default, (outputs,), dtype, "bias_init") if bias else None

    def extra_repr(self) -> str:
        """Return the arguments. **Local.**"""
        outputs, inputs, *size = self.weight.shape
        return (
            f"inputs={inputs * self.groups}, outputs={outputs}, size={tuple(size)}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, bias={self.bias is not None}"
        )

    def forward(self, x: Any, relu: bool = False) -> Tensor:
        """Apply the layer to x of shape (N, C, H, W), and ReLU to the result where that is asked for."""
        return ops.conv2d(
            x,
            self.weight,
            self.bias,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            relu=relu,
        )


class MaxPool2d(Module):
    """Take the maximum of each window. **Local.**

    Args:
        size: of the window, an integer or a pair (down, across).
        stride: pixels between windows; left out, the size.
        padding: pixels around the image, at most half the size; they never win.
    """

    static = True

    def __init__(self, size: Pair, stride: Pair | None = None, padding: Pair = 0) -> None:
        self.size = pair("size", size, 1)
        self.stride = self.size if stride is None else pair("stride", stride, 1)
        self.padding = pair("padding", padding, 0)

    def extra_repr(self) -> str:
        """Return the arguments. **Local.**"""
        return f"size={self.size}, stride={self.stride}, padding={self.padding}"

    def forward(self, x: Any, relu: bool = False) -> Tensor:
        """Apply the layer to x of shape (N, C, H, W), and ReLU to the result where that is asked for."""
        return ops.max_pool2d(x, self.size, stride=self.stride, padding=self.padding, relu=relu)


class AvgPool2d(Module):
    """Take the mean of each window. **Local.**

    Args:
        size: of the window, an integer or a pair (down, across).
        stride: pixels between windows; left out, the size.
        padding: pixels around the image, at most half the size; they are 0 and count.
    """

    static = True

    def __init__(self, size: Pair, stride: Pair | None = None, padding: Pair = 0) -> None:
        self.size = pair("size", size, 1)
        self.stride = self.size if stride is None else pair("stride", stride, 1)
        self.padding = pair("padding", padding, 0)

    def extra_repr(self) -> str:
        """Return the arguments. **Local.**"""
        return f"size={self.size}, stride={self.stride}, padding={self.padding}"

    def forward(self, x: Any) -> Tensor:
        """Apply the layer to x of shape (N, C, H, W)."""
        return ops.avg_pool2d(x, self.size, stride=self.stride, padding=self.padding)


class GlobalAvgPool2d(Module):
    """Take the mean of each channel over all pixels: (N, C, H, W) to (N, C). **Local.**"""

    static = True

    def forward(self, x: Any) -> Tensor:
        """Apply the layer to x of shape (N, C, H, W)."""
        return ops.global_avg_pool2d(x)
