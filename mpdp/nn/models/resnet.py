"""ResNet for images, with the layout and the parameter names of torchvision's models.

Source: He, Zhang, Ren, Sun, "Deep residual learning for image recognition" (2016), table 1. Deviation, as there: a
bottleneck takes its stride in the 3 x 3 convolution.

Shapes: N samples, C channels, H x W pixels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ...autodiff import Tensor
from ...kernels import random
from ...kernels.random import Key
from ..convolution import Conv2d, GlobalAvgPool2d, MaxPool2d
from ..layers import Linear, Sequential
from ..module import Module
from ..normalisation import BatchNorm2d
from .registry import registered

Norm = Callable[[int], BatchNorm2d]


def _by_outputs(key: Key, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Draw from the normal distribution of variance 2 / (O * I * J)."""
    std = math.sqrt(2.0 / max(shape[0] * math.prod(shape[2:]), 1))
    return (std * random.normal(key, math.prod(shape))).reshape(shape).astype(dtype)


def _conv(inputs: int, outputs: int, size: int, stride: int, dtype: Any) -> Conv2d:
    return Conv2d(inputs, outputs, size, stride, size // 2, bias=False, dtype=dtype, weight_init=_by_outputs)


class BasicBlock(Module):
    """Two convolutions of 3 x 3 beside the identity. **Local** but for its batch norms."""

    static = True
    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm, dtype: Any) -> None:
        self.conv1, self.bn1 = _conv(inputs, width, 3, stride, dtype), norm(width)
        self.conv2, self.bn2 = _conv(width, width, 3, 1, dtype), norm(width)
        self.downsample = _downsample(inputs, width, stride, norm, dtype)

    def forward(self, x: Any) -> Tensor:
        """Apply the block to x of shape (N, C, H, W)."""
        out = self.bn1(self.conv1(x), relu=True)
        beside = x if self.downsample is None else self.downsample(x)
        return self.bn2(self.conv2(out), beside, relu=True)


class Bottleneck(Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1 beside the identity. **Local** but for its batch norms."""

    static = True
    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm, dtype: Any) -> None:
        outputs = width * self.expansion
        self.conv1, self.bn1 = _conv(inputs, width, 1, 1, dtype), norm(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride, dtype), norm(width)
        self.conv3, self.bn3 = _conv(width, outputs, 1, 1, dtype), norm(outputs)
        self.downsample = _downsample(inputs, outputs, stride, norm, dtype)

    def forward(self, x: Any) -> Tensor:
        """Apply the block to x of shape (N, C, H, W)."""
        out = self.bn1(self.conv1(x), relu=True)
        out = self.bn2(self.conv2(out), relu=True)
        beside = x if self.downsample is None else self.downsample(x)
        return self.bn3(self.conv3(out), beside, relu=True)


def _downsample(inputs: int, outputs: int, stride: int, norm: Norm, dtype: Any) -> Sequential | None:
    """Return what makes the identity of the block's output shape, or None where it is so already."""
    if stride == 1 and inputs == outputs:
        return None
    return Sequential(_conv(inputs, outputs, 1, stride, dtype), norm(outputs))


class ResNet(Module):
    """Classify images. Its batch norms are **collective** in training, see ``nn.BatchNorm2d``.

    Args:
        block: :class:`BasicBlock` or :class:`Bottleneck`.
        depths: blocks of each of the four stages.
        classes: outputs.
        channels: of an image.
        global_stats: whether batch norms take the statistics of all ranks.
        dtype: of the parameters.
    """

    static = True

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        classes: int = 1000,
        channels: int = 3,
        global_stats: bool = True,
        dtype: Any = "float32",
    ) -> None:
        norm = functools.partial(BatchNorm2d, global_stats=global_stats, dtype=dtype)
        self.conv1, self.bn1 = _conv(channels, 64, 7, 2, dtype), norm(64)
        self.maxpool = MaxPool2d(3, 2, 1)
        inputs = 64
        for stage, depth in enumerate(depths):
            width = 64 << stage
            blocks = []
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(block(inputs, width, stride, norm, dtype))
                inputs = width * block.expansion
            setattr(self, f"layer{stage + 1}", Sequential(*blocks))
        self.avgpool = GlobalAvgPool2d()
        self.fc = Linear(inputs, classes, dtype=dtype)

    def forward(self, x: Any) -> Tensor:
        """Return logits (N, classes) of images (N, channels, H, W)."""
        x = self.maxpool(self.bn1(self.conv1(x)), relu=True)  # as ReLU before it
        for stage in (1, 2, 3, 4):
            x = getattr(self, f"layer{stage}")(x)
        return self.fc(self.avgpool(x))


@registered
def resnet18(
    classes: int = 1000, channels: int = 3, global_stats: bool = True, dtype: Any = "float32"
) -> ResNet:
    """Return a ResNet of 18 layers, with 11,689,512 parameters for 1000 classes. **Local.**

    Arguments as in :class:`ResNet`.
    """
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, channels, global_stats, dtype)


@registered
def resnet50(
    classes: int = 1000, channels: int = 3, global_stats: bool = True, dtype: Any = "float32"
) -> ResNet:
    """Return a ResNet of 50 layers, with 25,557,032 parameters for 1000 classes. **Local.**

    Arguments as in :class:`ResNet`.
    """
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, channels, global_stats, dtype)
