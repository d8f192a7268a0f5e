"""GPT: a decoder-only transformer with pre-norm blocks, from plain operations.

Source: Radford et al., "Language models are unsupervised multitask learners" (2019), section 2.3; Vaswani et al.,
"Attention is all you need" (2017), equation 1. Deviation: initial values are normal(0, 0.02) everywhere, without the
scaling of residual layers by depth.

Shapes: N sequences, T tokens, C width, H heads, D = C / H, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...autodiff import Buffer, Tensor, ops
from .. import init
from ..layers import Embedding, LayerNorm, Linear
from ..module import Module

_NORMAL = init.normal(0.0, 0.02)


class Attention(Module):
    """Causal self-attention: ``softmax(q k^T / sqrt(D) + mask) v``, then a projection. **Local.**"""

    static = True

    def __init__(self, width: int, heads: int, dtype: Any) -> None:
        self.heads = heads
        self.qkv = Linear(width, 3 * width, dtype=dtype, weight_init=_NORMAL, bias_init=init.zeros)
        self.projection = Linear(width, width, dtype=dtype, weight_init=_NORMAL, bias_init=init.zeros)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        """Attend from each of x's (N, T, C) tokens to those before it; ``mask`` is (T, T)."""
        n, t, c = x.shape
        d = c // self.heads
        parts = self.qkv(x).reshape(n, t, 3, self.heads, d).transpose(2, 0, 3, 1, 4)  # (3, N, H, T, D)
        q, k, v = parts[0], parts[1], parts[2]
        scores = q @ k.transpose(0, 1, 3, 2) * (1.0 / math.sqrt(d)) + mask
        mixed = ops.softmax(scores, axis=-1) @ v
        return self.projection(mixed.transpose(0, 2, 1, 3).reshape(n, t, c))


class Block(Module):
    """Attention and a two-layer perceptron, each behind a layer norm and beside the identity. **Local.**"""

    static = True

    def __init__(self, width: int, heads: int, dtype: Any) -> None:
        self.norm1 = LayerNorm(width, dtype=dtype)
        self.attention = Attention(width, heads, dtype)
        self.norm2 = LayerNorm(width, dtype=dtype)
        self.up = Linear(width, 4 * width, dtype=dtype, weight_init=_NORMAL, bias_init=init.zeros)
        self.down = Linear(4 * width, width, dtype=dtype, weight_init=_NORMAL, bias_init=init.zeros)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        """Apply the block to x of shape (N, T, C)."""
        x = x + self.attention(self.norm1(x), mask)
        return x + self.down(ops.gelu(self.up(self.norm2(x))))


class GPT(Module):
    """Predict the next token of each position. **Local.**

    The head's weights are the token table's (tied).

    Args:
        layers, width, heads, context, vocabulary: sizes; ``width`` is a multiple of ``heads``.
        dtype: of the parameters.

    Raises:
        ValueError: a width that is no multiple of heads, or a sequence longer than the context.

    Example:
        >>> model = GPT(layers=1, width=8, heads=2, context=4, vocabulary=10)
        >>> model(np.zeros((3, 4), int)).shape
        (3, 4, 10)
    """

    static = True

    def __init__(
        self, layers: int, width: int, heads: int, context: int, vocabulary: int, dtype: Any = "float32"
    ) -> None:
        if width % heads:
            raise ValueError(f"width: expected a multiple of heads={heads}, got {width}; change one")
        self.context = context
        self.tokens = Embedding(vocabulary, width, dtype, weight_init=_NORMAL)
        self.positions = Embedding(context, width, dtype, weight_init=_NORMAL)
        self.blocks = [Block(width, heads, dtype) for _ in range(layers)]
        self.norm = LayerNorm(width, dtype=dtype)
        self.mask = Buffer(np.triu(np.full((context, context), -np.inf), 1).astype(dtype))

    def forward(self, index: Any) -> Tensor:
        """Return logits (N, T, V) for tokens ``index`` (N, T)."""
        t = index.shape[1]
        if t > self.context:
            raise ValueError(f"index: expected at most {self.context} tokens a sequence, got {t}; cut it")
        x = self.tokens(index) + self.positions.weight[:t]
        mask = self.mask.data[:t, :t].astype(x.dtype, copy=False)  # 0 and -inf are exact in 16 bits
        for block in self.blocks:
            x = block(x, mask)
        return ops.linear(self.norm(x), self.tokens.weight)
