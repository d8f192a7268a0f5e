"""The seed of initial weights and how many parameters were made under it.

Both live in one immutable value of a context variable, so threads (which are worlds too) do not disturb
each other, and every rank that builds the same model gets the same weights without a message.
"""

from __future__ import annotations

import operator
from contextvars import ContextVar
from typing import NamedTuple

from ..kernels.random import Key, derive_key


class _Seeding(NamedTuple):
    seed: int = 0
    parameters: int = 0
    dropouts: int = 0


_START = _Seeding()
_state: ContextVar[_Seeding] = ContextVar("mpdp_seeding", default=_START)


def seed(value: int) -> None:
    """Set the seed of initial weights and start counting parameters again; 0 when never called.

    **Local.** The k-th parameter made after it is a function of (seed, k) alone: equal on every rank and at
    every launch. Order, dropout and augmentation follow the trainer's own seed.

    Args:
        value: any integer.

    Example:
        >>> from mpdp import nn
        >>> seed(1); a = nn.Linear(2, 2)
        >>> seed(1); b = nn.Linear(2, 2)
        >>> bool((a.weight.data == b.weight.data).all())
        True
    """
    try:
        value = operator.index(value)
    except TypeError as error:
        raise TypeError(
            f"seed: expected an integer, got {type(value).__name__}; pass a fixed number"
        ) from error
    _state.set(_Seeding(value))


def current_seed() -> int:
    """Return the seed in force. **Local.**"""
    return _state.get().seed


def next_parameter_key() -> Key:
    """Return the key of the next parameter's initial values, and count it. **Local.**"""
    state = _state.get()
    _state.set(state._replace(parameters=state.parameters + 1))
    return derive_key(state.seed, "parameter", state.parameters)


def next_dropout_index() -> int:
    """Return the creation index of the next dropout module, and count it. **Local.**"""
    state = _state.get()
    _state.set(state._replace(dropouts=state.dropouts + 1))
    return state.dropouts
