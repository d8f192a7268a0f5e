"""Agreements: small exchanges by which all ranks raise together, or find what they hold different.

A fact that one rank alone can see (a missing file, a bad label) is agreed on before it is raised, so that no rank
is left waiting. Nothing here costs more than a maximum of one or two numbers unless something is wrong.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import traceback
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from .. import errors
from .base import Communicator

T = TypeVar("T")
_TRACEBACK_CHARACTERS = 4000  # each rank holds those of all


def agree(comm: Communicator, error: BaseException | None) -> None:
    """Raise on every rank if any rank brings an error; return otherwise.

    **Collective.** The message is that of the lowest failing rank and names the ranks; the rank whose own
    error it is raises it from that one, and the others note its traceback. The exception has ``agreed = True``.

    Args:
        comm: the ranks that agree.
        error: this rank's error, or None.
    """
    if comm.size == 1:
        if error is not None:
            raise error
        return
    failed = np.array([error is not None], dtype=np.int64)
    comm.all_reduce(failed, op="max", lane="urgent")
    if not failed[0]:
        return
    mine = None if error is None else [type(error).__name__, _message(error), _traceback(error)]
    texts = [json.loads(data) for data in comm.all_gather_bytes(json.dumps(mine).encode())]
    ranks = [rank for rank, text in enumerate(texts) if text is not None]
    name, message, *trace = texts[ranks[0]]
    where = (
        "on every rank" if len(ranks) == comm.size else f"on rank {', '.join(map(str, ranks))} of {comm.size}"
    )
    raised = errors.on_all_ranks(_rebuild(name, f"{message} ({where})"))
    if error is None:
        for text in trace:
            raised.add_note(f"on rank {ranks[0]}:\n{text.rstrip()}")
    raise raised from error


def together(comm: Communicator, call: Callable[[], T]) -> T:
    """Return ``call()``, or raise on every rank if it raises on any.

    **Collective.** ``call`` itself must be local.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = call()
    except Exception as caught:
        error = caught
    agree(comm, error)
    return result  # type: ignore[return-value]


def on_root(comm: Communicator, call: Callable[[], T], *, root: int = 0) -> T | None:
    """Return ``call()`` on ``root`` and None elsewhere, or raise on every rank if it raises. **Collective.**"""
    return together(comm, call if comm.rank == root else lambda: None)


def compare(comm: Communicator, what: str, fields: Mapping[str, object]) -> None:
    """Check that all ranks hold the same named values.

    **Collective.** One maximum of two numbers if they do.

    Args:
        comm: the ranks to compare.
        what: what the fields describe, for the message.
        fields: name to value; values are compared as text, in this order.

    Raises:
        DisagreementError: on all ranks, naming the first field that differs, and the values by rank.
    """
    if comm.size == 1:
        return
    table = [[name, str(value)] for name, value in fields.items()]
    digest = int.from_bytes(
        hashlib.blake2b(json.dumps(table).encode(), digest_size=8).digest(), "little", signed=True
    )
    extremes = np.array([digest, ~digest], dtype=np.int64)
    comm.all_reduce(extremes, op="max", lane="urgent")
    if extremes[0] == ~extremes[1]:
        return
    tables = [json.loads(data) for data in comm.all_gather_bytes(json.dumps(table).encode())]
    raise errors.on_all_ranks(errors.DisagreementError(_first_difference(what, tables)))


def _first_difference(what: str, tables: list[list[list[str]]]) -> str:
    for i in range(max(len(table) for table in tables)):
        entries = [table[i] if i < len(table) else ["(nothing)", "(nothing)"] for table in tables]
        if all(entry == entries[0] for entry in entries):
            continue
        if all(entry[0] == entries[0][0] for entry in entries):
            name, values = entries[0][0], [entry[1] for entry in entries]
        else:
            name, values = f"entry {i}", [f"{entry[0]} {entry[1]}" for entry in entries]
        groups: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            groups.setdefault(value, []).append(rank)
        listed = "; ".join(f"{value} on rank {_ranks(ranks)}" for value, ranks in groups.items())
        return f"{what}: expected the same {name} on all ranks, got {listed}; run the same code with the same arguments"
    return f"{what}: expected equal values on all ranks, got different ones"


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{', '.join(map(str, ranks[:8]))} and more"


def _message(error: BaseException) -> str:
    """Return an error's message; a KeyError's str() is that of its repr."""
    if isinstance(error, KeyError) and len(error.args) == 1:
        return str(error.args[0])
    return str(error)


def _traceback(error: BaseException) -> str:
    """Return an error's traceback with its notes, of which the end says most."""
    return "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:]


def _rebuild(name: str, message: str) -> Exception:
    """Make an exception of the class that another rank named; some built-in ones take no single message."""
    found = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            return found(message)
        except TypeError:
            pass
    return errors.MpdpError(f"{name}: {message}")
