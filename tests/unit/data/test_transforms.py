"""Transforms: what a sample is given depends on the sample, not on who reads it, with whom, or when."""

import numpy as np
import pytest

from mpdp import data
from mpdp.data.reading import take

NUMBERS = data.ArrayDataset(np.arange(20.0), np.arange(20))


def jitter(sample, random):
    return sample[0] + random.normal(size=3), sample[1]


def values(dataset, indices, seed=0, epoch=0):
    return take(dataset, np.array(indices), draw=data.Draw(seed, epoch))[0]


def test_numbers_belong_to_seed_epoch_and_sample():
    noisy = data.Transform(NUMBERS, jitter, random=True)
    whole = values(noisy, range(20), 3, 1)
    np.testing.assert_array_equal(values(noisy, [7, 2, 19], 3, 1), whole[[7, 2, 19]])
    for other in (
        values(noisy, range(20), 4, 1),
        values(noisy, range(20), 3, 2),
        np.roll(whole - np.arange(20)[:, None], 1, 0),
    ):
        assert (other != whole).all()
    np.testing.assert_array_equal(noisy[5][0], values(noisy, [5])[0])
    np.testing.assert_array_equal(noisy[-1][0], values(noisy, [19])[0])


def test_transforms_around_one_another_have_numbers_of_their_own():
    inner = data.Transform(NUMBERS, lambda s, r: (r.normal(), s[1]), random=True)
    outer = data.Transform(inner, lambda s, r: (np.array([s[0], r.normal()]), s[1]), random=True)
    pairs = values(outer, range(20))
    assert (pairs[:, 0] != pairs[:, 1]).all()
    np.testing.assert_array_equal(pairs[:, 0], values(inner, range(20)))


def test_the_loader_gives_the_same_for_any_number_of_ranks():
    noisy = data.Transform(NUMBERS, jitter, random=True)

    def read(size):
        found = {}
        for rank in range(size):
            loader = data.Loader(noisy, 6, rank=rank, size=size, seed=5, dtype=None, prefetch=0)
            for part, *_ in loader.updates(0, 8):  # two epochs
                for i, row in zip(part.indices.tolist(), part.inputs[0] if part.count else ()):
                    found[part.epoch, i] = row.tobytes()
        return found

    one = read(1)
    assert len(one) == 40 and len(set(one.values())) == 40
    assert read(3) == read(4) == one


def test_select_and_named_columns():
    class Rows:
        """As a Hugging Face data set: rows by number, and lists of rows."""

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {"text": [index, 0], "label": index % 2, "name": "row"}

        def __getitems__(self, indices):
            return [self[i] for i in indices]

        def take(self, n):
            raise AssertionError("the first rows, not a batch")

    x, y = take(data.Select(Rows(), "text", "label"), np.array([3, 1]))
    assert x.tolist() == [[3, 0], [1, 0]] and y.tolist() == [1, 1]
    assert take(data.Select(Rows(), "text"), np.array([2])).tolist() == [[2, 0]]
    with pytest.raises(KeyError, match=r"sample: expected 'image' among text, label, name; name its keys"):
        data.Select(Rows(), "image", "label")[0]
    with pytest.raises(TypeError, match=r"sample: expected a dict, got tuple"):
        data.Select(NUMBERS, "image")[0]
    with pytest.raises(TypeError, match=r"function: expected a function of a sample, got int"):
        data.Transform(NUMBERS, 3)


def test_an_error_names_the_sample():
    def broken(sample):
        if sample[1] == 11:
            raise ZeroDivisionError("mine")
        return sample

    with pytest.raises(ZeroDivisionError) as caught:
        take(data.Transform(NUMBERS, broken), np.array([3, 11]), " (rank 1)")
    notes = caught.value.__notes__
    assert notes[0] == "while loading sample 11" and notes[1].endswith("first sample 3 (rank 1)")


def test_torch_datasets():
    torch = pytest.importorskip("torch")
    x, y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    whole = torch.utils.data.TensorDataset(x, y)
    for dataset, indices in ((whole, [5, 0]), (torch.utils.data.Subset(whole, [1, 5, 0]), [1, 2])):
        found = take(dataset, np.array(indices))
        assert found[0].tolist() == [[10.0, 11.0], [0.0, 1.0]] and found[1].tolist() == [5, 0]
        assert isinstance(found[0], np.ndarray) and found[0].dtype == np.float32


@pytest.mark.filterwarnings("ignore")  # those of its own parts
def test_hugging_face_datasets():
    datasets = pytest.importorskip("datasets")
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"x": [[float(i), 0.0] for i in range(6)], "y": list(range(6))})
    rows = datasets.Dataset(table, fingerprint="rows")
    found = take(data.Select(rows, "x", "y"), np.array([5, 0]))
    assert found[0].tolist() == [[5.0, 0.0], [0.0, 0.0]] and found[1].tolist() == [5, 0]
    arrays = rows.with_format("numpy")
    assert take(data.Select(arrays, "x", "y"), np.array([2, 4]))[0].tolist() == [[2.0, 0.0], [4.0, 0.0]]
