"""The run folder: what marks it as used, how its log grows, and new ones."""

import gc
import json

import numpy as np
import pytest
from called_again import capture

import mpdp
import mpdp.threads
from mpdp import data, nn, optim
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


@pytest.mark.parametrize("steps", ["graph", "eager"])
def test_a_trainer_that_is_left_adds_nothing_to_a_log_that_another_goes_on_with(tmp_path, steps):
    """On a GPU, or with rows that wait in memory, the first still has rows when the second cuts the log back."""

    def trainer():
        mpdp.seed(0)
        made = mpdp.Trainer(
            nn.Linear(4, 3),
            nn.cross_entropy,
            optim.SGD(lr=0.1),
            run_dir=tmp_path,
            save_every=4,
            callbacks=[mpdp.CsvWriter()],
        )
        if steps == "graph":
            capture(made)
        return made

    def stepped(made, upto):
        while made.step_count < upto:
            made.step((np.ones((6, 4), "float32"), np.arange(6) % 3))
        return made

    first = stepped(trainer(), 7)
    waiting = first.updates.graphs.under_way if steps == "graph" else len(first.folder._pending)
    assert waiting
    second = trainer()
    assert second.resume() and second.step_count == 4
    stepped(second, 9)
    stepped(first, 8)
    first.updates.close()
    del first
    gc.collect()
    second.updates.close()
    second.folder.flush()
    second.callbacks[0].on_exception(second, None)
    assert [row["step"] for row in rows(tmp_path) if row["kind"] == "step"] == list(range(1, 10))
    table = (tmp_path / "steps.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in table] == list(range(1, 10))


def test_the_log_of_graphs_is_whole_when_an_error_leaves_fit(tmp_path):
    class Stop(mpdp.Callback):
        def on_step(self, trainer):
            if trainer.step_count == 7:
                raise KeyboardInterrupt

    trainer = mpdp.Trainer(
        nn.Linear(4, 3), nn.cross_entropy, optim.SGD(lr=0.1), run_dir=tmp_path, callbacks=[Stop()]
    )
    capture(trainer)
    samples = data.ArrayDataset(np.ones((8, 4), "float32"), np.arange(8) % 3)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(samples, epochs=9, global_batch_size=4, progress=False)
    assert [row["step"] for row in rows(tmp_path) if row["kind"] == "step"] == list(range(1, 8))


def small(run_dir, **options):
    mpdp.seed(0)
    return mpdp.Trainer(nn.Linear(4, 3), nn.cross_entropy, optim.SGD(lr=0.1), run_dir=run_dir, **options)


def steps_to(made, upto):
    while made.step_count < upto:
        made.step((np.ones((6, 4), "float32"), np.arange(6) % 3))
    return made


FIRST = {
    "step": lambda t: steps_to(t, 9),
    "save": lambda t: t.save(),
    "fit": lambda t: t.fit(
        data.ArrayDataset(np.ones((8, 4), "float32"), np.arange(8) % 3),
        updates=9,
        global_batch_size=4,
        progress=False,
    ),
}


def content(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("call", FIRST)
@pytest.mark.parametrize("own", ["another process", "this trainer"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_checkpoint_of_another_run_is_refused_in_a_used_folder(tmp_path, call, own, n):
    def rank():
        path = steps_to(small(tmp_path / "other"), 3).save()
        used = steps_to(small(tmp_path / "used"), 2)
        used.save()
        used.folder.flush()
        t = used if own == "this trainer" else small(tmp_path / "used")
        before = content(tmp_path / "used")
        assert t.resume(path) and t.step_count == 3
        with pytest.raises(
            ValueError,
            match=r"run_dir: expected a new or empty folder to go on in from .*other/checkpoints/step-0000000003-.*, "
            r"got .*used with an earlier run; call trainer\.resume\(\)",
        ) as caught:
            FIRST[call](t)
        assert n == 1 or caught.value.agreed
        assert t.step_count == 3 and content(tmp_path / "used") == before
        assert t.resume() and t.step_count == 2  # its own
        steps_to(t, 4).folder.flush()

    if n == 1:
        rank()
    else:
        mpdp.threads.run(rank, n)
    assert [row["step"] for row in rows(tmp_path / "used") if row["kind"] == "step"] == [1, 2, 3, 4]


def test_a_checkpoint_of_another_run_begins_a_run(tmp_path):
    """Started again before it has a checkpoint, it begins anew, with an empty log; then it goes on with its own."""
    path = steps_to(small(tmp_path / "other"), 3).save()

    def started():
        t = small(tmp_path / "run")
        assert t.resume() or t.resume(path)
        return t

    first = steps_to(started(), 6)
    first.folder.flush()
    assert [row["step"] for row in rows(tmp_path / "run")] == [4, 5, 6]
    second = steps_to(started(), 5)
    second.save()
    assert [row["step"] for row in rows(tmp_path / "run")] == [4, 5]
    third = started()
    assert third.step_count == 5
    steps_to(third, 7).folder.flush()
    assert [row["step"] for row in rows(tmp_path / "run")] == [4, 5, 6, 7]


def test_a_checkpoint_is_of_the_folder_where_it_lies_whatever_it_is_called(tmp_path, monkeypatch):
    path = steps_to(small(tmp_path / "run"), 3).save()
    (tmp_path / "alias").symlink_to("run")
    (tmp_path / "newest").symlink_to(path)
    monkeypatch.chdir(path)
    for name in (path, tmp_path / "alias" / "checkpoints" / path.name, tmp_path / "newest", "."):
        t = small(tmp_path / "run")
        assert t.resume(name)
        steps_to(t, 4).folder.flush()
        assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_checkpoint_needs_no_folder_to_go_on_in(tmp_path):
    path = steps_to(small(tmp_path / "run"), 3).save()
    t = small(None)
    assert t.resume(path) and steps_to(t, 4).step_count == 4
