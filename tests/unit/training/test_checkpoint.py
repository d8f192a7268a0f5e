"""The checkpoint format: whole or not at all, newest by content, every byte checked."""

import json
import os
import shutil

import numpy as np
import pytest

from mpdp.errors import CheckpointError
from mpdp.training import checkpoint
from mpdp.training import manifest as manifests

TENSORS = {
    "weights/a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "weights/scalar": np.array(1.5),
    "weights/empty": np.zeros((0, 3), dtype=np.float32),
    "optimizer/mean/a": np.full((3, 4), 2.0, dtype=np.float32),
}
STATE = {"step": 7, "position": {"epoch": 1, "batch": 2}, "text": "\u00e4\u00f6 \u2603"}


def write(root, step=7, **changes):
    return checkpoint.write(root, step, {**TENSORS, **changes}, {**STATE, "step": step})


def test_what_was_written_is_read_back_bit_by_bit(tmp_path):
    path = write(tmp_path / "deep" / "er \u2603")
    found = checkpoint.read(path)
    assert found.step == 7
    assert found.state == STATE
    loaded = checkpoint.load(found)
    assert loaded.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        assert loaded[name].shape == array.shape
        assert loaded[name].dtype == array.dtype
        assert loaded[name].tobytes() == array.tobytes()


def test_the_other_order_of_bytes_is_read_back(tmp_path):
    written = {"swapped": np.arange(5, dtype=">i4"), "plain": np.arange(5, dtype="<f8")}
    found = checkpoint.load(checkpoint.read(checkpoint.write(tmp_path, 1, written, {})))
    for name, array in written.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype.isnative


def test_a_group_that_may_read_the_manifest_may_read_the_tensors(tmp_path):
    before = os.umask(0o027)
    try:
        path = write(tmp_path)
    finally:
        os.umask(before)
    assert {file.name: file.stat().st_mode & 0o777 for file in path.iterdir()} == {
        "manifest.json": 0o640,
        "part-00000.safetensors": 0o640,
    }


def test_the_newest_is_the_last_one_written_not_the_highest_name_or_time(tmp_path):
    first = write(tmp_path, step=9)
    second = write(tmp_path, step=4)
    os.utime(first)
    os.rename(second, tmp_path / "a-name-that-sorts-first")
    (found, tensors), reasons = checkpoint.newest(tmp_path)
    assert found.step == 4
    assert tensors.keys() == TENSORS.keys()
    assert reasons == []


def damage_nested(path):
    (path / "manifest.json").write_text("[" * 200_000)


def damage_empty(path):
    (path / checkpoint.MANIFEST).write_bytes(b"")


def damage_cut(path):
    content = (path / checkpoint.MANIFEST).read_bytes()
    (path / checkpoint.MANIFEST).write_bytes(content[: len(content) // 2])


def damage_flip_manifest(path):
    content = bytearray((path / checkpoint.MANIFEST).read_bytes())
    content[content.index(b'"epoch": 1') + 9] = ord("3")
    (path / checkpoint.MANIFEST).write_bytes(content)


def damage_flip_part(path):
    part = next(path.glob("part-*"))
    content = bytearray(part.read_bytes())
    content[-3] ^= 1
    part.write_bytes(content)


def damage_cut_part(path):
    part = next(path.glob("part-*"))
    part.write_bytes(part.read_bytes()[:-8])


def damage_no_part(path):
    next(path.glob("part-*")).unlink()


def damage_directory(path):
    (path / checkpoint.MANIFEST).unlink()
    (path / checkpoint.MANIFEST).mkdir()


def damage_file_instead(path):
    shutil.rmtree(path)
    path.write_text("not a checkpoint")


def damage_not_ours(path):
    (path / checkpoint.MANIFEST).write_text('{"format": "other"}')


DAMAGES = [value for name, value in sorted(globals().items()) if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_a_torn_newest_is_named_and_the_one_before_is_taken(tmp_path, damage):
    write(tmp_path, step=1)
    path = write(tmp_path, step=2)
    damage(path)
    (found, _), reasons = checkpoint.newest(tmp_path)
    assert found.step == 1
    assert len(reasons) == 1
    assert str(path) in reasons[0]
    with pytest.raises(CheckpointError, match=r"expected"):
        checkpoint.load(checkpoint.read(path))


def test_leftovers_of_a_killed_save_are_never_taken(tmp_path):
    path = write(tmp_path, step=1)
    shutil.copytree(path, tmp_path / ".tmp-123-2")
    manifest = json.loads((tmp_path / ".tmp-123-2" / checkpoint.MANIFEST).read_text())
    assert manifest["step"] == 1
    shutil.rmtree(path)
    assert checkpoint.newest(tmp_path) == (None, [])
    assert not checkpoint.has_any(tmp_path)


def test_a_newer_version_is_refused(tmp_path):
    path = write(tmp_path)
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    manifest["version"] = checkpoint.VERSION + 1
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(
        CheckpointError, match=r"expected version 1 or older, got 2; it was written by a newer mpdp"
    ):
        checkpoint.read(path)


@pytest.mark.parametrize("name", ["../part", "/etc/passwd", "a/b", "..", ""])
def test_a_manifest_cannot_reach_outside_its_directory(tmp_path, name):
    path = write(tmp_path)
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    manifest["tensors"][0]["file"] = name
    manifest["digest"] = manifests.digest(manifest)
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"expected file names inside it, got"):
        checkpoint.read(path)


def test_prune_keeps_the_newest(tmp_path):
    for step in range(5):
        write(tmp_path, step=step)
    checkpoint.prune(tmp_path, 2)
    steps = sorted(checkpoint.read(path).step for path in tmp_path.iterdir())
    assert steps == [3, 4]


def test_prune_clears_what_a_killed_save_left_and_a_killed_removal_is_no_torn_checkpoint(
    tmp_path, monkeypatch
):
    for step in range(3):
        write(tmp_path, step=step)
    shutil.copytree(tmp_path / "step-0000000002-000003", tmp_path / ".tmp-99-3")
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # killed before anything is removed
    checkpoint.prune(tmp_path, 2)
    monkeypatch.undo()
    found, reasons = checkpoint.newest(tmp_path)
    assert (found[0].step, reasons) == (2, [])
    write(tmp_path, step=3)
    checkpoint.prune(tmp_path, 2)
    assert sorted(p.name[:15] for p in tmp_path.iterdir()) == ["step-0000000002", "step-0000000003"]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoint: expected to write below .*file"):
        write(blocker / "below")


def test_a_failed_save_leaves_the_earlier_one_and_no_leftovers(tmp_path, monkeypatch):
    write(tmp_path, step=1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left on device"):
        write(tmp_path, step=2)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["step-0000000001-000001"]
    assert checkpoint.newest(tmp_path)[0][0].step == 1
