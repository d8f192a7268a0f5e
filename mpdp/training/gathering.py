"""Rows of all ranks, put in the order of the data set: what ``predict`` returns and what ``nn.Gather`` works on.

Each rank keeps the rows of its shares and where they belong. After the last batch the ranks exchange what the rows
look like and where they go, then the bytes, once.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from .. import kernels
from ..comm.agreement import together
from ..comm.base import Communicator

_Form = list[list[Any]]  # per leaf: dtype, shape of a row


class Rows:
    """Rows that this rank has seen, with their places in the data set.

    Args:
        what: what they are, for messages.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.places: list[tuple[int, int]] = []
        self.parts: list[list[np.ndarray]] = []

    def add(self, place: int, count: int, arrays: list[Any]) -> None:
        """Keep a copy of the rows of ``count`` samples from ``place`` on.

        **Local.**

        Raises:
            ValueError: arrays without a row a sample, or of another shape than before.
        """
        rows = []
        for array in arrays:
            if np.shape(array)[:1] != (count,):
                raise ValueError(
                    f"{self.what}: expected arrays with a row for each of {count} samples, got shape "
                    f"{np.shape(array)}; return one row a sample"
                )
            host = kernels.of(array).to_numpy(array) if hasattr(array, "dtype") else np.asarray(array)
            rows.append(np.array(host))  # a copy: the model may write there again
        if self.parts and _form(rows) != _form(self.parts[0]):
            raise ValueError(
                f"{self.what}: expected rows as in the first batch, {_shown(_form(self.parts[0]))}, got "
                f"{_shown(_form(rows))}; pad them to one shape"
            )
        self.places.append((place, count))
        self.parts.append(rows)

    def gather(self, comm: Communicator, everywhere: bool) -> list[np.ndarray] | None:
        """Return the rows of all ranks in the order of their places: an array a leaf.

        **Collective.** Each byte crosses once to rank 0, or to every rank.

        Args:
            comm: the ranks.
            everywhere: give the rows to every rank, not to rank 0 alone.

        Returns:
            arrays; an empty list where no rank had a row, None on ranks that are given nothing.

        Raises:
            ValueError: ranks whose rows have different forms, on all ranks.
        """
        mine = {"form": _form(self.parts[0]) if self.parts else None, "places": self.places}
        stated = [json.loads(text) for text in comm.all_gather_bytes(json.dumps(mine).encode())]
        form = together(comm, lambda: self._common(stated))
        counts = [sum(count for _, count in other["places"]) for other in stated]
        first = np.array([place for other in stated for place, _ in other["places"]], dtype=np.int64)
        lengths = np.array([count for other in stated for _, count in other["places"]], dtype=np.int64)
        order = np.argsort(first, kind="stable")
        starts = np.cumsum(lengths) - lengths
        found = []
        for leaf, (dtype, shape) in enumerate(form):
            row_bytes = int(np.dtype(_named(dtype)).itemsize * np.prod(shape, dtype=np.int64))
            own = [part[leaf].reshape(len(part[leaf]), -1) for part in self.parts]
            bytes_here = (
                np.ascontiguousarray(np.concatenate(own)).reshape(-1).view(np.uint8)
                if own
                else np.empty(0, np.uint8)
            )
            received = _exchange(comm, bytes_here, [count * row_bytes for count in counts], everywhere)
            if received is None:
                continue
            rows = received.reshape(-1, row_bytes) if row_bytes else np.empty((sum(counts), 0), np.uint8)
            ordered = np.concatenate([rows[starts[i] : starts[i] + lengths[i]] for i in order])
            found.append(ordered.reshape(-1).view(_named(dtype)).reshape(len(rows), *shape))
        return found if everywhere or comm.rank == 0 else None

    def _common(self, stated: list[dict[str, Any]]) -> _Form:
        """Return the form that all ranks with rows share."""
        forms = [(rank, other["form"]) for rank, other in enumerate(stated) if other["form"] is not None]
        for rank, form in forms:
            if form != forms[0][1]:
                raise ValueError(
                    f"{self.what}: expected rows of one form, got {_shown(forms[0][1])} on rank {forms[0][0]} and "
                    f"{_shown(form)} on rank {rank}; pad them to one shape"
                )
        return forms[0][1] if forms else []


def _exchange(
    comm: Communicator, mine: np.ndarray, lengths: list[int], everywhere: bool
) -> np.ndarray | None:
    """Return the bytes of all ranks, by rank; None on a rank that is given nothing. **Collective.**"""
    if comm.size == 1:
        return mine
    bounds = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    if everywhere or comm.rank == 0:
        whole = np.empty(bounds[-1], dtype=np.uint8)
        whole[bounds[comm.rank] : bounds[comm.rank + 1]] = mine
    if everywhere:
        comm.all_gather(whole, bounds, lane="urgent")
        return whole
    if comm.rank == 0:
        for rank in range(1, comm.size):
            if lengths[rank]:
                comm.recv(whole[bounds[rank] : bounds[rank + 1]], source=rank)
        return whole
    if len(mine):
        comm.send(mine, to=0)
    return None


def _form(rows: list[np.ndarray]) -> _Form:
    return [[array.dtype.name, list(array.shape[1:])] for array in rows]


def _named(dtype: str) -> Any:
    if dtype == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return np.dtype(dtype)


def _shown(form: _Form) -> str:
    return ", ".join(f"{dtype}{shape}" for dtype, shape in form)
