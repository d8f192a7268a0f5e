"""How much memory a graph holds: the arrays that its nodes saved for backward, each counted once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .recording import Node


def held_bytes(nodes: Iterable[Node], leaves: Iterable[Any] = ()) -> int:
    """Return the bytes of all arrays that nodes saved, without the memory of ``leaves``. **Local.**

    A view counts as the whole array that it keeps alive. The largest part that is computed again in backward counts
    too, since its arrays exist together with the others then.

    Args:
        nodes: of one graph; consumed ones hold nothing.
        leaves: tensors whose arrays (parameters, in an arena or not) are counted elsewhere.
    """
    elsewhere = {_memory(array)[0] for leaf in leaves for array in leaf._arrays()}
    found: dict[int, int] = {}
    again = 0
    for node in nodes:
        again = max(again, getattr(node.operation, "held", 0))
        stack = [node.saved]
        while stack:
            value = stack.pop()
            if isinstance(value, tuple | list):
                stack += value
            elif isinstance(value, dict):
                stack += [*value.keys(), *value.values()]
            elif hasattr(value, "_arrays"):
                stack += value._arrays()
            elif hasattr(value, "dtype") and hasattr(value, "strides"):
                address, size = _memory(value)
                if address not in elsewhere:
                    found[address] = size
    return sum(found.values()) + again


def _memory(array: Any) -> tuple[int, int]:
    """Return address and bytes of the array that owns the memory."""
    while type(array.base) is type(array) or isinstance(array.base, np.ndarray):
        array = array.base  # below may lie a map or a tensor of another library, whose memory is as large
    if hasattr(array, "__cuda_array_interface__"):
        return array.data.ptr, array.nbytes
    return array.__array_interface__["data"][0], array.nbytes
