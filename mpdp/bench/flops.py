"""Floating-point operations of a workload's step: those of the products that its model is made of.

A product of (m, k) by (k, n) is ``2 m n k`` operations. Backward needs two products of the same size: one for the
weight's gradient, one for the input's, which the first layer of a network does not need. A convolution is a product of
m = output pixels of all images, n = output channels, k = input channels x window. Causal attention is two products
(scores, mix) a head, over the ``T (T + 1) / 2`` pairs of positions that see each other; its backward four. What a fused
kernel computes a second time does not count, nor do norms, activations, losses and optimizers: they are no products.

Model FLOP utilisation is these operations, over the time of a step, over what large products reach on this device
(``ceiling``).

Shapes: m rows, n columns, k inner.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..nn.models.transformer import PRESETS


@dataclass(frozen=True)
class Product:
    """Some equal products of a model's forward pass.

    Attributes:
        name: of the layer.
        m, n, k: sizes of one.
        count: how many.
        input_gradient: whether backward computes that of the left operand.

    Example:
        >>> Product("fc", 2, 3, 4).forward, Product("fc", 2, 3, 4).step
        (48, 144)
    """

    name: str
    m: int
    n: int
    k: int
    count: int = 1
    input_gradient: bool = True

    @property
    def forward(self) -> int:
        """Operations of the forward pass."""
        return 2 * self.m * self.n * self.k * self.count

    @property
    def step(self) -> int:
        """Operations of forward and backward."""
        return self.forward * (3 if self.input_gradient else 2)


def products(name: str, batch: int) -> list[Product]:
    """Return the products of a workload's forward pass with ``batch`` samples. **Local.**"""
    if name == "mlp":
        return [
            Product("0", batch, 512, 784, input_gradient=False),
            Product("2", batch, 512, 512),
            Product("4", batch, 10, 512),
        ]
    if name == "convnet":
        return [
            Product("conv1", batch * 26 * 26, 32, 9, input_gradient=False),
            Product("conv2", batch * 24 * 24, 64, 32 * 9),
            Product("linear1", batch, 128, 64 * 12 * 12),
            Product("linear2", batch, 10, 128),
        ]
    return _resnet50(batch) if name == "resnet50" else _gpt(batch, **PRESETS[name])


def step_flops(name: str, batch: int) -> int:
    """Return the operations of one step of a workload with ``batch`` samples. **Local.**

    Example:
        >>> step_flops("mlp", 1) == 2 * (2 * 784 * 512 + 3 * 512 * 512 + 3 * 512 * 10)
        True
    """
    return sum(product.step for product in products(name, batch))


def _gpt(batch: int, layers: int, width: int, heads: int, context: int, vocabulary: int) -> list[Product]:
    rows = batch * context
    pairs = context * (context + 1) // 2
    return [
        Product("qkv", rows, 3 * width, width, layers),
        Product("attention", pairs, 1, width // heads, 2 * layers * heads * batch),
        Product("projection", rows, width, width, layers),
        Product("up", rows, 4 * width, width, layers),
        Product("down", rows, width, 4 * width, layers),
        Product("head", rows, vocabulary, width),
    ]


def _resnet50(batch: int) -> list[Product]:
    """The layout of torchvision: stride in the 3 x 3, a 1 x 1 convolution beside the first block of each stage."""
    found = [Product("conv1", batch * 112 * 112, 64, 3 * 49, input_gradient=False)]
    inputs, side = 64, 56
    for stage, depth in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        outputs = 4 * width
        for block in range(depth):
            before = side
            if block == 0 and stage > 0:
                side //= 2
            path = f"layer{stage + 1}.{block}."
            found += [
                Product(path + "conv1", batch * before**2, width, inputs),
                Product(path + "conv2", batch * side**2, width, 9 * width),
                Product(path + "conv3", batch * side**2, outputs, width),
            ]
            if block == 0:
                found.append(Product(path + "downsample", batch * side**2, outputs, inputs))
            inputs = outputs
    return [*found, Product("fc", batch, 1000, 2048)]
