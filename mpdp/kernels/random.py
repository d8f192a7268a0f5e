"""Counter-based random numbers: Philox4x32-10, the same bits in NumPy and, later, in CUDA.

A number is a pure function of a key (what it is for) and a counter (which one it is), so masks,
orders and initial weights depend neither on the number of ranks nor on what was drawn before.
NumPy's own ``Philox`` is the 4x64 variant and gives other bits.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 4.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

Key = tuple[int, int]

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_PART = 1 << 15  # numbers that one thread draws at once
_MOST_THREADS = 16
_ROWS = 4096  # counters worked on at once: four uint64 columns of this length stay in the L2 cache


def derive_key(seed: int, *words: int | str) -> Key:
    """Return the 64-bit key of one purpose, as two 32-bit integers.

    **Local.** Two different tuples of words give unrelated keys (BLAKE2b of their text).

    Args:
        seed: the run's seed, any integer.
        words: what the numbers are for, such as ``("dropout", "layers.2")``.

    Example:
        >>> derive_key(0, "dropout", "a") != derive_key(0, "dropout", "b")
        True
    """
    text = "\x1f".join([str(int(seed)), *(f"{type(w).__name__}:{w}" for w in words)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def philox4x32(counter: Any, key: Key) -> np.ndarray:
    """Return Philox4x32-10 of each counter.

    **Local.**

    Args:
        counter: uint32 array of shape (n, 4).
        key: two 32-bit integers.

    Returns:
        uint32 array of shape (n, 4).
    """
    counter = np.asarray(counter, dtype=np.uint32)
    if counter.ndim != 2 or counter.shape[1] != 4:
        raise ValueError(f"counter: expected shape (n, 4), got {counter.shape}")
    out = np.empty(counter.shape, dtype=np.uint32)
    for start in range(0, len(counter), _ROWS):
        part = counter[start : start + _ROWS]
        columns = [part[:, i].astype(np.uint64) for i in range(4)]
        for i, column in enumerate(_rounds(columns, key)):
            out[start : start + _ROWS, i] = column
    return out


def _rounds(columns: list[np.ndarray], key: Key) -> list[np.ndarray]:
    """Run the ten rounds on four uint64 columns that hold 32-bit values; the columns are overwritten."""
    c0, c1, c2, c3 = columns
    p0, p1 = np.empty_like(c0), np.empty_like(c0)
    k0, k1 = key
    for _ in range(10):
        np.multiply(c0, _M0, out=p0)
        np.multiply(c2, _M1, out=p1)
        # c0' = high(p1) ^ c1 ^ k0, c1' = low(p1), c2' = high(p0) ^ c3 ^ k1, c3' = low(p0)
        np.right_shift(p1, _32, out=c0)
        np.bitwise_xor(c0, c1, out=c0)
        np.bitwise_xor(c0, np.uint64(k0), out=c0)
        np.right_shift(p0, _32, out=c2)
        np.bitwise_xor(c2, c3, out=c2)
        np.bitwise_xor(c2, np.uint64(k1), out=c2)
        np.bitwise_and(p1, _LOW, out=c1)
        np.bitwise_and(p0, _LOW, out=c3)
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def bits(key: Key, step: int, start: int, count: int, elements: int) -> np.ndarray:
    """Return the random words of ``count`` consecutive samples of one step.

    **Local.** Element e of the sample at position p takes word e mod 4 of
    ``philox4x32((e // 4, p low, p high, step), key)``: which rank holds the sample does not matter.

    Args:
        key: from :func:`derive_key`.
        step: number of the update, taken modulo 2^32.
        start: position of the first sample in the global batch.
        count: number of samples.
        elements: random numbers a sample.

    Returns:
        uint32 array of shape (count, elements).
    """
    blocks = -(-elements // 4)
    out = np.empty((count * blocks, 4), dtype=np.uint32)
    for first in range(0, count * blocks, _ROWS):
        index = np.arange(first, min(first + _ROWS, count * blocks), dtype=np.uint64)
        position = index // np.uint64(max(blocks, 1))
        block = index - position * np.uint64(blocks)
        position += np.uint64(start)
        columns = [block, position & _LOW, position >> _32, np.full_like(block, step & 0xFFFFFFFF)]
        for i, column in enumerate(_rounds(columns, key)):
            out[first : first + len(index), i] = column
    return out.reshape(count, blocks * 4)[:, :elements]


def keep_threshold(p: float) -> int:
    """Return the word below which an element is dropped with probability ``p``. **Local.**"""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"p: expected a probability in [0, 1), got {p}")
    return round(p * 2.0**32)


def dropout_key(seed: int, path: str, call: int = 0) -> Key:
    """Return the key of the dropout masks of one module. **Local.**

    Args:
        seed: the trainer's seed.
        path: the module's name in the model, such as ``"layers.2"``.
        call: how often the module ran before in the same forward pass.
    """
    return derive_key(seed, "dropout", path, call)


def dropout_mask(
    seed: int, path: str, step: int, start: int, shape: tuple[int, ...], p: float, call: int = 0
) -> np.ndarray:
    """Return the mask that ``nn.Dropout`` applies: True where an element is kept.

    **Local.** Kept elements are then divided by 1 - p.

    Args:
        seed: the trainer's seed.
        path: the module's name in the model, such as ``"layers.2"``.
        step: updates finished before this one.
        start: position of the first sample in the global batch.
        shape: (samples, ...) of the activations.
        p: probability to drop.
        call: how often the module ran before in the same forward pass.

    Returns:
        boolean array of ``shape``.

    Example:
        >>> whole = dropout_mask(0, "drop", 3, 0, (6, 5), 0.5)
        >>> part = dropout_mask(0, "drop", 3, 4, (2, 5), 0.5)
        >>> bool((whole[4:] == part).all())
        True
    """
    words = bits(dropout_key(seed, path, call), step, start, shape[0], math.prod(shape[1:]))
    return (words >= np.uint32(keep_threshold(p))).reshape(shape)


def uniform(key: Key, count: int) -> np.ndarray:
    """Return ``count`` float64 numbers in [0, 1) with 53 random bits each. **Local.**"""
    out = np.empty(count)
    _in_parts(lambda start, stop: _uniform(out[start:stop], key, start), count)
    return out


def normal(key: Key, count: int, mean: float = 0.0, std: float = 1.0, dtype: Any = np.float64) -> np.ndarray:
    """Return ``count`` numbers of a normal distribution (Box and Muller), rounded from float64. **Local.**

    Many numbers are drawn by several threads, which does not change them.
    """
    pairs = -(-count // 2)
    out = np.empty(count, dtype)
    _in_parts(lambda start, stop: _normal(out, key, pairs, start, stop, mean, std), pairs)
    return out


def _in_parts(draw: Callable[[int, int], None], count: int) -> None:
    """Call ``draw`` for ranges that make up 0..count, in threads where there are many."""
    starts = range(0, count, _PART)
    threads = min(len(starts), _cores(), _MOST_THREADS)
    if threads <= 1:
        for start in starts:
            draw(start, min(start + _PART, count))
        return
    with ThreadPoolExecutor(threads, "mpdp-random") as pool:
        for _ in pool.map(lambda start: draw(start, min(start + _PART, count)), starts):
            pass


def _cores() -> int:
    """Return the cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def _uniform(out: np.ndarray, key: Key, start: int) -> None:
    """Write the uniform numbers from ``start`` on: number i has words 2 (i mod 2) and the next of counter i // 2."""
    first, last = start // 2, -(-(start + len(out)) // 2)
    zeros = np.zeros(last - first, np.uint64)
    columns = _rounds([np.arange(first, last, dtype=np.uint64), zeros, zeros.copy(), zeros.copy()], key)
    for i in (0, 1):
        high, low = columns[2 * i], columns[2 * i + 1]
        np.right_shift(high, np.uint64(5), out=high)
        np.left_shift(high, np.uint64(26), out=high)
        np.right_shift(low, np.uint64(6), out=low)
        np.bitwise_or(high, low, out=high)
        place = out[(start + i) % 2 :: 2]
        skipped = (
            start % 2 if i == 0 else 0
        )  # where the first counter's first number belongs to the part before
        np.multiply(high[skipped:][: len(place)], 2.0**-53, out=place)


def _normal(out: np.ndarray, key: Key, pairs: int, start: int, stop: int, mean: float, std: float) -> None:
    """Write the numbers start..stop and those ``pairs`` further on, as far as there are."""
    radius, angle = np.empty(stop - start), np.empty(stop - start)
    _uniform(radius, key, start)
    _uniform(angle, key, pairs + start)
    np.negative(radius, out=radius)
    np.log1p(radius, out=radius)
    np.multiply(radius, -2.0, out=radius)
    np.sqrt(radius, out=radius)
    np.multiply(angle, 2.0 * np.pi, out=angle)
    values = np.empty_like(radius)
    for wave, place in ((np.cos, out[start:stop]), (np.sin, out[pairs + start : pairs + stop])):
        wave(angle, out=values)
        np.multiply(values, radius, out=values)
        np.multiply(values, std, out=values)
        np.add(values, mean, out=values)
        place[...] = values[: len(place)]
