"""The step record: the few numbers that all ranks agree on before they reduce anything.

Every collective of the library that a program calls (a step, an evaluation, a save) begins with this one
exchange on the urgent lane, always of the same form. A ``Reducer`` used by hand lets its first chunk carry what has
to be equal, where the transport can, and comes to the exchange when that differs or another rank is in one. So when one
rank saves while another trains, the two exchanges meet, differ in ``kind``, and every rank gets an error that says who
is where, instead of a sum of different things. Maxima are taken of x and of ~x: both extremes of x in one message,
hence equality.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

import numpy as np

from ..comm.base import Communicator
from ..errors import DisagreementError, on_all_ranks

_SUMS = 4
_EQUAL = ("kind", "step", "layout", "rate")
_ANY = -(2**63)  # loses every maximum: "this rank does not care"
_DO_NOT_CARE = (_ANY, _ANY)
_ZEROS = (0.0,) * _SUMS
_INTEGER, _FLOAT = struct.Struct("<q"), struct.Struct("<d")


class Kind(IntEnum):
    """Which call of the library a rank is in."""

    STEP_BEGIN = 1
    STEP = 2
    EVALUATE = 3
    SAVE = 4
    RESUME = 5
    SIGNALS = 30
    FIT = 6
    FINISH = 7
    CHECK_REPLICAS = 8
    FREEZE = 9
    CONSTRUCT = 10
    REDUCE = 11
    NEW_RUN_DIR = 12
    BROADCAST = 13
    PREDICT = 14
    CALLBACKS = 15
    IN_CALLBACK = 16
    UPDATE = 17
    STATE = 18
    SAVING = 19
    AVERAGED = 20


_CALLS = {
    Kind.STEP_BEGIN: "the forward pass of a step",
    Kind.STEP: "the backward pass of a step",
    Kind.EVALUATE: "evaluate()",
    Kind.PREDICT: "predict()",
    Kind.CALLBACKS: "the end of its callbacks",
    Kind.IN_CALLBACK: "a collective inside a callback",
    Kind.UPDATE: "the update of a step",
    Kind.STATE: "state_dict()",
    Kind.SAVE: "save()",
    Kind.SAVING: "the end of a save in the background",
    Kind.RESUME: "resume()",
    Kind.SIGNALS: "the end of its updates or evaluation",
    Kind.FIT: "fit()",
    Kind.FINISH: "Reducer.finish()",
    Kind.CHECK_REPLICAS: "check_replicas()",
    Kind.FREEZE: "freeze() or thaw()",
    Kind.REDUCE: "the reduction of a Reducer",
    Kind.CONSTRUCT: "the constructor of a Trainer, DataParallel or Reducer",
    Kind.NEW_RUN_DIR: "new_run_dir()",
    Kind.BROADCAST: "broadcast()",
    Kind.AVERAGED: "averaged()",
}
_USUAL = (Kind.STEP, Kind.STEP_BEGIN, Kind.UPDATE, Kind.CALLBACKS)


@dataclass(slots=True)
class Agreed:
    """What the exchange settled.

    Attributes:
        sums: float64 sums over ranks.
        used_equal: every rank that knows uses the same set of parameters.
        stop: some rank asked to stop.
        changed: on some rank a trainable flag was changed behind the layout's back.
    """

    sums: tuple[float, ...]
    used_equal: bool
    stop: bool
    changed: bool


def exchange(
    comm: Communicator,
    kind: Kind,
    step: int,
    *,
    sums: Sequence[float] = (),
    used: int | None = None,
    layout: int | None = None,
    rate: float | None = None,
    stop: bool = False,
    changed: bool = False,
) -> Agreed:
    """Exchange one step record.

    **Collective.** One or two small messages on the urgent lane.

    Args:
        comm: the ranks.
        kind: the call this rank is in.
        step: updates finished before it.
        sums: up to four numbers to add over ranks, such as the count and the loss sum.
        used: 62-bit hash of the set of parameters this rank used; None for a rank without samples.
        layout: digest of the layout the call works on; None where it does not matter.
        rate: learning rate of the update; None where it is not known yet.
        stop: this rank asks all to stop after this step.
        changed: this rank's parameters are no longer trained as the layout says.

    Raises:
        DisagreementError: on all ranks, when kinds, steps, layouts or rates differ.
    """
    if comm.size == 1:
        return Agreed(tuple(float(x) for x in sums), used is not None, stop, changed)
    call = int(kind)
    mine = [int(used is None), int(stop), int(changed), call, ~call, step, ~step]
    mine += _DO_NOT_CARE if layout is None else (layout, ~layout)
    if rate is None:
        mine += _DO_NOT_CARE
    else:
        (bits,) = _INTEGER.unpack(_FLOAT.pack(rate))
        mine += (bits, ~bits)
    mine += _DO_NOT_CARE if used is None else (used, ~used)
    maxima, totals = comm.reduce_numbers(mine, (*sums, *_ZEROS[len(sums) :]))
    if (
        maxima == mine
    ):  # as in nearly every step: both extremes of each value are this rank's, or nobody else cares
        return Agreed(tuple(totals[: len(sums)]), used is not None, stop, changed)
    unused, any_stop, any_changed, *extremes = maxima
    agreed = [high == ~low or high == _ANY for high, low in zip(extremes[::2], extremes[1::2])]
    if not all(agreed[: len(_EQUAL)]):
        _raise_difference(comm, kind, step, layout, rate)
    used_equal = agreed[len(_EQUAL)] and not unused
    return Agreed(tuple(totals[: len(sums)]), used_equal, bool(any_stop), bool(any_changed))


def agree_used(comm: Communicator, used: np.ndarray) -> np.ndarray:
    """Return which parameters any rank used. **Collective.**"""
    flags = used.astype(np.uint8)
    comm.all_reduce(flags, op="max", lane="urgent")
    return flags.astype(bool)


def raise_changed() -> NoReturn:
    """Raise, on all ranks, for parameters that are not trained as the layout says."""
    raise on_all_ranks(
        DisagreementError(
            "model: expected its parameters as they were when it was wrapped, got a changed requires_grad or "
            "parameters that were wrapped again since; use freeze() and thaw() on every rank, "
            "and one trainer for each model"
        )
    )


def raise_unused(step: int) -> NoReturn:
    """Raise, on all ranks, for losses that use no parameter on any of them."""
    raise on_all_ranks(
        ValueError(
            f"loss: expected one that depends on a trainable parameter at step {step}, got one that depends on none, "
            "on any rank; compute it from the model's output, not from its .data"
        )
    )


def _raise_difference(
    comm: Communicator, kind: Kind, step: int, layout: int | None, rate: float | None
) -> None:
    """Gather who is where, and raise it on all ranks: each of them saw that they differ."""
    number = None if layout is None else comm.layouts.get(layout)
    texts = comm.all_gather_bytes(json.dumps([int(kind), step, layout, rate, number]).encode())
    places: dict[tuple[int, int, int | None], list[int]] = {}
    rates: dict[float, list[int]] = {}
    numbers: dict[int | None, int | None] = {}
    for rank, text in enumerate(texts):
        k, s, l, own_rate, numbers[l] = json.loads(text)
        places.setdefault((k, s, l), []).append(rank)
        rates.setdefault(own_rate, []).append(rank)
    if len(places) == 1:
        listed = "; ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in rates.items())
        raise on_all_ranks(
            DisagreementError(
                f"learning rate: expected the same on all ranks at step {step}, got {listed}; set it, and what a "
                "schedule goes by, on every rank alike"
            )
        )
    same_call = len({(k, s) for k, s, _ in places}) == 1

    def model(l: int | None) -> str:
        return f" of model {numbers[l]}" if same_call and numbers[l] else ""

    listed = "; ".join(
        f"rank {', '.join(map(str, ranks))} in {_CALLS[Kind(k)]} at step {s}{model(l)}"
        for (k, s, l), ranks in places.items()
    )
    if same_call and all(numbers.values()):
        listed += " (numbered in the order they were wrapped)"
    first = _CALLS[Kind(min(places)[0])] if len({k for k, _, _ in places}) == 1 else _odd_one_out(places)
    raise on_all_ranks(
        DisagreementError(
            f"{first}: expected every rank to call it at the same step, got {listed}; "
            "call it on all ranks, in the same order"
        )
    )


def _odd_one_out(places: dict[tuple[int, int, int | None], list[int]]) -> str:
    """Name the rarer call: the one that a rank makes alone."""
    ranks_in: dict[int, int] = {}
    for (k, _, _), ranks in places.items():
        ranks_in[k] = ranks_in.get(k, 0) + len(ranks)
    # These are what everybody does; at equal counts the other call is the surprise.
    kind = min(ranks_in, key=lambda k: (ranks_in[k], k in _USUAL))
    return _CALLS[Kind(kind)]
