"""Recording: the nodes of the implicit graph, whether operations leave any, and which form of a parameter they read.

A node points at the nodes and leaf tensors it was computed from, never at a tensor computed from it, so
the graph has no reference cycles and is freed as soon as the last tensor of it goes. Read ``tape`` next.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_enabled: ContextVar[bool] = ContextVar("mpdp_autodiff_enabled", default=True)

recording = _enabled.get
"""Return whether operations record nodes in this context."""

# Only the order of the numbers has a meaning, and only inside one graph. One counter for the process (next()
# is atomic) keeps that order right also for a graph that one thread begins and another goes on with.
_next_number = itertools.count().__next__


@contextmanager
def no_grad() -> Iterator[None]:
    """Run a block, or a function, without recording: results never require a gradient. **Local.**

    Holds for the current thread (a context variable), nests, and saves the memory of the graph.

    Example:
        >>> from mpdp.autodiff import Parameter
        >>> w = Parameter([1.0, 2.0])
        >>> with no_grad():
        ...     y = w * 2
        >>> y.requires_grad
        False
    """
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


_copies: ContextVar[bool] = ContextVar("mpdp_autodiff_working_copies", default=False)

uses_copies = _copies.get
"""Return whether operations read the 16-bit working copies of parameters in this context."""


@contextmanager
def working_copies(use: bool = True) -> Iterator[None]:
    """Run a block in which operations read working copies of parameters, where these have one. **Local.**

    Whoever wraps a model for 16 bits opens it around the forward pass; outside of it, parameters are float32.
    """
    token = _copies.set(use)
    try:
        yield
    finally:
        _copies.reset(token)


@contextmanager
def recorded() -> Iterator[None]:
    """Run a block with recording on, also inside of :func:`no_grad`. **Local.**"""
    token = _enabled.set(True)
    try:
        yield
    finally:
        _enabled.reset(token)


class Node:
    """One operation that ran, with what its backward rule needs.

    Attributes:
        operation: its :class:`~mpdp.autodiff.operation.Operation`, or what computes a part of the graph again
            (:class:`~mpdp.autodiff.recompute.Recompute`); ``None`` once it is consumed.
        inputs: for each input a ``Node``, a leaf ``Tensor`` that requires a gradient, or ``None``.
        saved: what forward saved; freed when backward consumes the node.
        attrs: the keyword arguments of the call.
        kernels: the kernels it ran with.
        shape, dtype: of the result.
        number: grows in the order in which nodes were made.
    """

    __slots__ = (
        "__weakref__",
        "attrs",
        "dtype",
        "inputs",
        "kernels",
        "number",
        "operation",
        "saved",
        "shape",
    )

    def __init__(
        self,
        operation: Any,
        inputs: list[Any],
        saved: Any,
        attrs: dict[str, Any],
        kernels: Any,
        shape: tuple[int, ...],
        dtype: Any,
    ) -> None:
        self.operation = operation
        self.inputs = inputs
        self.saved = saved
        self.attrs = attrs
        self.kernels = kernels
        self.shape = shape
        self.dtype = dtype
        self.number = _next_number()

    @staticmethod
    def next_number() -> int:
        """Take the next number: nodes made before have smaller ones, nodes made later larger ones."""
        return _next_number()
