"""The order of samples and the shares of ranks."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpdp.data import Order, batches, micro_batches, share


def test_bijection_for_every_small_length():
    for length in range(301):
        for seed, epoch in ((0, 0), (7, 3)):
            found = Order(length, seed, epoch).indices(0, length)
            assert found.dtype == np.int64 and np.array_equal(np.sort(found), np.arange(length))


@pytest.mark.parametrize("length", [65_536, 100_003])
def test_bijection_for_some_larger_lengths(length):
    found = Order(length, 1, 2).indices(0, length)
    assert np.array_equal(np.sort(found), np.arange(length))


@pytest.mark.parametrize("length", [2**31 + 11, 2**40, 2**62])
def test_sample_of_a_long_order(length):
    order = Order(length, seed=5)
    places = np.unique(
        np.concatenate([np.arange(50_000), length - 1 - np.arange(50_000), length // 1000 * np.arange(1000)])
    )
    found = order.at(places)
    assert found.min() >= 0 and found.max() < length and len(np.unique(found)) == len(places)
    eighths = np.bincount((found.astype(float) / length * 8).astype(int), minlength=8)
    assert np.abs(eighths - len(found) / 8).max() < 5 * math.sqrt(len(found) / 8)


def test_equal_seeds_and_epochs_repeat_and_others_do_not():
    first = Order(1000, 3, 1).indices(0, 1000)
    assert np.array_equal(first, Order(1000, 3, 1).indices(0, 1000))
    for seed, epoch in ((3, 0), (3, 2), (4, 1), (1, 3), (-3, 1)):
        other = Order(1000, seed, epoch).indices(0, 1000)
        assert (first == other).sum() < 12  # 1 is expected


def test_an_order_keeps_its_values():
    """Checkpoints rely on them: a resumed run must see the rest of the epoch that was begun."""
    assert Order(10, 0, 0).indices(0, 10).tolist() == [7, 4, 1, 0, 8, 3, 5, 6, 2, 9]
    long = Order(2**40, 1, 2).at([0, 1, 2**40 - 1])
    assert long.tolist() == [1053143150191, 571505884393, 433600801492]


def test_any_range_equals_the_whole():
    order = Order(20_011, 1)
    whole = order.indices(0, 20_011)
    for start, stop in ((0, 0), (0, 1), (5, 9000), (8192, 8193), (20_000, 20_011), (20_011, 20_011)):
        assert np.array_equal(order.indices(start, stop), whole[start:stop])
    places = np.array([7, 7, 20_010, 0])
    assert np.array_equal(order.at(places), whole[places])


def test_without_shuffle():
    order = Order(10, shuffle=False)
    assert order.indices(3, 6).tolist() == [3, 4, 5] and order.at([9, 0]).tolist() == [9, 0]
    assert len(order) == 10


@pytest.mark.parametrize("length", [2, 5, 16, 17, 100])
def test_samples_land_everywhere_equally_often(length):
    """Chi-square of (sample, place) over epochs and seeds: within 5 standard deviations."""
    draws = 1500
    orders = np.array([Order(length, e % 20, e // 20).indices(0, length) for e in range(draws)])
    counts = np.stack([np.bincount(orders[:, place], minlength=length) for place in range(length)])
    chi = ((counts - draws / length) ** 2 / (draws / length)).sum()
    freedom = (length - 1) ** 2
    assert abs(chi - freedom) < 5 * math.sqrt(2 * freedom) + 8


@pytest.mark.parametrize("length", [4, 5])
def test_all_permutations_are_equally_frequent(length):
    draws = 1800
    counts = Counter(tuple(Order(length, s).indices(0, length).tolist()) for s in range(draws))
    expected = draws / math.factorial(length)
    chi = sum((counts[p] - expected) ** 2 / expected for p in permutations(range(length)))
    freedom = math.factorial(length) - 1
    assert abs(chi - freedom) < 5 * math.sqrt(2 * freedom)


def test_neighbours_are_unrelated():
    orders = np.array([Order(101, 0, e).indices(0, 101) for e in range(500)])
    steps = np.bincount(((orders[:, 1:] - orders[:, :-1]) % 101).ravel(), minlength=101)[1:]
    expected = steps.sum() / 100
    assert abs(((steps - expected) ** 2 / expected).sum() - 99) < 5 * math.sqrt(2 * 99)
    fixed = (orders == np.arange(101)).sum(axis=1)
    assert abs(fixed.mean() - 1) < 0.25 and abs(fixed.var() - 1) < 0.4


def test_messages():
    with pytest.raises(ValueError, match=r"order: expected places with 0 <= start <= stop <= 5, got 2 and 6"):
        Order(5).indices(2, 6)
    with pytest.raises(ValueError, match=r"order: expected places in 0..4, got -1..3"):
        Order(5).at([-1, 3])
    with pytest.raises(ValueError, match=r"length: expected 0 or more, got -1"):
        Order(-1)
    with pytest.raises(ValueError, match=r"length: expected at most 2\^62 samples, got"):
        Order(2**62 + 1)
    with pytest.raises(TypeError, match=r"length: expected a whole number, got 1.5"):
        Order(1.5)


@given(total=st.integers(0, 10**12), parts=st.integers(1, 50))
def test_shares_cover_once_and_differ_by_at_most_one(total, parts):
    cuts = [share(total, parts, i) for i in range(parts)]
    assert cuts[0][0] == 0 and cuts[-1][1] == total
    assert all(a[1] == b[0] for a, b in pairwise(cuts))
    sizes = [stop - start for start, stop in cuts]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@settings(deadline=None, max_examples=200)
@given(
    length=st.integers(0, 200),
    batch=st.integers(1, 60),
    accumulate=st.integers(1, 7),
    size=st.integers(1, 9),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_every_sample_exactly_once(length, batch, accumulate, size, drop_last, shuffle, epoch):
    order = Order(length, 1, epoch, shuffle)
    whole = order.indices(0, length)
    starts = batches(length, batch, drop_last)
    assert len(starts) == (length // batch if drop_last else math.ceil(length / batch))
    seen = []
    for start in starts:
        count = min(batch, length - start)
        of_rank = [micro_batches(count, accumulate, size, rank) for rank in range(size)]
        of_one = micro_batches(count, accumulate, 1, 0)
        for i in range(accumulate):
            parts = [shares[i] for shares in of_rank]
            assert all(part.total == of_one[i].total for part in parts)
            assert all(a.stop == b.start for a, b in pairwise(parts))
            assert (parts[0].start, parts[-1].stop) == of_one[i][:2]
            sizes = [part.stop - part.start for part in parts]
            assert max(sizes) - min(sizes) <= 1 and sum(sizes) == parts[0].total
            for part in parts:
                seen += order.indices(start + part.start, start + part.stop).tolist()
        totals = [part.total for part in of_one]
        assert max(totals) - min(totals) <= 1 and sum(totals) == count
    kept = length - length % batch if drop_last else length
    assert seen == whole[:kept].tolist()
