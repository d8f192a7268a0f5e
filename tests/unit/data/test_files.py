"""Arrays in files are mapped, wherever they lie in them."""

import numpy as np
import pytest

from mpdp import data
from mpdp.data.files import map_npz
from mpdp.data.workers import _Pickler, _place_in_file

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", ["float32", "uint8", ">f8"])
def test_npz_members_are_mapped_unless_compressed(tmp_path, dtype):
    arrays = {
        "a": RANDOM.integers(0, 9, (7, 3, 2)).astype(dtype),
        "b": np.asfortranarray(RANDOM.integers(0, 9, (7, 5)).astype(dtype)),
        "none": np.empty((7, 0), dtype),
    }
    np.savez(tmp_path / "plain.npz", **arrays)
    np.savez_compressed(tmp_path / "small.npz", **arrays)
    for name, mapped in (("plain", True), ("small", False)):
        found = map_npz(tmp_path / f"{name}.npz", ("b", "a", "none"))
        assert [isinstance(array, np.memmap) for array in found] == [mapped, mapped, False]
        for key, array in zip(("b", "a", "none"), found):
            np.testing.assert_array_equal(array, arrays[key])
            assert array.dtype == arrays[key].dtype
    assert [len(a) for a in data.ArrayDataset.from_npz(tmp_path / "plain.npz").arrays] == [7, 7, 7]


def test_npy_files(tmp_path):
    x, y = RANDOM.standard_normal((5, 3)), np.arange(5)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    dataset = data.ArrayDataset.from_npy(tmp_path / "x.npy", tmp_path / "y.npy")
    batch = dataset.take(np.array([4, 0]))
    np.testing.assert_array_equal(batch[0], x[[4, 0]])
    assert type(batch[0]) is np.ndarray and isinstance(dataset.arrays[0], np.memmap)
    named = data.ArrayDataset.from_npy(image=tmp_path / "x.npy", target=tmp_path / "y.npy")
    assert sorted(named[1]) == ["image", "target"]


def test_files_of_tokens(tmp_path):
    tokens = RANDOM.integers(0, 60000, 100)
    tokens.astype("uint16").tofile(tmp_path / "tokens.bin")
    np.save(tmp_path / "tokens.npy", tokens)
    plain = data.TokenDataset.from_file(tmp_path / "tokens.bin", context=7, dtype="uint16")
    saved = data.TokenDataset.from_file(tmp_path / "tokens.npy", 7)
    assert len(plain) == len(saved) == 14
    for i in (0, 13):
        np.testing.assert_array_equal(plain[i][1], tokens[i * 7 + 1 : i * 7 + 8])
        np.testing.assert_array_equal(saved[i][0], plain[i][0])


def test_files_that_do_not_fit(tmp_path):
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "odd.bin").write_bytes(b"123")
    np.save(tmp_path / "objects.npy", np.array([{}, None]), allow_pickle=True)
    np.savez(tmp_path / "ok.npz", a=np.arange(3))
    for name in ("text.npy", "objects.npy"):
        with pytest.raises(ValueError, match=rf"path: expected a .npy file of numbers, got .*{name}"):
            data.ArrayDataset.from_npy(tmp_path / name)
    with pytest.raises(ValueError, match=r"path: expected a .npz file of numbers, got .*text.npy"):
        data.ArrayDataset.from_npz(tmp_path / "text.npy")
    with pytest.raises(KeyError, match=r"names: expected some of a in .*ok.npz, got 'b'"):
        data.ArrayDataset.from_npz(tmp_path / "ok.npz", "b")
    with pytest.raises(ValueError, match=r"dtype: expected that of the integers in .*odd.bin, got none"):
        data.TokenDataset.from_file(tmp_path / "odd.bin", 4)
    with pytest.raises(
        ValueError, match=r"dtype: expected a file of whole uint16 numbers, got .* of 3 bytes"
    ):
        data.TokenDataset.from_file(tmp_path / "odd.bin", 4, "uint16")
    with pytest.raises(FileNotFoundError):
        data.ArrayDataset.from_npy(tmp_path / "no.npy")


def test_mapped_arrays_are_pickled_as_their_place(tmp_path):
    """A worker maps what its rank has mapped; nothing of the content is copied."""
    import io
    import pickle

    array = RANDOM.standard_normal((300, 1000))
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "b.npz", first=array[:10], second=array)
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    for view in (mapped, mapped[7:200], mapped[250:][3:], map_npz(tmp_path / "b.npz")[1], mapped.T):
        file = io.BytesIO()
        _Pickler(file, protocol=5).dump(view)
        assert len(file.getvalue()) < 1000
        np.testing.assert_array_equal(pickle.loads(file.getvalue()), view)
    assert _place_in_file(mapped[:, ::2]) is None, "no plain piece of the file: its content travels"
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(mapped[:, ::2])
    np.testing.assert_array_equal(pickle.loads(file.getvalue()), mapped[:, ::2])
