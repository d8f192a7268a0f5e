"""Folders of images."""

import os

import numpy as np
import pytest

from mpdp import data
from mpdp.errors import MissingDependencyError

RANDOM = np.random.default_rng(0)


@pytest.fixture
def folder(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(("cat", "dog")):
        (tmp_path / name / "more").mkdir(parents=True)
        for i in range(3):
            pixels = np.full((4, 6, 3), 50 * number + i, "uint8")
            image.fromarray(pixels).save(tmp_path / name / ("more" if i == 2 else "") / f"{2 - i}.png")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    return tmp_path


def test_samples_in_sorted_order(folder, monkeypatch):
    dataset = data.ImageFolder(folder)
    assert dataset.classes == ["cat", "dog"] and len(dataset) == 6
    image, number = dataset[3]
    assert image.shape == (3, 4, 6) and image.dtype == np.float32 and image.flags.c_contiguous and number == 1
    np.testing.assert_allclose(image, 51 / 255, rtol=1e-6)  # dog/1.png before dog/2.png before dog/more/0.png
    walk, scan = os.walk, os.scandir
    monkeypatch.setattr(os, "walk", lambda top: [(p, d[::-1], f[::-1]) for p, d, f in walk(top)][::-1])
    again = data.ImageFolder(folder)
    assert again.files == dataset.files and again.describe() == dataset.describe()
    assert scan is os.scandir


def test_sizes_and_channels(folder):
    assert data.ImageFolder(folder, size=(8, 5), channels=1)[0][0].shape == (1, 8, 5)
    assert data.ImageFolder(folder, channels=4)[0][0].shape == (4, 4, 6)
    batch = data.take(data.ImageFolder(folder, size=(2, 2)), np.array([0, 5]))
    assert batch[0].shape == (2, 3, 2, 2) and batch[1].tolist() == [0, 1]


def test_another_listing_is_described_otherwise(folder):
    before = data.ImageFolder(folder).describe()
    (folder / "dog" / "7.png").write_bytes((folder / "dog" / "1.png").read_bytes())
    after = data.Transform(data.ImageFolder(folder), lambda s: s).describe()
    key = "list of images of class dog"
    assert before[key].startswith("3 files") and after[key].startswith("4 files")
    assert {k: v for k, v in before.items() if k != key} == {k: v for k, v in after.items() if k != key}


def test_what_does_not_fit(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"channels: expected 1, 3 or 4, got 2"):
        data.ImageFolder(folder, channels=2)
    with pytest.raises(ValueError, match=r"size: expected \(height, width\) of 1 or more, got \(0, 3\)"):
        data.ImageFolder(folder, size=(0, 3))
    with pytest.raises(ValueError, match=r"folder: expected a folder for each class in .*cat/more, got none"):
        data.ImageFolder(folder / "cat" / "more")
    (folder / "dog" / "1.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"image: expected one that Pillow reads, got .*dog/1.png"):
        data.ImageFolder(folder)[3]
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match=r"folder: expected images \(.png, .*\) in .*empty, got none"):
        data.ImageFolder(folder)
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(
        MissingDependencyError, match=r"Pillow: .* install it with: pip install mpdp\[images\]"
    ):
        data.ImageFolder(folder)
