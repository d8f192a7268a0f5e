"""The layers: small modules around operations, with PyTorch's default initial values.

Shapes: N samples, i and o features in and out, D features; ``...`` is any number of axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .. import kernels
from ..autodiff import Tensor, current_samples, ops
from ..autodiff.samples import drawn
from ..autodiff.tensor import unwrap
from ..kernels.base import ACTIVATIONS, Kernels
from ..kernels.random import dropout_key, keep_threshold
from . import init
from .init import Initialiser
from .module import Module
from .seeding import current_seed, next_dropout_index


class Linear(Module):
    """Compute ``activation(x @ weight.T + bias)``. **Local.**

    Args:
        inputs, outputs: i and o, 0 or more.
        bias: whether there is one.
        dtype: of the parameters.
        activation: ``"relu"``, ``"gelu"`` (the tanh form) or None: as a layer behind this one, in one pass with it.
        weight_init, bias_init: initialisers; left out, both are uniform on +-1 / sqrt(i), as in PyTorch.

    Attributes:
        weight: (o, i).
        bias: (o,) or None.

    Example:
        >>> Linear(3, 2)(np.zeros((5, 3), "float32")).shape
        (5, 2)
    """

    static = True

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = True,
        dtype: Any = "float32",
        *,
        activation: str | None = None,
        weight_init: Initialiser | None = None,
        bias_init: Initialiser | None = None,
    ) -> None:
        inputs, outputs = length("inputs", inputs), length("outputs", outputs)
        if activation not in ACTIVATIONS:
            raise ValueError(
                f'activation: expected None, "relu" or "gelu", got {activation!r}; put a layer behind this one'
            )
        self.activation = activation
        bound = 1.0 / math.sqrt(max(inputs, 1))
        default = init.uniform(-bound, bound)
        self.weight = init.parameter(weight_init or default, (outputs, inputs), dtype, "weight_init")
        self.bias = init.parameter(bias_init or default, (outputs,), dtype, "bias_init") if bias else None

    def extra_repr(self) -> str:
        """Return the arguments. **Local.**"""
        outputs, inputs = self.weight.shape
        behind = "" if self.activation is None else f", activation={self.activation!r}"
        return f"inputs={inputs}, outputs={outputs}, bias={self.bias is not None}{behind}"

    def forward(self, x: Any) -> Tensor:
        """Apply the layer to x of shape (..., i)."""
        return ops.linear(x, self.weight, self.bias, activation=self.activation)


class Embedding(Module):
    """Look rows of a table up. **Local.**

    Args:
        count: rows of the table.
        width: D.
        dtype: of the table.
        weight_init: an initialiser; left out, the standard normal, as in PyTorch.

    Attributes:
        weight: (count, D).
    """

    static = True

    def __init__(
        self, count: int, width: int, dtype: Any = "float32", *, weight_init: Initialiser | None = None
    ) -> None:
        shape = length("count", count), length("width", width)
        self.weight = init.parameter(weight_init or init.normal(), shape, dtype, "weight_init")

    def extra_repr(self) -> str:
        """Return the arguments. **Local.**"""
        count, width = self.weight.shape
        return f"count={count}, width={width}"

    def forward(self, index: Any) -> Tensor:
        """Return the rows that the integers ``index`` (...) name: (..., D)."""
        return ops.embedding(self.weight, index)


class LayerNorm(Module):
    """Normalise over the last axes, then scale and shift. **Local.**

    Args:
        shape: the lengths of these axes, an integer for one.
        eps: added to the variance.
        dtype: of the parameters.
        weight_init, bias_init: initialisers; left out, ones and zeros.

    Attributes:
        weight, bias: arrays of ``shape``.
    """

    static = True

    def __init__(
        self,
        shape: int | tuple[int, ...],
        eps: float = 1e-5,
        dtype: Any = "float32",
        *,
        weight_init: Initialiser | None = None,
        bias_init: Initialiser | None = None,
    ) -> None:
        lengths = shape if isinstance(shape, tuple | list) else (shape,)
        lengths = tuple(length("shape", n) for n in lengths)
        self.eps = float(eps)
        self.weight = init.parameter(weight_init or init.ones, lengths, dtype, "weight_init")
        self.bias = init.parameter(bias_init or init.zeros, lengths, dtype, "bias_init")

    def extra_repr(self) -> str:
        """Return the arguments. **Local.**"""
        return f"shape={tuple(self.weight.shape)}, eps={self.eps}"

    def forward(self, x: Any) -> Tensor:
        """Apply the layer to x of shape (..., *shape)."""
        return ops.layer_norm(x, self.weight, self.bias, eps=self.eps)

    def add(self, x: Any, added: Any) -> tuple[Tensor, Tensor]:
        """Return ``x + added`` and the layer applied to it, in one pass; see :func:`ops.add_layer_norm`."""
        return ops.add_layer_norm(x, added, self.weight, self.bias, eps=self.eps)


class Dropout(Module):
    """Set elements to 0 with probability p while training, and divide the others by 1 - p. **Local.**

    The mask is ``kernels.random.dropout_mask`` of the run's seed, the step, this module's path, and the
    position of each sample in the global batch, all from the sample context that the trainer opens; so it
    does not depend on the number of ranks. Outside of a context the seed is that of ``mpdp.seed``, the step
    counts the calls of this module, and x holds samples 0, 1, ...

    Args:
        p: probability, in [0, 1).

    Example:
        >>> x = np.ones((2, 3), "float32")
        >>> bool((Dropout(0.5).eval()(x) == x).all())
        True
    """

    static = True
    draws_samples = True

    def __init__(self, p: float = 0.5) -> None:
        keep_threshold(p)  # checks it
        self.p = float(p)
        self._index = next_dropout_index()
        self._calls = 0

    def extra_repr(self) -> str:
        """Return the arguments. **Local.**"""
        return f"p={self.p}"

    def forward(self, x: Any) -> Any:
        """Apply the layer to x of shape (N, ...), or of m rows a sample (m * N, ...)."""
        mask = self.mask(unwrap(x).shape, kernels.of(unwrap(x)))
        return x if mask is None else ops.dropout(x, mask, self.p)

    def mask(self, shape: tuple[int, ...], k: Kernels) -> Any:
        """Return the next mask for an array of ``shape`` on the device of k: True keeps; None drops nothing.

        For what applies a mask itself, as attention does.
        """
        if not self.training or self.p == 0.0:
            return None
        context = current_samples()
        if context is None:
            # A module that no model was named for has no path: its creation index keeps masks apart.
            key = dropout_key(current_seed(), self.path or f"#{self._index}")
            step, start, count = drawn(self._count_call), 0, shape[0] if shape else 1
            elements = math.prod(shape[1:])
        else:
            path = self.path or ""
            elements = context.elements(shape)
            key = dropout_key(context.seed, path, context.call(path))
            step, start, count = context.step, context.start, context.count
        return k.keep_mask(key, step, start, count, elements, keep_threshold(self.p)).reshape(shape)

    def _count_call(self) -> int:
        self._calls += 1
        return self._calls - 1


class ReLU(Module):
    """Apply max(x, 0). **Local.**"""

    static = True

    def forward(self, x: Any) -> Tensor:
        """Apply it to x of any shape."""
        return ops.relu(x)


class GELU(Module):
    """Apply GELU in its tanh form (PyTorch's ``approximate="tanh"``). **Local.**

    Source: Hendrycks, Gimpel, "Gaussian error linear units" (2016), section 2.
    """

    static = True

    def forward(self, x: Any) -> Tensor:
        """Apply it to x of any shape."""
        return ops.gelu(x)


class Tanh(Module):
    """Apply the hyperbolic tangent. **Local.**"""

    static = True

    def forward(self, x: Any) -> Tensor:
        """Apply it to x of any shape."""
        return ops.tanh(x)


class Flatten(Module):
    """Make one axis of all but the first. **Local.**"""

    static = True

    def forward(self, x: Any) -> Tensor:
        """Return x of shape (N, ...) as (N, D)."""
        shape = unwrap(x).shape
        return ops.reshape(x, (shape[0], math.prod(shape[1:])))


_ACTIVATIONS: dict[type, str] = {ReLU: "relu", GELU: "gelu"}


class Sequential(Module):
    """Apply layers in order; any function of one argument will do. **Local.**

    Parameters are named ``<index>.<name>``. It indexes, iterates and counts like its list of layers. A ``Linear``
    with a ``ReLU`` or ``GELU`` behind it is computed in one pass with it.

    Args:
        layers: modules or functions.

    Example:
        >>> model = Sequential(Linear(4, 8), ReLU(), Linear(8, 2))
        >>> [name for name, _ in model.named_parameters()]
        ['0.weight', '0.bias', '2.weight', '2.bias']
    """

    static = True

    def __init__(self, *layers: Callable[..., Any]) -> None:
        for i, layer in enumerate(layers):
            if not callable(layer):
                raise TypeError(
                    f"layers: expected modules or functions, got {type(layer).__name__} at {i}; "
                    "pass them as separate arguments"
                )
            setattr(self, str(i), layer)  # an attribute, so that names are "0.weight" as elsewhere
        self._count = len(layers)

    def forward(self, x: Any) -> Any:
        """Apply all layers to x."""
        layers = self._layers()
        i = 0
        while i < len(layers):
            layer = layers[i]
            if type(layer) is Linear and layer.activation is None and not layer.recompute:
                behind = _ACTIVATIONS.get(type(layers[i + 1])) if i + 1 < len(layers) else None
                if behind is not None:
                    x = ops.linear(x, layer.weight, layer.bias, activation=behind)
                    i += 2
                    continue
            x = layer(x)
            i += 1
        return x

    def __getitem__(self, index: int) -> Callable[..., Any]:
        return self._layers()[index]

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter(self._layers())

    def __len__(self) -> int:
        return self._count

    def _layers(self) -> list[Callable[..., Any]]:
        return [getattr(self, str(i)) for i in range(self._count)]


def length(what: str, value: Any) -> int:
    """Return the length of an axis after checking it. **Local.**"""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
        raise ValueError(
            f"{what}: expected an integer of 0 or more, got {value!r}; pass the length of an axis"
        )
    return int(value)
