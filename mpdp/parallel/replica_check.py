"""Replica checksums: notice that weights, moments or buffers differ between ranks, and name where.

An exact 64-bit integer checksum of each kind of state goes into one maximum of x and ~x; only when it differs are
checksums of single parameters gathered. Nothing is rounded, so a single flipped bit is seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .. import kernels
from ..comm.base import Communicator
from ..errors import DivergenceError, on_all_ranks
from .layout import Layout


def check_replicas(
    comm: Communicator, layout: Layout, flats: Mapping[str, Any], arrays: Mapping[str, Any], step: int
) -> None:
    """Check that every rank holds the same bits.

    **Collective.** One pass over the state and one small message.

    Args:
        comm: the ranks.
        layout: names the ranges of the flat arrays.
        flats: name to flat array over the layout or its trainable zone (weights, moments).
        arrays: name to array of any shape (buffers, counters).
        step: finished updates, for the message.

    Raises:
        DivergenceError: on all ranks, naming the first state and parameter that differ, and the ranks.
    """
    if comm.size == 1:
        return
    sums = [_checksum(a) for a in (*flats.values(), *arrays.values())]
    extremes = np.array([[s, ~s] for s in sums] or [[0, -1]], dtype=np.int64).reshape(-1)
    comm.all_reduce(extremes, op="max", lane="urgent")
    if all(extremes[2 * i] == ~extremes[2 * i + 1] for i in range(len(sums))):
        return
    table = {}
    for kind, flat in flats.items():
        for entry in layout.entries:
            if entry.stop <= flat.size:
                table[f"{kind} of {entry.name}"] = _checksum(flat[entry.start : entry.stop])
    table.update({name: _checksum(a) for name, a in arrays.items()})
    tables = [json.loads(text) for text in comm.all_gather_bytes(json.dumps(table).encode())]
    raise on_all_ranks(_divergence(tables, step))


def take_over(comm: Communicator, arrays: Iterable[Any], root: int) -> None:
    """Overwrite arrays, of any shape and wherever they lie, by those of ``root``. **Collective.**"""
    for array in arrays:
        flat = kernels.of(array).xp.ascontiguousarray(array).reshape(-1)
        comm.broadcast(flat.view(np.uint8), root=root)
        array[...] = flat.reshape(array.shape)


def state_of(comm: Communicator, state: Mapping[str, Any], root: int) -> dict[str, Any]:
    """Return the numbers that ``root`` holds under some names. **Collective.**"""
    mine = json.dumps(state).encode() if comm.rank == root else None
    return dict(json.loads(comm.broadcast_bytes(mine, root=root)))


def _checksum(array: Any) -> int:
    """Return the checksum as a signed 64-bit integer, which MPI can take the maximum of."""
    value = kernels.of(array).checksum(array) & 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >= 1 << 63 else value


def _divergence(tables: list[dict[str, int]], step: int) -> DivergenceError:
    odd: dict[str, list[int]] = {}
    undecided: dict[str, str] = {}
    for name in tables[0]:
        groups: dict[int | None, list[int]] = {}
        for rank, table in enumerate(tables):
            groups.setdefault(table.get(name), []).append(rank)
        if len(groups) > 1:
            largest = max(groups.values(), key=len)
            if sum(len(ranks) == len(largest) for ranks in groups.values()) > 1:  # as of two ranks
                undecided[name] = f" than on rank {', '.join(map(str, largest))}"
            odd[name] = sorted(rank for ranks in groups.values() if ranks is not largest for rank in ranks)
    what = "different padding between parameters"
    for first, ranks in odd.items():
        what = f"a different {first} on rank {', '.join(map(str, ranks))}{undecided.get(first, '')}"
        break
    error = DivergenceError(
        f"replicas: expected equal bits on all ranks after step {step}, got {what}; resume from the last checkpoint "
        "and look for code that changes weights on one rank"
    )
    times_odd = [sum(rank in ranks for ranks in odd.values()) for rank in range(len(tables))]
    error.root = times_odd.index(min(times_odd))
    error.repaired = (
        f"replicas: found {what} after step {step}; all ranks go on with the state of rank {error.root}, but gradients "
        "since the check before may have come from the wrong one"
    )
    return error
