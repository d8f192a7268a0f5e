"""Order: which sample stands at which place of an epoch, and which rank takes which places.

The order is a keyed bijection, not a stored permutation: any rank computes any place by itself, in
constant memory, and nothing depends on the number of ranks. Shares are plain index arithmetic, so all
ranks derive equal numbers of updates and micro-batches without a message. Read next: ``loader``.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import numpy as np

from ..kernels import random

# Two rounds place one index uniformly, four make pairs look independent for a wide domain; domains of
# 2 x 2 need more to mix whole permutations, and twelve cost 60 ns an index.
_ROUNDS = 12
_PIECE = 8192  # places worked on at once: five uint64 columns of this length stay in the L2 cache
_32 = np.uint64(32)
_MIX = np.uint64(0xD6E8FEB86659FD93)
MOST = 2**62  # longest data set


class Order:
    """Put the samples of one epoch in an order that any rank computes for any place.

    **Local.** A Feistel network over pairs (a, b) of numbers below ``m = ceil(sqrt(length))``::

        x = a m + b;    twelve times: (a, b) <- (b, (a + f(key, round, b)) mod m)

    is a bijection of 0..m^2 - 1. Results of ``length`` or more walk on until they fall below it, which
    keeps it a bijection of 0..length - 1. The domain exceeds ``length`` by a share of about
    2 / sqrt(length), so few walk.

    Args:
        length: samples in the data set, 0 to 2^62.
        seed: the run's seed.
        epoch: counted from 0; each has its own order.
        shuffle: False keeps the data set's order.

    Example:
        >>> order = Order(10, seed=0, epoch=0)
        >>> sorted(order.indices(0, 10).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        >>> bool((order.indices(4, 7) == order.indices(0, 10)[4:7]).all())
        True

    Source: Black, Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002), sections 4 and 5: the
    generalised Feistel cipher and cycle walking. Pairs below a square root walk 1.0 times on average,
    halves of an even number of bits up to 4 times. The round function mixes; it is no cipher.
    """

    def __init__(self, length: int, seed: int = 0, epoch: int = 0, shuffle: bool = True) -> None:
        self.length = whole("length", length, 0)
        if self.length > MOST:
            raise ValueError(f"length: expected at most 2^62 samples, got {self.length}; cut the data set")
        self.seed, self.epoch, self.shuffle = int(seed), int(epoch), bool(shuffle)
        self._side = max(1, math.isqrt(max(self.length, 1) - 1) + 1)
        words = random.bits(random.derive_key(self.seed, "order", self.epoch), 0, 0, 1, 4 * _ROUNDS + 1)[0]
        pairs = words[:-1].reshape(_ROUNDS, 4).astype(np.uint64)
        # for odd m all rounds together are an even permutation: swap 0 and 1 first for half of the keys
        self._swap = bool(words[-1] & 1)
        self._offsets = (pairs[:, 0] << _32) | pairs[:, 1]
        self._factors = (pairs[:, 2] << _32) | pairs[:, 3] | np.uint64(1)

    def __len__(self) -> int:
        return self.length

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Return the samples at places ``start`` to ``stop`` - 1.

        **Local.** About 10 million a second.

        Raises:
            ValueError: places outside 0..length.
        """
        if not 0 <= start <= stop <= self.length:
            raise ValueError(
                f"order: expected places with 0 <= start <= stop <= {self.length}, got {start} and {stop}; "
                "places count from 0"
            )
        return self._samples(np.arange(start, stop, dtype=np.int64))

    def at(self, places: Any) -> np.ndarray:
        """Return the samples at the given places.

        **Local.**

        Args:
            places: one-dimensional integer array, each in 0..length - 1.

        Returns:
            int64 array of the same length.
        """
        places = np.asarray(places, dtype=np.int64)
        if len(places) and not (places.min() >= 0 and places.max() < self.length):
            raise ValueError(
                f"order: expected places in 0..{self.length - 1}, got {places.min()}..{places.max()}; "
                "places count from 0"
            )
        return self._samples(places)

    def _samples(self, places: np.ndarray) -> np.ndarray:
        if not self.shuffle:
            return places
        out = np.empty(len(places), dtype=np.int64)
        for first in range(0, len(places), _PIECE):
            out[first : first + _PIECE] = self._walk(places[first : first + _PIECE].astype(np.uint64))
        return out

    def _walk(self, x: np.ndarray) -> np.ndarray:
        length = np.uint64(self.length)
        x = self._rounds(x)
        outside = np.flatnonzero(x >= length)
        while len(outside):
            again = self._rounds(x[outside])
            x[outside] = again
            outside = outside[again >= length]
        return x

    def _rounds(self, x: np.ndarray) -> np.ndarray:
        """Return the network's image of each x below m^2."""
        side = np.uint64(self._side)
        if self._swap:
            x = x ^ (x < np.uint64(2))
        a = x // side
        b = x - a * side
        mixed, high = np.empty_like(x), np.empty_like(x)
        for offset, factor in zip(self._offsets, self._factors):
            np.add(b, offset, mixed)
            np.multiply(mixed, factor, mixed)
            np.right_shift(mixed, _32, high)
            np.bitwise_xor(mixed, high, mixed)
            np.multiply(mixed, _MIX, mixed)
            np.right_shift(mixed, _32, mixed)
            np.multiply(mixed, side, mixed)  # the upper 32 bits, as a fraction of m
            np.right_shift(mixed, _32, mixed)
            np.add(a, mixed, a)
            # a mod m for a below 2 m: the smaller of a and a - m, which wraps around where a < m
            np.subtract(a, side, mixed)
            np.minimum(a, mixed, out=a)
            a, b = b, a
        return a * side + b


class Share(NamedTuple):
    """One rank's part of one global micro-batch, as places in the global batch."""

    start: int
    stop: int
    total: int  # samples of the micro-batch over all ranks


def share(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return the contiguous range of part ``index``; sizes differ by at most one, larger ones first.

    **Local.**

    Args:
        total: how much there is.
        parts: into how many it is cut, 1 or more.
        index: 0 to parts - 1.

    Example:
        >>> [share(7, 3, i) for i in range(3)]
        [(0, 3), (3, 5), (5, 7)]
    """
    size, longer = divmod(total, parts)
    start = index * size + min(index, longer)
    return start, start + size + (index < longer)


def micro_batches(batch_size: int, accumulate: int, size: int, rank: int) -> list[Share]:
    """Cut a global batch into global micro-batches and return this rank's share of each.

    **Local.** The micro-batches are the same sets of samples for every world size. Where a batch has
    fewer samples than micro-batches or ranks, some shares are empty; every rank still has
    ``accumulate`` of them.

    Args:
        batch_size: samples of this global batch (the last one of an epoch may be short).
        accumulate: global micro-batches in a global batch.
        size: ranks.
        rank: whose shares to return.

    Example:
        >>> micro_batches(10, accumulate=2, size=2, rank=1)
        [Share(start=3, stop=5, total=5), Share(start=8, stop=10, total=5)]
    """
    shares = []
    for i in range(accumulate):
        first, last = share(batch_size, accumulate, i)
        start, stop = share(last - first, size, rank)
        shares.append(Share(first + start, first + stop, last - first))
    return shares


def batches(length: int, global_batch_size: int, drop_last: bool = False) -> range:
    """Return the places at which the global batches of an epoch start.

    **Local.** Batch i reaches from there to ``min(start + global_batch_size, length)``; the length of
    the range is the number of updates of an epoch.

    Args:
        length: samples in the data set.
        global_batch_size: samples of an update over all ranks and micro-batches.
        drop_last: leave out a short last batch.

    Example:
        >>> list(batches(10, 4)), list(batches(10, 4, drop_last=True))
        ([0, 4, 8], [0, 4])
    """
    stop = length - length % global_batch_size if drop_last else length
    return range(0, stop, global_batch_size)


def whole(name: str, value: Any, least: int) -> int:
    """Return an argument as an int of ``least`` or more. **Local.**"""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected a whole number, got {value!r}; pass an int") from None
    if number < least:
        raise ValueError(f"{name}: expected {least} or more, got {number}; pass a larger one")
    return number
