"""Attention and the transformer's block. Shapes: N sequences, T positions, C width, H heads, D = C / H."""

from __future__ import annotations

from typing import Any

from .. import kernels
from ..autodiff import Tensor, ops
from ..autodiff.tensor import unwrap
from ..kernels.base import ATTENTIONS
from .init import Initialiser
from .layers import Dropout, LayerNorm, Linear, length
from .module import Module


class MultiHeadAttention(Module):
    """Let each position of a sequence attend to the others, in several heads. **Local.**

    ``softmax(q k^T / sqrt(D)) v`` in each head, with q, k and v from one product with x; then a projection.

    Args:
        width: C, a multiple of heads.
        heads: H.
        causal: whether a position sees itself and those before it only.
        dropout: probability with which a weight of the attention is dropped while training.
        bias: whether both products have one.
        dtype: of the parameters.
        engine, deterministic: see ``ops.attention``; attributes too, to be set at any time.
        weight_init, bias_init: initialisers of both products; left out, those of ``Linear``.

    Attributes:
        qkv: ``Linear`` from C to 3 C: queries, then keys, then values, each H times D.
        projection: ``Linear`` from C to C.

    Example:
        >>> import numpy as np
        >>> MultiHeadAttention(8, 2, causal=True)(np.zeros((3, 5, 8), "float32")).shape
        (3, 5, 8)

    Source: Vaswani et al., "Attention is all you need" (2017), section 3.2.
    """

    static = True

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        dtype: Any = "float32",
        *,
        engine: str = "auto",
        deterministic: bool = True,
        weight_init: Initialiser | None = None,
        bias_init: Initialiser | None = None,
    ) -> None:
        width, heads = length("width", width), length("heads", heads)
        if heads < 1 or width % heads:
            raise ValueError(f"width: expected a multiple of heads={heads}, got {width}; change one")
        if engine not in ATTENTIONS:
            raise ValueError(f"engine: expected one of {', '.join(ATTENTIONS)}, got {engine!r}; choose one")
        self.heads, self.causal = heads, bool(causal)
        self.engine, self.deterministic = engine, bool(deterministic)
        options: dict[str, Any] = {"dtype": dtype, "weight_init": weight_init, "bias_init": bias_init}
        self.qkv = Linear(width, 3 * width, bias, **options)
        self.projection = Linear(width, width, bias, **options)
        self.dropout = Dropout(dropout) if dropout else None

    def extra_repr(self) -> str:
        """Return the arguments. **Local.**"""
        return f"width={self.projection.weight.shape[0]}, heads={self.heads}, causal={self.causal}"

    def forward(self, x: Any, key_mask: Any = None) -> Tensor:
        """Apply the layer.

        Args:
            x: (N, T, C).
            key_mask: boolean (N, T), False where a position is padding, which none attends to.
        """
        shape = unwrap(x).shape
        if len(shape) != 3:
            raise ValueError(
                f"x: expected shape (sequences, positions, width), got {shape}; add an axis for one sequence"
            )
        n, t, _ = shape
        keep = None
        if self.dropout is not None:
            keep = self.dropout.mask((n, self.heads, t, t), kernels.of(unwrap(x)))
        mixed = ops.self_attention(
            self.qkv(x),
            self.heads,
            causal=self.causal,
            key_mask=key_mask,
            keep=keep,
            p=0.0 if keep is None or self.dropout is None else self.dropout.p,
            engine=self.engine,
            deterministic=self.deterministic,
        )
        return self.projection(mixed)


class TransformerBlock(Module):
    """Attention and a two-layer perceptron, each behind a layer norm and beside the identity. **Local.**

    ``x = x + attention(norm1(x))``, then ``x + down(up(norm2(x)))``, with GELU in ``up``.

    Args:
        width, heads, causal: see :class:`MultiHeadAttention`.
        dropout: probability with which a weight of the attention, and an element of what is added to x, is dropped
            while training.
        hidden: width of the perceptron; left out, 4 C.
        dtype: of the parameters.
        weight_init, bias_init: initialisers of all products; left out, those of ``Linear``.

    Attributes:
        norm1, attention, norm2, up, down: the parts.

    Source: Radford et al., "Language models are unsupervised multitask learners" (2019), section 2.3.
    """

    static = True

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool = False,
        dropout: float = 0.0,
        hidden: int | None = None,
        dtype: Any = "float32",
        *,
        weight_init: Initialiser | None = None,
        bias_init: Initialiser | None = None,
    ) -> None:
        hidden = 4 * width if hidden is None else length("hidden", hidden)
        options: dict[str, Any] = {"dtype": dtype, "weight_init": weight_init, "bias_init": bias_init}
        self.norm1 = LayerNorm(width, dtype=dtype)
        self.attention = MultiHeadAttention(width, heads, causal, dropout, **options)
        self.norm2 = LayerNorm(width, dtype=dtype)
        self.up = Linear(width, hidden, activation="gelu", **options)
        self.down = Linear(hidden, width, **options)
        self.drop1 = Dropout(dropout) if dropout else None
        self.drop2 = Dropout(dropout) if dropout else None

    def forward(self, x: Any, key_mask: Any = None) -> Tensor:
        """Apply the block to x of shape (N, T, C); ``key_mask`` as in :class:`MultiHeadAttention`."""
        x, added = self.parts(x, None, key_mask)
        return x + added

    def parts(self, x: Any, added: Any = None, key_mask: Any = None) -> tuple[Any, Tensor]:
        """Apply the block to ``x + added``, and return two tensors whose sum is the result.

        What comes behind the block then adds and normalises in one pass, as the block itself does.
        """
        if added is None:
            normal = self.norm1(x)
        else:
            x, normal = add_and_normalise(self.norm1, x, added)
        added = self.attention(normal, key_mask)
        if self.drop1 is not None:
            added = self.drop1(added)
        x, normal = add_and_normalise(self.norm2, x, added)
        added = self.down(self.up(normal))
        return x, added if self.drop2 is None else self.drop2(added)


def add_and_normalise(norm: Any, x: Any, added: Any) -> tuple[Any, Any]:
    """Return ``x + added`` and ``norm`` of it, in one pass where that is a plain ``LayerNorm``. **Local.**"""
    if type(norm) is LayerNorm and not norm.recompute:
        return norm.add(x, added)
    x = x + added
    return x, norm(x)
