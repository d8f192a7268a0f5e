"""Loader: this rank's micro-batches of every update, read ahead by one background thread.

The stream of an update depends on (length, seed, update index) and the rank's share only, so going on
at update k gives what a run from the start gives there. The loader is told rank and size; it never
looks up a world and sends no message. Read next: ``order`` for the arithmetic, ``datasets`` for
reading, ``ahead`` for the thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..device import Device, as_device
from .ahead import ReadAhead
from .order import Order, Share, batches, micro_batches, whole
from .reading import Draw, check_dataset, map_arrays, split_batch, take
from .upload import Slot, Upload

_PLACES_AHEAD = 4096  # places put in order at once: a call of 100 places costs as much as one of 2000


@dataclass(slots=True)
class MicroBatch:
    """This rank's share of one global micro-batch.

    Attributes:
        inputs: positional arguments of the model; None where the share is empty and the shape of a
            sample is not known yet (skip the forward pass then).
        kwargs: keyword arguments of the model.
        target: target of the loss, or None.
        start: place of the share's first sample in the global batch; None where a model needs none.
        count: samples of the share, 0 if there is nothing for this rank.
        total: samples of the micro-batch over all ranks, where it is known.
        indices: int64 array of shape (count,), the samples' numbers in the data set; None where they
            come from none.
        epoch: epoch of the update.
        update: index of the update in the run.
        slot: memory on a GPU that holds the arrays, or None. Call :meth:`acquire` before they are used and
            :meth:`release` after the last use.
    """

    inputs: tuple[Any, ...] | None
    kwargs: dict[str, Any]
    target: Any
    start: int | None
    count: int
    total: int | None
    indices: np.ndarray | None
    epoch: int
    update: int
    slot: Slot | None = None

    def acquire(self) -> None:
        """Let what the calling thread submits to the device come after the arrays' copy. **Local.**"""
        if self.slot is not None:
            self.slot.acquire()

    def release(self) -> None:
        """Say that nothing submitted from now on reads the arrays. **Local.**"""
        if self.slot is not None:
            self.slot.release()
            self.slot = None


class Loader:
    """Cut a data set into the micro-batches of one rank, update by update.

    **Local.** Every rank that is built with the same arguments (but ``rank``) makes the same number of
    updates of the same number of micro-batches; over the ranks each sample of an epoch comes once.

    Args:
        dataset: see :func:`~mpdp.data.take`.
        global_batch_size: samples of an update over all ranks and micro-batches.
        accumulate: global micro-batches in an update.
        rank: this rank.
        size: number of ranks.
        seed: of the order.
        shuffle: a new order each epoch; False keeps the data set's.
        drop_last: leave out a short last batch.
        dtype: floating arrays are cast to it, others are left alone; None casts nothing.
        device: where the arrays go: to a GPU asynchronously, one batch ahead, from pinned memory.
        prefetch: updates read ahead by a background thread; 0 reads in the caller's thread.
        say: called once with a line of text if data loses precision by the cast; the default logs it on
            rank 0.
        purpose: what an item is called in the note of an error, such as ``"batch of an evaluation"``.
        zero_rows: give every empty share arrays of zero rows, and read sample 0 for their shapes where nothing else
            tells them.

    Raises:
        TypeError: not a data set.
        ValueError: a number out of range, or no full batch with ``drop_last``.

    Example:
        >>> from mpdp.data import ArrayDataset
        >>> loader = Loader(ArrayDataset(np.arange(5.0), np.arange(5)), 2, shuffle=False, prefetch=0)
        >>> [[m.target.tolist() for m in update] for update in loader]
        [[[0, 1]], [[2, 3]], [[4]]]
    """

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int,
        *,
        accumulate: int = 1,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        dtype: Any = "float32",
        device: Device | str = "cpu",
        prefetch: int = 2,
        say: Callable[[str], None] | None = None,
        purpose: str = "update",
        zero_rows: bool = False,
    ) -> None:
        self.dataset = dataset
        self.length = check_dataset(dataset)
        self.global_batch_size = whole("global_batch_size", global_batch_size, 1)
        self.accumulate = whole("accumulate", accumulate, 1)
        self.size = whole("size", size, 1)
        self.rank = whole("rank", rank, 0)
        if self.rank >= self.size:
            raise ValueError(f"rank: expected one of 0..{self.size - 1}, got {self.rank}; ranks count from 0")
        self.seed, self.shuffle = int(seed), bool(shuffle)
        self.dtype = None if dtype is None else np.dtype(dtype)
        self.device = as_device(device)
        self._upload = None if self.device.kind == "cpu" else Upload(self.device)
        self.prefetch = whole("prefetch", prefetch, 0)
        self._starts = batches(self.length, self.global_batch_size, drop_last)
        if self.length and not self._starts:
            raise ValueError(
                f"drop_last: expected at least one full batch of {self.global_batch_size} samples, got "
                f"{self.length} samples; lower global_batch_size or keep the short batch"
            )
        self._say = say or _log
        self.purpose = purpose
        self._said = False
        self._zero_rows = bool(zero_rows)
        self._empty: Any = None  # the last batch cut to no rows: what an empty share is given

    @property
    def updates_per_epoch(self) -> int:
        """Updates of one pass over the data; 0 for an empty data set."""
        return len(self._starts)

    def __len__(self) -> int:
        return self.updates_per_epoch

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        """Return the updates of epoch 0."""
        return self.updates(0, self.updates_per_epoch)

    def updates(self, first: int = 0, stop: int | None = None) -> ReadAhead[list[MicroBatch]]:
        """Return an iterator over the updates from ``first`` on, each a list of micro-batches.

        **Local.** Update u belongs to epoch ``u // updates_per_epoch``; every list holds ``accumulate``
        micro-batches. The iterator owns a thread if ``prefetch`` is above 0: exhaust it, close it, use
        it in a ``with`` block or drop it, and the thread ends.

        Args:
            first: index of the first update, counted over the whole run; where a resumed run goes on.
            stop: index after the last one; None goes on for ever (an empty data set ends at once).

        Raises:
            Exception: what the data set raised while reading, in the call that would have returned that
                update, with a note naming sample, rank, epoch and update.
        """
        first = whole("first", first, 0)
        stop = None if stop is None else whole("stop", stop, 0)
        return ReadAhead(self._updates(first, stop), self.prefetch, f"mpdp-loader-rank{self.rank}")

    def _updates(self, first: int, stop: int | None) -> Iterator[list[MicroBatch]]:
        order: Order | None = None
        update = first
        while self._starts and (stop is None or update < stop):
            epoch, batch = divmod(update, len(self._starts))
            if order is None or order.epoch != epoch:
                order = Order(self.length, self.seed, epoch, self.shuffle)
            last = len(self._starts) if stop is None else min(len(self._starts), batch + stop - update)
            planned = self._plan(order, batch, last)
            for shares, samples in planned:
                yield [self._load(*pair, epoch, update) for pair in zip(shares, samples)]
                update += 1

    def _plan(self, order: Order, batch: int, last: int) -> list[tuple[list[Share], list[np.ndarray]]]:
        """Return shares and samples of the next batches of an epoch, some thousand places at once."""
        plan: list[list[Share]] = []
        places: list[np.ndarray] = []
        planned = 0
        while batch < last and (planned < _PLACES_AHEAD or not plan):
            start = self._starts[batch]
            samples = min(self.global_batch_size, self.length - start)
            plan.append(micro_batches(samples, self.accumulate, self.size, self.rank))
            places += [np.arange(start + share.start, start + share.stop) for share in plan[-1]]
            planned += max(1, samples // self.size)
            batch += 1
        found = order.at(np.concatenate(places))
        cuts = np.cumsum([len(part) for part in places])[:-1]
        parts = iter(np.split(found, cuts))
        return [(shares, [next(parts) for _ in shares]) for shares in plan]

    def _load(self, share: Share, indices: np.ndarray, epoch: int, update: int) -> MicroBatch:
        when = f"epoch {epoch}, update {update}" if self.purpose == "update" else f"{self.purpose} {update}"
        where = f" (rank {self.rank}, {when})"
        draw = Draw(self.seed, epoch)
        batch = take(self.dataset, indices, where, draw)
        if batch is None and self._zero_rows and self._empty is None:
            first = map_arrays(self._ready, take(self.dataset, np.zeros(1, np.int64), where, draw))
            self._empty = map_arrays(lambda array, _: array[:0].copy(), first)
        return self._deliver(batch, share, indices, epoch, update)

    def _deliver(
        self, batch: Any, share: Share, indices: np.ndarray | None, epoch: int, update: int
    ) -> MicroBatch:
        """Return a share as the model takes it: cast, on its device; with zero rows where it is empty."""
        count = share.stop - share.start
        if batch is None:
            batch = self._empty
        else:
            batch = map_arrays(self._ready, batch)
            if count:
                self._empty = map_arrays(lambda array, _: array[:0].copy(), batch)
        slot = None
        if self._upload is not None and batch is not None and count:
            batch, slot = self._upload.start(batch)
        inputs, kwargs, target = (None, {}, None) if batch is None else split_batch(batch)
        return MicroBatch(
            inputs, kwargs, target, share.start, count, share.total, indices, epoch, update, slot
        )

    def _ready(self, array: Any, path: str) -> Any:
        """Return an array in the loader's dtype (floating ones)."""
        if not hasattr(array, "dtype"):
            array = np.asarray(array)
        if self.dtype is not None and array.dtype.kind == "f" and array.dtype != self.dtype:
            if array.dtype.itemsize > self.dtype.itemsize and not self._said:
                self._said = True
                self._tell(f"{path}: cast from {array.dtype} to {self.dtype} on loading")
            array = array.astype(self.dtype)
        return array

    def _tell(self, line: str) -> None:
        if self.rank == 0 or self._say is not _log:
            self._say(line)


def _log(line: str) -> None:
    logging.getLogger("mpdp.data").warning(line)
