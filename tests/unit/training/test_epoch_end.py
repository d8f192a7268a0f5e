"""Runs that are stopped around the end of an epoch: it is validated, logged and shown once, as if nothing had been."""

import json
import os
import re
import signal

import numpy as np
import pytest

import mpdp
from mpdp import data, nn, optim
from mpdp.errors import Preempted
from mpdp.training import checkpoint

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.standard_normal((14, 4)).astype("float32"), RANDOM.integers(0, 3, 14)
TRAIN = data.ArrayDataset(X[:10], Y[:10])  # three updates an epoch
OPTIONS = {"epochs": 3, "global_batch_size": 4, "metrics": [nn.accuracy]}


class Killed(BaseException):
    pass


def kill():
    raise Killed


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


class Validation:
    """Samples of which the first one of the n-th pass ends the process, or is to."""

    def __init__(self, n=None, end=None):
        self.n, self.end, self.passes = n, end, 0

    def __len__(self):
        return 4

    def __getitem__(self, i):
        if i == 0:
            self.passes += 1
            if self.passes == self.n:
                self.end()
        return X[10 + i], Y[10 + i]


class At(mpdp.Callback):
    """Ends the process in one of the calls, after so many updates; notes the calls that it has lived through."""

    def __init__(self, call=None, step=None, end=None):
        self.where, self.end, self.calls = (call, step), end, []

    def called(self, call, step):
        if (call, step) == self.where:
            self.end()
        self.calls.append((call, step))

    def on_step(self, trainer):
        self.called("on_step", trainer.step_count)

    def on_validation(self, trainer, metrics):
        self.called("on_validation", trainer.step_count)

    def on_epoch(self, trainer):
        self.called("on_epoch", trainer.step_count)

    def on_checkpoint(self, trainer, path):
        self.called("on_checkpoint", int(path.name.split("-")[1]))


class Terminal:
    """What is shown of epochs, without speeds."""

    def __init__(self, capsys):
        self._capsys = capsys

    def lines(self):
        return re.findall(r"^\[0/1\] (epoch .*?) [\d,]+ samples/s", self._capsys.readouterr().err, re.M)


@pytest.fixture
def terminal(capsys):
    return Terminal(capsys)


@pytest.fixture(autouse=True)
def _handlers():
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a program that was preempted ignores it


def trainer(run_dir, at=None, **options):
    mpdp.seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.2), nn.Linear(5, 3))
    schedule = optim.ReduceOnPlateau(patience=0, threshold=0.9)
    options = {"save_every": 3, **options}
    return mpdp.Trainer(
        model, nn.cross_entropy, optim.Adam(lr=0.1), run_dir=run_dir, callbacks=[] if at is None else [at],
        schedule=schedule, **options,
    )  # fmt: skip


def train(t, resume=False, dataset=TRAIN, **options):
    assert not resume or t.resume()
    options = {"validation": Validation(), **OPTIONS, **options}
    history = t.fit(dataset, **options)
    return json.loads(json.dumps([history, t.model.state_dict()], default=lambda a: a.tolist()))


def log(run_dir):
    """Return the log without what a process says of itself: its times and its memory."""
    rows = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    for row in rows:
        of_it = [key for key in row if key.endswith("seconds") or row["kind"] in ("ranks", "memory")]
        for name in set(of_it) - {"kind", "step"}:
            del row[name]
    return rows


def newest(run_dir):
    return checkpoint.newest(run_dir / "checkpoints")[0][0]


STOPS = {
    "in the last update": ("on_step", 3),
    "in the validation": ("validation", 3),
    "behind the validation": ("on_validation", 3),
    "in the update after it": ("on_step", 4),
    "behind the checkpoint": ("on_checkpoint", 3),
    "in the validation at the end": ("validation", 9),
}


@pytest.mark.parametrize("end", [kill, terminate])
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("save_every", [1, 3])
def test_stopped_and_resumed_it_is_as_if_nothing_had_been(tmp_path, terminal, stop, end, save_every):
    call, step = STOPS[stop]
    expected = train(trainer(tmp_path / "whole", save_every=save_every))
    shown, rows = terminal.lines(), log(tmp_path / "whole")
    assert len(shown) == 3 and [row["epoch"] for row in rows if row["kind"] == "epoch"] == [1, 2, 3]
    at = At(call, step, end)
    first = trainer(tmp_path / "run", at, save_every=save_every)
    with pytest.raises((Killed, Preempted)):
        train(first, validation=Validation(step // 3, end) if call == "validation" else Validation())
    del first
    second = trainer(tmp_path / "run", save_every=save_every)
    if not second.resume():  # killed before there was one
        assert end is kill and step == 3 and call != "on_checkpoint" and save_every == 3
    validation = Validation()
    if second.step_count == 9:  # no update is left, whose times the row would tell
        rows.remove({"kind": "ranks", "step": 9})
    assert train(second, validation=validation) == expected
    assert log(tmp_path / "run") == rows and terminal.lines() == shown
    if stop in ("behind the checkpoint", "in the update after it") and second.history:
        assert validation.passes == 2  # what the checkpoint holds is not done again


@pytest.mark.parametrize("save_every", [2, 9, 100])
def test_a_run_that_is_over_is_not_closed_again(tmp_path, terminal, save_every):
    """Resumed, it has nothing to do and leaves the log alone; given more epochs, it goes on behind its last one."""
    expected = train(trainer(tmp_path, save_every=save_every))
    assert len(terminal.lines()) == 3
    assert newest(tmp_path).state["position"]["epoch"] == 3 and newest(tmp_path).step == 9
    before, starts = log(tmp_path), (tmp_path / "config.json").read_text()
    at, again = At(), trainer(tmp_path, save_every=save_every)
    again.callbacks = (at,)
    assert train(again, resume=True) == expected
    assert log(tmp_path) == before and (tmp_path / "config.json").read_text() == starts
    assert at.calls == [] and terminal.lines() == []
    whole = train(trainer(None, save_every=None), epochs=4)
    assert train(again, epochs=4) == whole
    assert [line.split()[1] for line in terminal.lines()] == ["1", "2", "3", "4", "4"]
    assert [row["epoch"] for row in log(tmp_path) if row["kind"] == "epoch"] == [1, 2, 3, 4]
    calls = [call for call in at.calls if call[0] in ("on_validation", "on_epoch")]
    assert calls == [("on_validation", 12), ("on_epoch", 12)]


def test_a_signal_behind_the_last_epoch_saves_it(tmp_path, terminal):
    """A checkpoint of the last update, of the program's own, does not hold what has come of the epoch."""

    class Own(At):
        def on_step(self, t):
            if t.step_count == 9:
                t.save()

    with pytest.raises(Preempted, match=r"saved as .*step-0000000009-000002"):
        train(trainer(tmp_path, Own("on_epoch", 9, terminate), save_every=None))
    assert len(terminal.lines()) == 3 and newest(tmp_path).state["position"]["epoch"] == 3
    again = trainer(tmp_path, save_every=None)
    train(again, resume=True)
    assert terminal.lines() == [] and len(again.history) == 3


def test_one_checkpoint_an_update_also_where_it_is_the_best(tmp_path):
    at = At()
    train(trainer(tmp_path, at, keep=20, keep_best="loss", async_save=True))
    assert [step for call, step in at.calls if call == "on_checkpoint"] == [3, 6, 9]
    assert all(
        found.state["position"]["batch"] == 0 for found in checkpoint.found_below(tmp_path / "checkpoints")
    )


@pytest.mark.parametrize("stop", [("on_step", 3), ("validation", 3), ("on_step", 4)])
def test_an_epoch_of_a_stream_ends_when_the_next_batch_is_asked_for(tmp_path, terminal, stop):
    def elements(epoch):
        return ((X[i], Y[i]) for i in range(10))

    options = {"dataset": data.Stream(elements, window=4)}
    expected = train(trainer(tmp_path / "whole"), **options)
    shown, rows = terminal.lines(), log(tmp_path / "whole")
    call, step = stop
    first = trainer(tmp_path / "run", At(call, step, kill))
    with pytest.raises(Killed):
        train(first, validation=Validation(1 if call == "validation" else None, kill), **options)
    del first
    second = trainer(tmp_path / "run")
    assert second.resume() is (stop != ("on_step", 3))
    assert train(second, **options) == expected
    assert log(tmp_path / "run") == rows and terminal.lines() == shown
