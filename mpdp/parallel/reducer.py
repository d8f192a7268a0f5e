"""The reducer: sum gradients over ranks, chunk by chunk, while backward still runs.

Chunks are reduced strictly in index order on every rank, whichever order they become ready in; that is what makes
messages match without negotiation. Two ways in: :meth:`Reducer.ready` for gradients computed by hand, and a
:class:`FlushPlan` computed once for a tape, whose Python work in a step is proportional to chunks, not parameters.

Before the first chunk is summed the ranks agree that they are in the same step: by a step record, which its owner
exchanges or the reducer itself, or by a note that this chunk is announced with, where the transport carries notes
(``Communicator.start_checked_all_reduce``).
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

from ..comm.agreement import agree, compare, together
from ..comm.base import CheckedRequest, Communicator, Request
from ..errors import on_all_ranks
from .arena import GradientArena
from .chunks import chunk_table
from .layout import Layout
from .placement import Placement
from .record import Agreed, Kind, exchange

_NOTHING_YET = (0.0, 0.0, 0.0, 0.0)  # of the sums of finish()
_MASK = 2**63 - 1  # a note has 63 bits

FlushPlan = Mapping[int, Callable[[], None]]


class _Terms(IntEnum):
    """Two bits of a note: what a rank knows of its count when it starts the first chunk."""

    EARLY = 0  # nothing: it starts it before finish()
    UNCOUNTED = 1  # finish() without a count
    COUNTED = 2
    BAD = 3  # a negative count, or one that is not finite


class Reducer:
    """Reduce a gradient arena over ranks.

    **Collective** to construct: compares layouts and chunk tables.

    Args:
        arena: the gradients.
        comm: the ranks (default: the arena's).
        chunk_bytes: size of a middle chunk in bytes (default: the transport's).
        placement: which ranks the sums are for; with another one than ``"replicated"`` each rank has those of its own
            ranges alone after :meth:`wait`, and :meth:`finish` is an error.

    Attributes:
        chunks: the (start, stop) element ranges that are reduced at once, in order; ``views``: the same as arrays.
        step: finished reductions.
        opening: called once before the first chunk of a step is started; the caller sets it for each step.
        waited_seconds: time that the calling thread has spent in messages and waiting for other ranks, so far.

    Example:
        >>> import mpdp
        >>> arena = mpdp.GradientArena({"w": (3, 2), "b": (3,)}, "float32", "cpu")
        >>> reducer = mpdp.Reducer(arena)
        >>> arena["b"][...] = 4.0
        >>> reducer.ready("b")
        >>> arena["w"][...] = 2.0
        >>> reducer.finish(count=2)
        2.0
        >>> float(arena["b"][0])
        2.0
    """

    def __init__(
        self,
        arena: GradientArena,
        comm: Communicator | None = None,
        chunk_bytes: int | None = None,
        *,
        placement: str = "replicated",
    ) -> None:
        self.arena = arena
        self.comm = comm if comm is not None else arena.comm
        layout = arena.layout
        exchange(self.comm, Kind.CONSTRUCT, 0)
        middle = (
            chunk_bytes if chunk_bytes is not None else _middle(self.comm, arena.layout, arena.dtype.itemsize)
        )
        self.chunks = together(
            self.comm,
            lambda: chunk_table(layout.trainable_size, arena.dtype.itemsize, middle, self.comm.chunk_edge),
        )
        self.placement = Placement(placement, self.chunks, self.comm)
        self._starts = [start for start, _ in self.chunks]
        self.views: list[Any] = [arena.array[start:stop] for start, stop in self.chunks]
        self._span = {e.name: self._chunks_of(e.start, e.stop) for e in layout.trainable}
        self._members = [0] * len(self.chunks)
        for first, last in self._span.values():
            for chunk in range(first, last):
                self._members[chunk] += 1
        compare(
            self.comm,
            "gradient arena",
            {
                **{e.name: f"{arena.dtype.name}{list(e.shape)}" for e in layout.entries},
                "chunk table": self.chunks,
                "placement": placement,
            },
        )
        layout.count(self.comm.layouts)
        self.step = 0
        self.waited_seconds = 0.0
        self.opening: Callable[[], None] | None = None
        self._opened = False
        self._first: CheckedRequest | None = None  # the first chunk, where it carries the record
        self._terms = _Terms.EARLY
        self._settled: Agreed | None = None
        self._announced: set[str] = set()
        self._pending = list(self._members)
        self._next = 0
        self._requests: list[Request] = []

    def _chunks_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return the half-open range of chunks that hold elements start to stop."""
        if start == stop:
            return (0, 0)
        return bisect_right(self._starts, start) - 1, bisect_right(self._starts, stop - 1)

    def span(self, name: str) -> tuple[int, int]:
        """Return the half-open range of chunks that hold a trainable parameter. **Local.**"""
        return self._span[name]

    def ready(self, name: str) -> None:
        """Say that a gradient is final; starts the chunks that are complete with it.

        **Collective** in effect: what it starts, every rank starts, in the same order of chunks. The order of the
        calls may differ between ranks. Names that are never announced are reduced by :meth:`finish`, as they
        stand in the arena: where a rank does not use a parameter it writes zeros.

        Raises:
            KeyError: no such parameter.
            ValueError: announced twice in one step.
        """
        if name in self._announced:
            raise ValueError(
                f"name: expected one announcement a step, got a second for {name!r}; finish() comes first"
            )
        try:
            first, last = self._span[name]
        except KeyError:
            self.arena.layout[name]
            raise ValueError(
                f"name: expected a trainable parameter, got the frozen {name!r}; leave it out"
            ) from None
        self._announced.add(name)
        pending = self._pending
        for chunk in range(first, last):
            pending[chunk] -= 1
        if first <= self._next < last:
            upto = self._next
            while upto < len(pending) and pending[upto] == 0:
                upto += 1
            self.flush(upto)

    def plan(self, last_write: Mapping[str, int]) -> FlushPlan:
        """Return, for a tape, after which backward positions which chunks are started; see :meth:`chunks_after`.

        **Local.** Computed once a tape signature; the calls it holds take O(chunks) a step.
        """
        return {at: partial(self.flush, count) for at, count in self.chunks_after(last_write).items()}

    def chunks_after(self, last_write: Mapping[str, int]) -> dict[int, int]:
        """Return, for a tape, after which backward positions how many chunks are final, counted from the first.

        **Local.**

        Args:
            last_write: parameter name to the position, in backward order, of the last operation that writes its
                gradient. Parameters that are left out are final from the start.
        """
        ready_at = [-1] * len(self.chunks)
        for name, position in last_write.items():
            first, last = self._span[name]
            for chunk in range(first, last):
                ready_at[chunk] = max(ready_at[chunk], position)
        upto: dict[int, int] = {}
        position = -1
        for chunk, at in enumerate(ready_at):
            position = max(position, at)  # a chunk waits for those before it
            upto[position] = chunk + 1
        return upto

    def open(self, sums: Sequence[float] = ()) -> Agreed | None:
        """Agree with all ranks that they are in the same step, once a step, before its first chunk. **Collective.**

        Calls ``opening`` where the owner has set it for this step; a reducer used by hand exchanges its own record.

        Args:
            sums: numbers to add over ranks with that record.

        Returns:
            The record; None if it was ``opening``'s, was exchanged before, or is carried by the first chunk.
        """
        if self._opened:
            return None
        self._opened = True
        self._first = self._settled = None
        start = time.perf_counter()
        try:
            if self.opening is not None:
                opening, self.opening = self.opening, None
                opening()
                return None
            return exchange(self.comm, Kind.REDUCE, self.step, sums=sums, layout=self.arena.layout.digest)
        except BaseException:
            self.abandon()  # nothing has started
            raise
        finally:
            self.waited_seconds += time.perf_counter() - start

    def _begin(self, terms: _Terms, sums: Sequence[float]) -> Agreed | None:
        """Start the first chunk if it can carry what a record would say, else do as :meth:`open`. **Collective.**"""
        if self.opening is None and self.placement.whole and self.chunks and self.comm.size > 1:
            start = time.perf_counter()
            note = (self.arena.layout.digest + 4 * self.step + terms) & _MASK
            settle = partial(self._settle, sums)
            first = self.comm.start_checked_all_reduce(self.views[0], note, sums[0], settle)
            self.waited_seconds += time.perf_counter() - start
            if first is not None:
                self._opened, self._first, self._terms, self._next = True, first, terms, 1
                self._requests.append(first)
                return None
        return self.open(sums)

    def _settle(self, sums: Sequence[float]) -> None:
        """Exchange the record after all: first chunks carry different notes, or a rank is elsewhere. **Collective.**"""
        try:
            self._settled = exchange(
                self.comm, Kind.REDUCE, self.step, sums=sums, layout=self.arena.layout.digest
            )
        except BaseException:
            self.abandon()  # the transport has taken back every chunk
            raise

    def _carried(self, first: CheckedRequest) -> Agreed | None:
        """Return what the ranks agreed on by their first chunks; None where these carried no counts. **Local.**"""
        settled, self._first, self._settled = self._settled, None, None
        if first.values is None:
            return settled
        if self._terms not in (_Terms.UNCOUNTED, _Terms.COUNTED):
            return None
        total = 0.0
        for value in first.values:  # in the order of ranks, as a record does; sum() may add otherwise
            total += value
        size = self.comm.size
        without = size if self._terms is _Terms.UNCOUNTED else 0
        return Agreed((total, without, 0, size), True, False, False)

    def flush(self, upto: int) -> None:
        """Start all chunks before ``upto`` that were not started yet. **Collective.**"""
        if self._next >= upto:
            return
        if not self._opened:
            self._begin(_Terms.EARLY, _NOTHING_YET)
        start = time.perf_counter()
        while self._next < upto:
            self._requests.append(self.placement.start_reducing(self.views[self._next], self._next))
            self._next += 1
        self.waited_seconds += time.perf_counter() - start

    def wait(self) -> None:
        """Start what is left, wait for every chunk and make ready for the next step. **Collective.**"""
        self.flush(len(self.chunks))
        if not self._opened:  # parameters without elements make no chunk
            self.open()
        start = time.perf_counter()
        for request in self._requests:
            request.wait()
        self.waited_seconds += time.perf_counter() - start
        self._requests.clear()
        self._next = 0
        self._opened = False
        if self._announced:
            self._announced.clear()
            self._pending[:] = self._members
        self.step += 1

    def abandon(self) -> None:
        """Forget a step that was broken off, without a message. **Local.**"""
        self.opening = self._first = self._settled = None
        self._opened = False
        self._requests.clear()
        self._next = 0
        self._announced.clear()
        self._pending[:] = self._members

    def finish(self, count: float | None = None) -> float | None:
        """Return once every gradient in the arena is the sum over ranks.

        **Collective.**

        Args:
            count: samples (or tokens) that this rank's gradients are the sum over; the reduced gradients are
                then divided by the global count. None leaves the sums.

        Returns:
            the global count, or None.

        Raises:
            DisagreementError: on all ranks, when a rank skipped a step or is in another call.
            ValueError: on all ranks: a negative count on one, a count on some alone, or a global count of zero.
        """
        if not self.placement.whole:
            raise ValueError(
                f'finish: expected placement="replicated", got {self.placement.name!r}, where no rank has all sums; '
                "call wait() and use the ranges of placement.held"
            )
        bad = count is not None and not (count >= 0 and math.isfinite(count))
        step = self.step
        sums = (0.0 if bad else count or 0.0, count is None, bad, 1)
        agreed = None
        if not self._opened:
            terms = _Terms.BAD if bad else _Terms.UNCOUNTED if count is None else _Terms.COUNTED
            agreed = self._begin(terms, sums)
        self.wait()
        if self._first is not None:
            agreed = self._carried(self._first)
        if (
            agreed is None or agreed.sums[-1] != self.comm.size
        ):  # some rank has opened the step before it came here
            agreed = exchange(self.comm, Kind.FINISH, step, sums=sums, layout=self.arena.layout.digest)
        total, without, wrong, _ = agreed.sums
        if wrong:
            agree(self.comm, _bad_count(count) if bad else None)
        if without not in (0, self.comm.size):
            raise on_all_ranks(
                ValueError(
                    f"count: expected one on every rank or on none, got none on {without:.0f} of {self.comm.size}; "
                    "pass count= everywhere, also where it is 0"
                )
            )
        if count is None:
            return None
        if total == 0:
            raise on_all_ranks(
                ValueError("count: expected a global count above 0, got 0; no rank had a sample")
            )
        self.arena.array *= self.arena.dtype.type(1.0 / total)
        return total


def _middle(comm: Communicator, layout: Layout, itemsize: int) -> int:
    """Return the size of a middle chunk in bytes that the transport asks for."""
    if comm.most_chunks is None:
        return comm.chunk_bytes
    return max(comm.chunk_bytes, -(-layout.trainable_size * itemsize // comm.most_chunks))


def _bad_count(count: float | None) -> ValueError:
    return ValueError(
        f"count: expected a number of samples of 0 or more, got {count}; pass what the gradients are sums over"
    )
