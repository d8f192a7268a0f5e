"""Streams: data that can only be read one element after another, and their loader.

A stream has no length and no places to ask for. Global batch i of an epoch is elements i G to (i + 1) G - 1, and ranks
take their shares of it, by element: each is used once, whatever the number of ranks. When a stream ends is known when
it ends, so the loop of ``fit`` has the ranks agree on each batch (``training.sources``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from ..device import Device, as_device
from ..kernels.random import derive_key
from .ahead import ReadAhead
from .loader import Loader, MicroBatch
from .order import Order, Share, micro_batches, share, whole
from .reading import Draw, map_arrays, sample_note, stack
from .transforms import sample_random
from .upload import Upload


class Stream:
    """Serve the elements of an iterable that begins anew each time it is iterated over.

    **Local.** As a rule every rank reads the same elements in the same order and keeps those of its shares, so reading
    should be cheap and what is dear should be done by ``transform``, which only kept elements go through. Where each
    rank has elements of its own (files of its own, say), ``sharded=True`` takes all of them, in each update up to the
    rank's share of the global batch, until no rank has any; ranks may have different numbers.

    Args:
        source: an iterable, such as an iterable data set of Hugging Face or PyTorch, or a function of the epoch that
            returns one (``source(epoch)``; with ``sharded``: ``source(epoch, rank, size)``).
        window: with ``fit(shuffle=True)``, elements are shuffled within windows of so many; 1 keeps the order.
        transform: ``transform(element)`` returns a sample; with ``random`` it is called as
            ``transform(element, random)``, with random numbers that belong to (seed, epoch, number of the element).
        random: see ``transform``.
        sharded: each rank's source yields elements of its own.

    Raises:
        TypeError: nothing that can be iterated over again.

    Example:
        >>> stream = Stream(lambda epoch: ((float(i), i % 2) for i in range(5)))
        >>> [element for _, element in stream.elements(0)][:2]
        [(0.0, 0), (1.0, 1)]
    """

    def __init__(
        self,
        source: Iterable[Any] | Callable[..., Iterable[Any]],
        *,
        window: int = 1,
        transform: Callable[..., Any] | None = None,
        random: bool = False,
        sharded: bool = False,
    ) -> None:
        if not hasattr(source, "__iter__") and not callable(source):
            raise TypeError(
                f"source: expected an iterable or a function of the epoch, got {type(source).__name__}; "
                "pass lambda epoch: ..."
            )
        if hasattr(source, "__next__"):
            raise TypeError(
                f"source: expected something that begins anew each epoch, got a {type(source).__name__}, which is "
                "read once; pass a function that makes it"
            )
        if transform is not None and not callable(transform):
            raise TypeError(f"transform: expected a function, got {type(transform).__name__}; pass one")
        self.source, self.window = source, whole("window", window, 1)
        self.transform, self.random, self.sharded = transform, bool(random), bool(sharded)

    def elements(
        self, epoch: int, *, seed: int = 0, shuffle: bool = False, rank: int = 0, size: int = 1
    ) -> Iterator[tuple[int, Any]]:
        """Yield (number, element) of one epoch. **Local.**"""
        numbered = enumerate(self._begin(epoch, rank, size))
        if not shuffle or self.window == 1:
            yield from numbered
            return
        count = 0
        while block := list(islice(numbered, self.window)):
            low, high = derive_key(seed, "stream window", count)
            for place in Order(len(block), low | high << 32, epoch).indices(0, len(block)).tolist():
                yield block[place]
            count += 1

    def sample(self, number: int, element: Any, draw: Draw) -> Any:
        """Return an element as a sample. **Local.**"""
        if self.transform is None:
            return element
        if self.random:
            return self.transform(element, sample_random(draw, number))
        return self.transform(element)

    def _begin(self, epoch: int, rank: int, size: int) -> Iterable[Any]:
        if hasattr(self.source, "__iter__"):
            if hasattr(self.source, "set_epoch"):
                self.source.set_epoch(epoch)
            return self.source
        return self.source(epoch, rank, size) if self.sharded else self.source(epoch)


def as_dataset(dataset: Any) -> Any:
    """Return data as the loader takes them: what can only be iterated over becomes a :class:`Stream`. **Local.**

    PyTorch gives its iterable data sets a ``__getitem__`` that raises; Hugging Face's have no length.
    """
    if isinstance(dataset, (Stream, str, bytes, dict, set, frozenset)) or not hasattr(dataset, "__iter__"):
        return dataset
    iterable = any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__)
    if iterable or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return Stream(dataset)
    return dataset


def length_of(dataset: Any) -> int | str | None:
    """Return the length of data as ranks compare it. **Local.**"""
    if isinstance(dataset, Stream):
        return "a sharded stream" if dataset.sharded else "a stream"
    return None if dataset is None else len(dataset)


class StreamLoader(Loader):
    """Cut a stream into the micro-batches of one rank, update by update.

    **Local.**

    Args:
        dataset: the stream.
        global_batch_size: samples of an update over all ranks and micro-batches.
        options: as for :class:`Loader`, but for ``drop_last``, which the loop decides.
    """

    def __init__(
        self,
        dataset: Stream,
        global_batch_size: int,
        *,
        accumulate: int = 1,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        dtype: Any = "float32",
        device: Device | str = "cpu",
        prefetch: int = 2,
        say: Callable[[str], None] | None = None,
        purpose: str = "update",
        zero_rows: bool = False,
    ) -> None:
        super().__init__(
            (), global_batch_size, accumulate=accumulate, rank=rank, size=size, seed=seed, shuffle=shuffle,
            dtype=dtype, device="cpu", prefetch=prefetch, say=say, purpose=purpose, zero_rows=zero_rows,
        )  # fmt: skip
        self.dataset = dataset
        self.device = as_device(device)
        self._upload = None if self.device.kind == "cpu" else Upload(self.device)

    def epochs(self, epoch: int = 0, batch: int = 0, count: int | None = None) -> ReadAhead[list[MicroBatch]]:
        """Return an iterator over updates from batch ``batch`` of epoch ``epoch`` on; an empty list ends an epoch.

        **Local.** An update's micro-batches are those of the whole batch: ``total`` adds up to its samples, over all
        ranks, or over this one alone where the stream is sharded. What lies before ``batch`` is read and left out.

        Args:
            epoch: where to begin.
            batch: updates of that epoch that are done already.
            count: epochs to read; None goes on for ever.

        Raises:
            Exception: what the stream raises, with a note naming element, rank, epoch and update.
        """
        return ReadAhead(self._epochs(epoch, batch, count), self.prefetch, f"mpdp-loader-rank{self.rank}")

    def _epochs(self, epoch: int, batch: int, count: int | None) -> Iterator[list[MicroBatch]]:
        stream = self.dataset
        done = 0
        while count is None or done < count:
            elements = stream.elements(
                epoch, seed=self.seed, shuffle=self.shuffle, rank=self.rank, size=self.size
            )
            wanted = self.global_batch_size
            if stream.sharded:
                first, last = share(self.global_batch_size, self.size, self.rank)
                wanted = last - first
            for _ in islice(elements, batch * wanted):
                pass
            while True:
                block = list(islice(elements, wanted))
                if not block:
                    break
                yield self._cut(block, epoch, batch)
                batch += 1
            yield []
            epoch, batch, done = epoch + 1, 0, done + 1

    def _cut(self, block: list[tuple[int, Any]], epoch: int, batch: int) -> list[MicroBatch]:
        """Return this rank's share of each micro-batch of a batch."""
        size, rank = (1, 0) if self.dataset.sharded else (self.size, self.rank)
        when = (
            f"epoch {epoch}, update {batch} of it" if self.purpose == "update" else f"{self.purpose} {batch}"
        )
        return [
            self._read(
                part, block[part.start : part.stop], block[0], epoch, batch, f" (rank {self.rank}, {when})"
            )
            for part in micro_batches(len(block), self.accumulate, size, rank)
        ]

    def _read(
        self,
        part: Share,
        kept: list[tuple[int, Any]],
        spare: tuple[int, Any],
        epoch: int,
        batch: int,
        where: str,
    ) -> MicroBatch:
        """Return a share; where it is empty and zero rows are wanted, another rank's element tells their shapes."""
        unknown = self._zero_rows and self._empty is None and not kept
        draw, samples = Draw(self.seed, epoch), []
        for number, element in [spare] if unknown else kept:
            with sample_note(number, where):
                samples.append(self.dataset.sample(number, element, draw))
        numbers = np.array([number for number, _ in kept], dtype=np.int64)
        found = None
        if samples:
            with sample_note(int(numbers[0]) if len(numbers) else spare[0], where):
                found = stack(samples, numbers if kept else [spare[0]])
        if unknown:
            self._empty = map_arrays(lambda array, _: array[:0].copy(), map_arrays(self._ready, found))
            found = None
        return self._deliver(found, part, numbers, epoch, batch)
