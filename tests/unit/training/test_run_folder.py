"""The run folder: what marks it as used, how its log grows, and new ones."""

import json

import pytest

import mpdp
from mpdp.training.run_folder import RunFolder


def rows(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_folder_is_used_once_something_was_written(tmp_path):
    folder = RunFolder(tmp_path, writes=True)
    assert not folder.used
    folder.open({}, None)
    assert not folder.used  # an empty log
    folder.row(kind="step", step=1)
    folder.flush()
    assert RunFolder(tmp_path, writes=True).used
    assert not RunFolder(None, writes=True).used


def test_a_resumed_log_is_cut_to_what_was_saved(tmp_path):
    folder = RunFolder(tmp_path, writes=True)
    folder.open({}, None)
    for step in range(5):
        folder.row(step=step)
    folder.flush()
    again = RunFolder(tmp_path, writes=True)
    again.open({}, 3)
    assert again.rows == 3
    again.row(step="next")
    again.flush()
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, "next"]


def test_a_log_with_bytes_that_are_no_text_does_not_stop_a_resumed_run(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 0}\n\xff\xfe\n{"step": 2}\n')
    folder = RunFolder(tmp_path, writes=True)
    folder.open({}, 2)
    folder.row(step="next")
    folder.flush()
    assert (tmp_path / "log.jsonl").read_bytes() == b'{"step": 0}\n\xff\xfe\n{"step": "next"}\n'


def test_ranks_that_do_not_write_leave_nothing(tmp_path):
    folder = RunFolder(tmp_path / "x", writes=False)
    folder.open({}, None)
    folder.row(step=1)
    folder.step_row(1, 0, 0.5, 0.1)
    folder.flush()
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file"):
        RunFolder(tmp_path / "file" / "run", writes=True).open({}, None)


def test_new_folders_are_new_and_fall_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = mpdp.new_run_dir("digits"), mpdp.new_run_dir("digits")
    assert first != second
    assert first.parent == second.parent == tmp_path / "runs"
    assert first.is_dir() and first.name.startswith("digits-")
    assert mpdp.new_run_dir("half-50%d").name.startswith("half-50%d-2")
    blocker = tmp_path / "blocker"
    blocker.write_text("")
    fallen = mpdp.new_run_dir("digits", base=blocker / "runs")
    assert fallen.is_dir() and tmp_path not in fallen.parents
