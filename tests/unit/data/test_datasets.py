"""Datasets and how samples become batches."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from mpdp.data import ArrayDataset, TokenDataset, split_batch, stack, take
from mpdp.data.reading import check_dataset, map_arrays

INDICES = np.array([4, 0, 2])


class Items:
    """A data set of the plainest kind: ``__len__`` and ``__getitem__``."""

    def __init__(self, make, length=10):
        self.make, self.length, self.asked = make, length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.asked.append(index)
        return self.make(index)


def assert_same(a, b):
    flat_a, flat_b = [], []
    map_arrays(lambda array, path: flat_a.append((path, array)), a)
    map_arrays(lambda array, path: flat_b.append((path, array)), b)
    assert [p for p, _ in flat_a] == [p for p, _ in flat_b]
    for (_, x), (_, y) in zip(flat_a, flat_b):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        np.testing.assert_array_equal(x, y)


X, Y = np.arange(20, dtype=np.float32).reshape(10, 2), np.arange(10)


@pytest.mark.parametrize(
    "dataset",
    [
        ArrayDataset(X, Y),
        ArrayDataset((X, X + 1), Y),
        ArrayDataset({"a": X, "b": (X, Y)}, Y),
        ArrayDataset(image=X, target=Y),
        ArrayDataset(X),
        TokenDataset(np.arange(50, dtype=np.uint16), 4),
    ],
    ids=["pair", "nested", "dict", "named", "one", "tokens"],
)
def test_take_equals_stacked_samples(dataset):
    assert_same(take(dataset, INDICES), stack([dataset[int(i)] for i in INDICES], INDICES))
    empty = take(dataset, INDICES[:0])
    map_arrays(lambda array, _: array.shape[0] == 0 or pytest.fail(), empty)


def test_array_dataset():
    dataset = ArrayDataset(X, [0.5] * 10)
    assert len(dataset) == 10 and dataset[3][1] == 0.5
    x, y = dataset.take(INDICES)
    assert (x == X[INDICES]).all() and y.dtype == np.float64
    x[...] = -1  # a batch is a copy
    assert (X >= 0).all()
    assert len(ArrayDataset(X[:0], Y[:0])) == 0


@pytest.mark.parametrize(
    "make, kind, message",
    [
        (
            lambda: ArrayDataset(X, Y[:9]),
            ValueError,
            r"one leading length, got 10 in arrays\[0\], 9 in arrays\[1\]",
        ),
        (lambda: ArrayDataset(), ValueError, r"arrays: expected arrays by position or by name, got 0 and 0"),
        (lambda: ArrayDataset(X, target=Y), ValueError, r"by position or by name, got 1 and 1; pass"),
        (
            lambda: ArrayDataset(X, 3.0),
            ValueError,
            r"arrays\[1\]: expected a leading dimension of samples, got a 0-d",
        ),
        (
            lambda: ArrayDataset("x.npy"),
            TypeError,
            r"expected an array, got the text 'x.npy'; load a file with numpy",
        ),
        (
            lambda: ArrayDataset(X, ["a"] * 10),
            TypeError,
            r"arrays\[1\]: expected an array of numbers, got dtype <U1",
        ),
        (lambda: ArrayDataset([[1], [1, 2]]), ValueError, r"arrays: expected rows of one shape, got"),
        (lambda: TokenDataset(X, 4), TypeError, r"one-dimensional integer array, got float32 \(10, 2\)"),
        (lambda: TokenDataset(Y, 0), ValueError, r"context: expected 1 or more, got 0"),
        (
            lambda: check_dataset(iter([])),
            TypeError,
            r"__len__ and __getitem__, got list_iterator; wrap arrays in",
        ),
        (
            lambda: check_dataset((X, Y)),
            TypeError,
            r"got a tuple of arrays of shapes \(10, 2\), \(10,\); wrap arrays in data.ArrayDataset",
        ),
        (
            lambda: take([X, None, None], np.arange(3)),
            TypeError,
            r"sample: expected \(x, y\), a dict or an array, got None in sample 1; does __getitem__ return",
        ),
        (lambda: check_dataset({"x": X}), TypeError, r"__len__ and __getitem__, got dict"),
    ],
)
def test_bad_datasets(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_memory_mapped_arrays_stay_mapped(tmp_path):
    """Data 20 times what taking batches may allocate; the arrays read are still the file's."""
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (20_000, 256))
    x[:, 0] = np.arange(20_000)
    x.flush()
    np.save(tmp_path / "y.npy", np.arange(20_000))
    tracemalloc.start()
    dataset = ArrayDataset(np.load(tmp_path / "x.npy", "r"), np.load(tmp_path / "y.npy", "r"))
    tokens = TokenDataset(np.load(tmp_path / "y.npy", "r"), 100)
    for first in range(0, 20_000, 100):
        a, b = take(dataset, np.arange(first, first + 100))
        assert type(a) is type(b) is np.ndarray and (a[:, 0] == b).all()
        assert not isinstance(a.base, np.memmap)
    a, b = take(tokens, np.array([3, 1]))
    assert (a[:, 0] == [300, 100]).all() and (b == a + 1).all() and type(a) is np.ndarray
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < x.nbytes / 20
    assert isinstance(dataset[3][0], np.ndarray) and dataset[3][0][0] == 3


def test_token_dataset():
    tokens = np.arange(10, dtype=np.uint16)
    assert [len(TokenDataset(tokens[:n], 3)) for n in (0, 1, 3, 4, 6, 7, 10)] == [0, 0, 0, 1, 1, 2, 3]
    dataset = TokenDataset(tokens, 3)
    assert [pair[0].tolist() + pair[1].tolist() for pair in (dataset[2], dataset[-1])] == [
        [6, 7, 8, 7, 8, 9]
    ] * 2
    with pytest.raises(IndexError):
        dataset[3]
    x, y = dataset.take(np.array([0, 2]))
    assert x.dtype == np.uint16 and (y == x + 1).all() and x.flags.c_contiguous and y.flags.c_contiguous


def test_items_are_asked_with_python_integers():
    dataset = Items(lambda i: (np.full(3, i), float(i), [i, i]))
    x, y, z = take(dataset, INDICES)
    assert x.tolist() == [[4] * 3, [0] * 3, [2] * 3] and y.tolist() == [4.0, 0.0, 2.0] and z.shape == (3, 2)
    assert dataset.asked == [4, 0, 2] and all(type(i) is int for i in dataset.asked)
    assert take(dataset, INDICES[:0]) is None


def test_own_ways_of_taking_many():
    class Whole(Items):
        def take(self, indices):
            return X[indices], Y[indices]

    class Several(Items):
        def __getitems__(self, indices):
            return [(X[i], Y[i]) for i in indices]

        def take(self, count):  # the first samples, as in the datasets package: not what is meant here
            raise AssertionError

    for kind in (Whole, Several):
        dataset = kind(None)
        x, y = take(dataset, INDICES)
        assert (x == X[INDICES]).all() and (y == Y[INDICES]).all() and dataset.asked == []
    assert (take(X, INDICES) == X[INDICES]).all()

    Whole.take = lambda self, indices: (X[indices], Y[:1])
    with pytest.raises(
        ValueError, match=r"take: expected arrays of leading length 3, got \(1,\) in batch\[1\]"
    ):
        take(Whole(None), INDICES)
    Several.__getitems__ = lambda self, indices: [(X[0], Y[0])]
    with pytest.raises(ValueError, match=r"__getitems__: expected 3 samples, got 1"):
        take(Several(None), INDICES)


@pytest.mark.parametrize(
    "make, kind, message",
    [
        (
            lambda i: (np.zeros(3 + (i == 2)), 0),
            ValueError,
            r"sample\[0\]: expected shape \(3,\) as in sample 4, got \(4,\) in sample 2; pad or crop",
        ),
        (
            lambda i: (0, 0) if i else (0,),
            ValueError,
            r"a tuple of 2 as in sample 4, got 1 in sample 0; give every",
        ),
        (lambda i: (0, 0) if i else 0, ValueError, r"a tuple of 2 as in sample 4, got int in sample 0"),
        (
            lambda i: {"x": 0, "target": 0} if i else {"x": 0},
            ValueError,
            r"expected keys \['target', 'x'\] as in sample 4, got \['x'\] in sample 0",
        ),
        (
            lambda i: {"x": 0} if i else 0,
            ValueError,
            r"expected keys \['x'\] as in sample 4, got int in sample 0",
        ),
        (
            lambda i: ("text", 0),
            TypeError,
            r"sample\[0\]: expected numbers or arrays of them, got str in sample 4",
        ),
        (
            lambda i: (None if i == 2 else 1.0, 0),
            TypeError,
            r"got NoneType in sample 2; encode it as numbers",
        ),
        (lambda i: [np.zeros(3), 0], ValueError, r"in sample 4; return a tuple \(x, y\) for several arrays"),
        (lambda i: 0 if i else (0,), TypeError, r"got tuple in sample 0"),
    ],
)
def test_samples_that_do_not_fit_together(make, kind, message):
    with pytest.raises(kind, match=message) as caught:
        take(Items(make), INDICES, " (rank 1)")
    assert caught.value.__notes__ == ["while loading 3 samples, first sample 4 (rank 1)"]


def test_error_of_a_sample_is_noted():
    def make(index):
        if index == 2:
            raise FileNotFoundError("gone.npy")
        return index

    with pytest.raises(FileNotFoundError, match=r"gone.npy") as caught:
        take(Items(make), INDICES, " (rank 1, epoch 0, update 3)")
    assert caught.value.__notes__ == ["while loading sample 2 (rank 1, epoch 0, update 3)"]


def test_stacking_nested_samples():
    batch = stack([{"a": (1.5, None), "b": np.float32(i)} for i in range(3)], range(3))
    assert batch["a"][0].tolist() == [1.5] * 3 and batch["a"][1] is None and batch["b"].dtype == np.float32
    assert stack([True, False], range(2)).dtype == bool


@pytest.mark.parametrize(
    "batch, expected",
    [
        ((1, 2), ((1,), {}, 2)),
        ([1, 2], ((1,), {}, 2)),
        ((1, 2, 3), ((1, 2), {}, 3)),
        (((1, 2), 3), ((1, 2), {}, 3)),
        (({"a": 1, "b": 2}, 3), ((), {"a": 1, "b": 2}, 3)),
        ({"a": 1, "target": 3}, ((), {"a": 1}, 3)),
        ((1, (2, 3)), ((1,), {}, (2, 3))),
        ((1,), ((1,), {}, None)),
        (7, ((7,), {}, None)),
    ],
)
def test_split_batch(batch, expected):
    assert split_batch(batch) == expected


def test_split_batch_messages():
    with pytest.raises(
        ValueError, match=r"""batch: expected a key "target", got \['a', 'label'\]; name the target so"""
    ):
        split_batch({"label": 1, "a": 2})
    with pytest.raises(ValueError, match=r"batch: expected inputs and a target, got an empty tuple"):
        split_batch(())
