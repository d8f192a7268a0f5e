"""Calls: a collective, and its signature by which ranks see that they are in the same one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import CommunicationError
from .base import FLOATS, INTEGERS, OPS

_NAMES = (
    "all_reduce",
    "checked_all_reduce",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "all_gather",
    "exclusive_sum",
    "barrier",
)
_DTYPES = [np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in FLOATS + INTEGERS]
_KINDS = [(name, op, dtype) for name in _NAMES for op in OPS for dtype in _DTYPES]
_NUMBERS = _KINDS.index(("all_reduce", "max", np.dtype(np.int64)))
_CODES = {kind: code for code, kind in enumerate(_KINDS)}  # fits a byte
_CHECKED = frozenset(code for code, kind in enumerate(_KINDS) if kind[0] == "checked_all_reduce")


@dataclass(slots=True)
class Call:
    """One collective of one rank, from its announcement on.

    Attributes:
        array: what it works on, in place.
        op: of a summing call.
        own: elements that this rank sums, or gives to the others.
        kept: elements of the sum that this rank needs.
        bounds: of a gathering call, who gives what; None for a summing one.
        root: of a summing call, the rank that gets what this rank sums; None for all.
        signature: what is equal on all ranks.
        location: where the array lies, see ``regions``.
        number: of the collective on its lane.
    """

    array: Any
    op: str
    own: tuple[int, int]
    kept: tuple[int, int]
    bounds: Sequence[int] | None
    signature: int
    root: int | None = None
    location: int = 0
    number: int = 0


@dataclass(slots=True, kw_only=True)
class CheckedCall(Call):
    """A sum by which the ranks find out whether they start it with the same note.

    Attributes:
        note: what has to be equal on all ranks, 63 bits.
        value: a number of this rank, for all of them.
        settle: called where notes differ, or where a rank is in a call on the urgent lane instead.
        values: each rank's number, by rank, when the notes were found equal; else None.
    """

    note: int
    value: float
    settle: Callable[[], None]
    values: list[float] | None = None


def sign(name: str, op: str, array: Any, details: Sequence[int] | int = 0) -> int:
    """Return call, dtype, length and details (a root, or bounds) as one number of 63 bits. **Local.**"""
    if not isinstance(details, int):
        details = hash(tuple(details))
    return (array.size << 24 | (details & 0xFFFF) << 8 | _CODES[name, op, array.dtype]) & 0x7FFFFFFFFFFFFFFF


def sign_numbers(integers: int, floats: int) -> int:
    """Return the signature of the reduction of so many numbers: that of a maximum of int64 with details. **Local.**"""
    return integers << 24 | (floats & 0xFFFF) << 8 | _NUMBERS


def is_checked(signature: int) -> bool:
    """Return whether a signature is that of a checked sum. **Local.**"""
    return signature & 0xFF in _CHECKED


def mismatch(ranks: Sequence[int], signatures: Sequence[int]) -> CommunicationError:
    """Return the error of ranks that are in different calls, naming them. **Local.**"""
    groups: dict[int, list[int]] = {}
    for rank, signature in zip(ranks, signatures):
        groups.setdefault(signature, []).append(rank)
    listed = "; ".join(
        f"{describe(signature)} on rank {', '.join(map(str, some))}" for signature, some in groups.items()
    )
    return CommunicationError(
        f"{describe(signatures[0]).partition(' ')[0]}: expected the same call, dtype and length on all ranks, "
        f"got {listed}; call it on all ranks, in the same order"
    )


def describe(signature: int) -> str:
    """Return a signature as text. **Local.**

    Example:
        >>> describe(sign("all_reduce", "max", np.zeros(3)))
        'all_reduce (max) of 3 float64'
    """
    name, op, dtype = _KINDS[signature & 0xFF]
    size, details = signature >> 24, (signature >> 8) & 0xFFFF
    if name == "barrier":
        return name
    if details and name == "all_reduce":
        return f"{name} of {size} integers and {details} floats"
    told = f", root {details}" if name == "reduce" else f", bounds {details:04x}" if details else ""
    return f"{name}{f' ({op})' if 'reduce' in name else ''} of {size} {dtype.name}{told}"
