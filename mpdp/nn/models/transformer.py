"""GPT: a decoder-only transformer with pre-norm blocks, and its presets.

Source: Radford et al., "Language models are unsupervised multitask learners" (2019), section 2.3; Vaswani et al.,
"Attention is all you need" (2017), equation 1. Deviation: initial values are normal(0, 0.02) everywhere, without the
scaling of residual layers by depth.

Shapes: N sequences, T tokens, C width, H heads, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from ...autodiff import Tensor, ops
from .. import init
from ..attention import TransformerBlock, add_and_normalise
from ..layers import Dropout, Embedding, LayerNorm
from ..module import Module
from .registry import registered

_NORMAL = init.normal(0.0, 0.02)

PRESETS: dict[str, dict[str, int]] = {
    "chargpt": {"layers": 6, "width": 384, "heads": 6, "context": 256, "vocabulary": 128},
    "gpt2": {"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocabulary": 50304},
}


class GPT(Module):
    """Predict the next token of each position. **Local.**

    The head's weights are the token table's (tied).

    Args:
        layers, width, heads, context, vocabulary: sizes; ``width`` is a multiple of ``heads``.
        dtype: of the parameters.
        dropout: probability with which embeddings, weights of the attention, and what blocks add are dropped while
            training.

    Raises:
        ValueError: a width that is no multiple of heads, or a sequence longer than the context.

    Example:
        >>> import numpy as np
        >>> model = GPT(layers=1, width=8, heads=2, context=4, vocabulary=10)
        >>> model(np.zeros((3, 4), int)).shape
        (3, 4, 10)
    """

    static = True

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        context: int,
        vocabulary: int,
        dtype: Any = "float32",
        dropout: float = 0.0,
    ) -> None:
        if width % heads:
            raise ValueError(f"width: expected a multiple of heads={heads}, got {width}; change one")
        self.context = context
        self.tokens = Embedding(vocabulary, width, dtype, weight_init=_NORMAL)
        self.positions = Embedding(context, width, dtype, weight_init=_NORMAL)
        self.drop = Dropout(dropout) if dropout else None
        self.blocks = [
            TransformerBlock(
                width, heads, True, dropout, dtype=dtype, weight_init=_NORMAL, bias_init=init.zeros
            )
            for _ in range(layers)
        ]
        self.norm = LayerNorm(width, dtype=dtype)

    def forward(self, index: Any) -> Tensor:
        """Return logits (N, T, V) for tokens ``index`` (N, T)."""
        t = index.shape[1]
        if t > self.context:
            raise ValueError(f"index: expected at most {self.context} tokens a sequence, got {t}; cut it")
        x: Any = ops.token_embedding(self.tokens.weight, self.positions.weight, index)
        if self.drop is not None:
            x = self.drop(x)
        added = None  # what a block leaves to be added to x
        for block in self.blocks:
            if block.recompute:
                x, added = block(x if added is None else x + added), None
            else:
                x, added = block.parts(x, added)
        normal = self.norm(x) if added is None else add_and_normalise(self.norm, x, added)[1]
        return ops.linear(normal, self.tokens.weight)


@registered
def gpt(preset: str, dtype: Any = "float32", dropout: float = 0.0, **sizes: int) -> GPT:
    """Return a GPT of known sizes. **Local.**

    Args:
        preset: ``"chargpt"`` (6 layers, 384 wide, 6 heads, context 256, vocabulary 128) or ``"gpt2"`` (12, 768, 12,
            1024, 50304).
        dtype: of the parameters.
        dropout: see :class:`GPT`.
        sizes: what differs from the preset, as in ``vocabulary=65``.

    Raises:
        ValueError: no such preset, or no such size.

    Example:
        >>> gpt("chargpt", layers=1, width=24, vocabulary=65).tokens.weight.shape
        (65, 24)
    """
    if preset not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {preset!r}; choose one")
    for name in sizes:
        if name not in PRESETS[preset]:
            raise ValueError(
                f"sizes: expected some of {', '.join(PRESETS[preset])}, got {name!r}; check the name"
            )
    return GPT(**(PRESETS[preset] | sizes), dtype=dtype, dropout=dropout)
