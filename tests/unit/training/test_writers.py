"""CSV and TensorBoard: each epoch and update once, also after a run was resumed."""

import csv
import gc
import sys
import time

import numpy as np
import pytest
from on_device import world

import mpdp
from mpdp import data, nn, optim
from mpdp.errors import MissingDependencyError

pytestmark = pytest.mark.usefixtures("device")


def trainer(folder, callbacks, save_every=None):
    mpdp.seed(0)
    return mpdp.Trainer(
        nn.Linear(4, 3),
        nn.cross_entropy,
        optim.SGD(lr=0.1),
        world=world(),
        run_dir=folder,
        save_every=save_every,
        callbacks=callbacks,
        schedule=lambda step: 1.0 / (1 + step),
    )


def dataset(n=12):
    random = np.random.default_rng(0)
    return data.ArrayDataset(random.standard_normal((n, 4)).astype("float32"), random.integers(0, 3, n))


def table(path):
    with open(path, newline="") as file:
        rows = list(csv.reader(file))
    return rows[0], rows[1:]


def test_a_row_each(tmp_path):
    t = trainer(tmp_path / "run", [mpdp.CsvWriter()])
    history = t.fit(dataset(), epochs=2, global_batch_size=4, metrics=[nn.accuracy])
    head, rows = table(tmp_path / "run" / "epochs.csv")
    assert head == ["epoch", "step", "loss", "accuracy"]
    assert [[float(v) for v in row] for row in rows] == [list(row.values()) for row in history]
    head, rows = table(tmp_path / "run" / "steps.csv")
    assert head == ["step", "epoch", "loss", "lr"]
    assert [row[:2] for row in rows] == [[str(k), str(1 + (k - 1) // 3)] for k in range(1, 7)]
    assert [float(row[3]) for row in rows] == [0.1 * (1.0 / k) for k in range(1, 7)]


def test_resuming_repeats_nothing_and_a_late_metric_shifts_nothing(tmp_path):
    """K2: stopped behind a checkpoint, resumed with one metric more."""
    first = trainer(tmp_path / "run", [mpdp.CsvWriter()], save_every=4)
    first.fit(dataset(), updates=7, global_batch_size=4)
    for checkpoint in sorted((tmp_path / "run" / "checkpoints").iterdir())[1:]:
        __import__("shutil").rmtree(checkpoint)  # killed before the second one
    del first
    gc.collect()  # what it had in memory is in the file
    assert [row[0] for row in table(tmp_path / "run" / "steps.csv")[1]] == [str(k) for k in range(1, 8)]
    again = trainer(tmp_path / "run", [mpdp.CsvWriter()])
    assert again.resume() and again.step_count == 4
    again.fit(dataset(), epochs=3, global_batch_size=4, metrics=[nn.accuracy])
    assert [row[0] for row in table(tmp_path / "run" / "steps.csv")[1]] == [str(k) for k in range(1, 10)]
    head, rows = table(tmp_path / "run" / "epochs.csv")
    assert head == ["epoch", "step", "loss", "accuracy"]
    assert [row[0] for row in rows] == ["1", "2", "3"] and rows[0][3] == "" and float(rows[2][3]) >= 0


def test_a_trainer_that_is_resumed_itself_repeats_nothing(tmp_path):
    t = trainer(tmp_path / "run", [mpdp.CsvWriter()], save_every=4)
    t.fit(dataset(), updates=5, global_batch_size=4)
    assert t.resume(sorted((tmp_path / "run" / "checkpoints").iterdir())[0]) and t.step_count == 4
    t.fit(dataset(), updates=7, global_batch_size=4)  # with its save the rows are in the file
    assert [row[0] for row in table(tmp_path / "run" / "steps.csv")[1]] == [str(k) for k in range(1, 8)]


def test_a_folder_of_its_own_or_none(tmp_path):
    trainer(None, [mpdp.CsvWriter(tmp_path / "a" / "b")]).fit(dataset(), epochs=1, global_batch_size=6)
    assert len(table(tmp_path / "a" / "b" / "steps.csv")[1]) == 2
    with pytest.raises(
        ValueError, match=r"folder: expected one for CsvWriter, got None beside a trainer without"
    ):
        trainer(None, [mpdp.CsvWriter()]).fit(dataset(), epochs=1, global_batch_size=6)


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read():
        found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
        found.Reload()
        return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}

    writer = mpdp.TensorBoardWriter()
    first = trainer(tmp_path / "run", [writer], save_every=4)
    first.fit(dataset(), updates=7, global_batch_size=4)
    writer.close()
    for checkpoint in sorted((tmp_path / "run" / "checkpoints").iterdir())[1:]:
        __import__("shutil").rmtree(checkpoint)
    assert [step for step, _ in read()["train/loss"]] == list(range(1, 8))
    writer = mpdp.TensorBoardWriter()
    again = trainer(tmp_path / "run", [writer])
    again.resume()
    history = again.fit(dataset(), epochs=3, global_batch_size=4, metrics=[nn.accuracy])
    writer.close()
    found = read()
    assert [step for step, _ in found["train/lr"]] == list(range(1, 10)), (
        "what lay behind the checkpoint is gone"
    )
    assert found["epoch/accuracy"][-1] == (9, pytest.approx(history[-1]["accuracy"]))
    assert [step for step, _ in found["epoch/loss"]] == [3, 6, 9]
    again.save()
    again.fit(dataset(), updates=11, global_batch_size=4)
    again.resume()  # the writer as it is
    again.fit(dataset(), updates=12, global_batch_size=4)
    writer.close()
    assert [step for step, _ in read()["train/lr"]] == list(range(1, 13))


def test_files_of_one_second_are_read_in_order(tmp_path, monkeypatch):
    """Their names end in a count of the process, as text: the tenth sorts before the ninth."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9))
    (tmp_path / "events.out.tfevents.none").touch()  # a name of somebody else
    (tmp_path / f"events.out.tfevents.{time.time() + 60:.0f}.other.1.0").touch()  # and a clock that is ahead
    writer = mpdp.TensorBoardWriter(tmp_path)
    t = trainer(tmp_path / "run", [writer])
    for updates in (1, 2):
        t.fit(dataset(), updates=updates, global_batch_size=4)
        writer.close()
    names = sorted(path.name.split(".")[-1] for path in tmp_path.glob("events*"))
    assert names == ["0", "10", "9", "none"]
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [e.step for e in read.Scalars("train/loss")] == [1, 2]


class SaveAndEnd(mpdp.Callback):
    """Save while the second epoch is validated, and end there or behind it, as a signal or a kill may."""

    def __init__(self, at):
        self.at = at

    def on_validation(self, t, metrics):
        if t.step_count == 6:
            t.save()
            if self.at == "on_validation":
                raise KeyboardInterrupt

    def on_epoch(self, t):
        if t.step_count == 6:
            raise KeyboardInterrupt


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("at", ["on_validation", "on_epoch"])
@pytest.mark.parametrize("same", [False, True])
def test_tensorboard_of_a_run_that_ended_in_a_validation(tmp_path, at, every, same):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def fit(t):
        return t.fit(dataset(), epochs=3, global_batch_size=4, validation=dataset())

    whole = fit(trainer(tmp_path / "whole", [mpdp.TensorBoardWriter(every=every)]))
    writer = mpdp.TensorBoardWriter(every=every)
    t = trainer(tmp_path / "run", [writer, SaveAndEnd(at)])
    with pytest.raises(KeyboardInterrupt):
        fit(t)
    if same:
        t.callbacks = (writer,)
    else:
        writer.close()
        t = trainer(tmp_path / "run", [mpdp.TensorBoardWriter(every=every)])
    assert t.resume() and t.step_count == 6 and t.epoch == 1
    assert fit(t) == whole
    t.callbacks[0].close()
    found = {}
    for name in ("run", "whole"):
        read = EventAccumulator(str(tmp_path / name / "tensorboard"))
        read.Reload()
        found[name] = {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert found["run"] == found["whole"], "each row once"
    assert [step for step, _ in found["run"]["train/loss"]] == list(range(every, 10, every))
    assert [step for step, _ in found["run"]["epoch/validation_loss"]] == [3, 6, 9]


def test_tensorboard_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    with pytest.raises(MissingDependencyError, match=r'tensorboard: .* pip install "mpdp\[tensorboard\]"'):
        mpdp.TensorBoardWriter()
    with pytest.raises(ValueError, match=r"every: expected an integer of 1 or more, got 0"):
        mpdp.TensorBoardWriter(every=0)
