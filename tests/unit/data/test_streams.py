"""Streams and their loader, on one rank."""

import numpy as np
import pytest

from mpdp import data
from mpdp.data.streams import length_of


def numbers(epoch):
    return ((float(100 * epoch + i), i) for i in range(11))


def read(stream, size=1, **options):
    """Return the targets of each update over all ranks, and the sums of the inputs."""
    streams = [
        data.StreamLoader(stream, 4, rank=rank, size=size, prefetch=0, dtype=None, **options).epochs(count=2)
        for rank in range(size)
    ]
    found = []
    for updates in zip(*streams):
        parts = [part for parts in zip(*updates) for part in parts]
        assert len({part.total for part in parts}) <= 1 or options.get("accumulate")
        found.append([y for part in parts if part.count for y in part.target.tolist()])
    return found


def test_updates_of_shares():
    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10], []] * 2
    for size in (1, 2, 3, 5):
        assert read(data.Stream(numbers), size=size, shuffle=True) == expected
        assert read(data.Stream(numbers), size=size, accumulate=2) == expected
    assert read(data.Stream([(0.0, 5), (1.0, 6)])) == [[5, 6], []] * 2


def test_windows():
    a, b = (read(data.Stream(numbers, window=5), size=size, seed=1, shuffle=True) for size in (1, 3))
    assert a == b
    epochs = [a[0] + a[1] + a[2], a[4] + a[5] + a[6]]
    for order in epochs:
        assert [sorted(order[:5]), sorted(order[5:10]), order[10:]] == [
            [0, 1, 2, 3, 4],
            [5, 6, 7, 8, 9],
            [10],
        ]
    assert epochs[0] != epochs[1]
    assert read(data.Stream(numbers, window=5), shuffle=False)[0] == [0, 1, 2, 3]


def test_random_numbers_belong_to_the_element():
    def jitter(element, random):
        return element[0] + random.uniform(), element[1]

    def inputs(window, epoch):
        stream = data.Stream(
            lambda e: ((0.0, i) for i in range(11)), window=window, transform=jitter, random=True
        )
        loader = data.StreamLoader(stream, 4, seed=2, prefetch=0, dtype=None)
        return {
            int(y): float(x)
            for parts in loader.epochs(epoch, count=1)
            for part in parts
            for x, y in zip(part.inputs[0], part.target)
        }

    assert inputs(1, 0) == inputs(5, 0) and len(set(inputs(1, 0).values())) == 11
    assert inputs(1, 0) != inputs(1, 1)


def test_going_on_in_the_middle():
    loader = data.StreamLoader(data.Stream(numbers, window=6), 4, seed=1, prefetch=0, dtype=None)
    whole = [[p.indices.tolist() for p in parts] for parts in loader.epochs(1, 0, count=2)]
    rest = [[p.indices.tolist() for p in parts] for parts in loader.epochs(1, 2, count=2)]
    assert rest == whole[2:]


def test_only_kept_elements_are_transformed():
    done = []
    stream = data.Stream(numbers, transform=lambda e: done.append(e[1]) or e)
    list(data.StreamLoader(stream, 4, rank=1, size=2, prefetch=0, dtype=None).epochs(count=1))
    assert done == [2, 3, 6, 7, 10]


def test_an_error_names_the_element():
    def broken(element):
        if element[1] == 6:
            raise ZeroDivisionError("mine")
        return element

    loader = data.StreamLoader(data.Stream(numbers, transform=broken), 4, rank=1, size=2, prefetch=2)
    with pytest.raises(ZeroDivisionError) as caught:
        list(loader.epochs(count=1))
    assert caught.value.__notes__ == ["while loading sample 6 (rank 1, epoch 0, update 1 of it)"]


def test_what_becomes_a_stream():
    class IterableDataset:
        """As PyTorch's, which has a __getitem__ that raises and may have a length."""

        def __init__(self):
            self.epochs = []

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

        def __iter__(self):
            return iter([(1.0, 2)])

        def __len__(self):
            return 1

        def __getitem__(self, index):
            raise NotImplementedError

    class Mine(IterableDataset):
        pass

    mine = Mine()
    stream = data.as_dataset(mine)
    assert isinstance(stream, data.Stream) and read(stream) == [[2], []] * 2 and mine.epochs == [0, 1]
    array, pairs = np.zeros(3), [(1, 2)]
    for kept in (array, pairs, "text", 3, {1: 2}, {1, 2}, stream, data.ArrayDataset(array)):
        assert data.as_dataset(kept) is kept
    assert (
        length_of(stream) == "a stream"
        and length_of(data.Stream(numbers, sharded=True)) == "a sharded stream"
    )


def test_iterable_datasets_of_torch():
    torch = pytest.importorskip("torch")

    class Numbers(torch.utils.data.IterableDataset):
        def __iter__(self):
            return ((torch.tensor([float(i)]), i) for i in range(5))

    assert read(data.as_dataset(Numbers())) == [[0, 1, 2, 3], [4], []] * 2


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        (3, {}, TypeError, r"source: expected an iterable or a function of the epoch, got int"),
        (iter([1]), {}, TypeError, r"source: expected something that begins anew .* got a list_iterator"),
        ([1], {"window": 0}, ValueError, r"window: expected 1 or more, got 0"),
        ([1], {"transform": 3}, TypeError, r"transform: expected a function, got int"),
    ],
)
def test_what_is_refused(source, options, error, message):
    with pytest.raises(error, match=message):
        data.Stream(source, **options)
