"""Recompute: a part of the graph that keeps its inputs alone, and runs forward again when backward comes to it.

Memory for time: what the operations inside saved is freed at once, and exists again only while backward runs
through them. Forward runs again as it ran the first time (samples, dropout masks, working copies), and the tape
takes the new nodes in the place of the first ones, so gradients have the same bits. Read ``tape`` for that.

Source: Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost" (2016), section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

from ..kernels.precision import tf32, tf32_allowed
from .recording import Node, recorded, recording, uses_copies, working_copies
from .samples import Draws, current_samples, samples
from .tape import Tape
from .tensor import Tensor, make

_again: ContextVar[bool] = ContextVar("mpdp_autodiff_recomputing", default=False)

recomputing = _again.get
"""Return whether forward runs for the second time: a module with running statistics leaves them alone then."""


class Recompute:
    """What a node holds in place of an operation: how to run a part of forward again.

    Attributes:
        name: for errors.
        key: signature of what ran, for the tape's.
        held: bytes that the operations inside had saved; they exist again while backward runs through them.
    """

    __slots__ = ("_call", "_copies", "_draws", "_samples", "_tf32", "held", "key", "name")

    def __init__(self, name: str, call: Callable[[], Any]) -> None:
        self.name = name
        self.key = self.held = 0
        self._call = call
        context = current_samples()
        self._samples = None if context is None else context.copy()
        self._copies, self._tf32 = uses_copies(), tf32_allowed()
        self._draws = Draws()

    def first(self) -> Any:
        """Run forward, and note what is drawn outside of a sample context."""
        with self._draws:
            return self._call()

    def again(self) -> Any:
        """Run forward as it ran the first time."""
        with ExitStack() as stack:
            stack.enter_context(recorded())
            stack.enter_context(working_copies(self._copies))
            stack.enter_context(self._draws.again())
            if self._samples is not None:
                stack.enter_context(samples(self._samples))
            if self._tf32:
                stack.enter_context(tf32())
            token = _again.set(True)
            stack.callback(_again.reset, token)
            return self._call()


def checkpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like ``function`` that keeps its inputs alone, and runs again in backward. **Local.**

    Gradients have the same bits as without; the price is one more forward pass of this part. ``nn.checkpoint`` does
    it with a module. The function must do the same each time it gets the same inputs, and take computed tensors as
    arguments; parameters may be attributes.

    Args:
        function: returns one tensor, from tensors and anything else.

    Raises:
        TypeError: when called, if ``function`` returns something else than a tensor.
        ValueError: when called, if it uses a tensor that was computed before and is no argument; in backward, if it
            does other operations than the first time.

    Example:
        >>> from mpdp.autodiff import Parameter
        >>> w = Parameter([1.0, 2.0])
        >>> checkpoint(lambda x: (x * w).tanh() * x)(w * 3.0).sum().backward()
        >>> w.grad.shape
        (2,)
    """
    name = f"checkpoint of {getattr(function, '__qualname__', type(function).__name__)}"

    def run(*arguments: Any, **keywords: Any) -> Any:
        if not recording():
            return function(*arguments, **keywords)
        stands: dict[Node, Tensor] = {}
        held = [_stand_in(value, stands) for value in arguments]
        named = {key: _stand_in(value, stands) for key, value in keywords.items()}
        part = Recompute(name, lambda: function(*held, **named))
        first_number = Node.next_number()
        out = part.first()
        if not isinstance(out, Tensor):
            raise TypeError(f"{name}: expected one tensor, got {type(out).__name__}; return a Tensor")
        sources = {stand: node for node, stand in stands.items()}
        node = out._node
        if node is None:  # nothing was computed that needs a gradient; it may have returned its input
            return make(out._data, sources[out]) if out in sources else out
        tape = Tape(out)
        if tape.oldest < first_number:
            raise ValueError(
                f"{name}: expected to get every computed tensor as an argument, got one from outside; pass it"
            )
        part.key, part.held = tape.signature, tape.held_bytes()
        inputs = [sources.get(leaf, leaf) for leaf in tape.leaves]
        return make(
            out._data, Node(part, inputs, (sources, held, named), {}, node.kernels, node.shape, node.dtype)
        )

    return run


def _stand_in(value: Any, stands: dict[Node, Tensor]) -> Any:
    """Return a leaf in the place of a computed tensor that needs a gradient, and anything else as it is."""
    if not isinstance(value, Tensor) or value._node is None:
        return value
    node = value._node
    if node not in stands:
        stand = stands[node] = make(value._data, None)
        stand._requires_grad = True
        stand._key = 1 + ord(value.dtype.char)  # the signature leaves lengths of activations out
    return stands[node]
