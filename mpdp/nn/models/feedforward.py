"""Small networks for vectors and images: an MLP and a convolutional network.

Shapes: N samples, C channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ...autodiff import Tensor
from ..convolution import Conv2d, MaxPool2d
from ..layers import Flatten, Linear, ReLU, Sequential
from ..module import Module
from .registry import registered


@registered
def mlp(sizes: Sequence[int] = (784, 512, 512, 10), dtype: Any = "float32") -> Sequential:
    """Return linear layers with biases, and ReLU between them. **Local.**

    Parameters are named as those of a ``Sequential``: ``0.weight``, ``0.bias``, ``2.weight``, ...

    Args:
        sizes: features of the input, of each hidden layer and of the output.
        dtype: of the parameters.

    Raises:
        ValueError: fewer than two sizes.

    Example:
        >>> [p.shape for p in mlp((4, 8, 2)).parameters()]
        [(8, 4), (8,), (2, 8), (2,)]
    """
    sizes = tuple(sizes)
    if len(sizes) < 2:
        raise ValueError(f"sizes: expected two numbers of features or more, got {sizes}; as in (784, 10)")
    layers: list[Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [ReLU(), Linear(inputs, outputs, dtype=dtype)]
    return Sequential(*layers[1:])


class ConvNet(Module):
    """Two convolutions of 3 x 3, max-pooling and two linear layers, for small images. **Local.**

    Convolution to 32 channels, ReLU, convolution to 64, ReLU, max-pool 2, flatten, linear to 128, ReLU, linear. There
    is no padding.

    Args:
        classes: outputs.
        channels, size: of an image, ``size`` pixels high and wide.
        dtype: of the parameters.

    Raises:
        ValueError: images of fewer than 6 pixels.

    Example:
        >>> sum(p.size for p in convnet().parameters())
        1199882
    """

    static = True

    def __init__(self, classes: int = 10, channels: int = 1, size: int = 28, dtype: Any = "float32") -> None:
        side = (size - 4) // 2
        if side < 1:
            raise ValueError(f"size: expected images of 6 pixels or more, got {size}; enlarge them")
        self.conv1 = Conv2d(channels, 32, 3, dtype=dtype)
        self.conv2 = Conv2d(32, 64, 3, dtype=dtype)
        self.pool = MaxPool2d(2)
        self.flatten = Flatten()
        self.linear1 = Linear(64 * side * side, 128, dtype=dtype, activation="relu")
        self.linear2 = Linear(128, classes, dtype=dtype)

    def forward(self, x: Any) -> Tensor:
        """Return logits (N, classes) of images (N, channels, size, size)."""
        x = self.conv1(x, relu=True)
        x = self.pool(self.conv2(x), relu=True)  # as ReLU before it: the maximum of what is above 0
        return self.linear2(self.linear1(self.flatten(x)))


@registered
def convnet(classes: int = 10, channels: int = 1, size: int = 28, dtype: Any = "float32") -> ConvNet:
    """Return a :class:`ConvNet`. **Local.**"""
    return ConvNet(classes, channels, size, dtype)
