"""Replica checksums: notice that weights, moments or buffers differ between ranks, and name where.

An exact 64-bit integer checksum of each kind of state goes into one maximum of x and ~x; only when it differs are
checksums of single parameters gathered. Nothing is rounded, so a single flipped bit is seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    raise on_all_ranks(DivergenceError(_describe(tables, step)))


def _checksum(array: Any) -> int:
    """Return the checksum as a signed 64-bit integer, which MPI can take the maximum of."""
    value = kernels.of(array).checksum(array) & 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >= 1 << 63 else value


def _describe(tables: list[dict[str, int]], step: int) -> str:
    for name in tables[0]:
        groups: dict[int | None, list[int]] = {}
        for rank, table in enumerate(tables):
            groups.setdefault(table.get(name), []).append(rank)
        if len(groups) > 1:
            largest = max(groups.values(), key=len)
            odd = sorted(rank for ranks in groups.values() if ranks is not largest for rank in ranks)
            listed = ", ".join(map(str, odd))
            return (
                f"replicas: expected equal bits on all ranks after step {step}, got a different {name} "
                f"on rank {listed}; resume from the last checkpoint and look for code that changes weights on one rank"
            )
    return f"replicas: expected equal bits on all ranks after step {step}, got different padding between parameters"
