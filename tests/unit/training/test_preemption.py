"""A signal in one process: where it is obeyed, what is saved, and what leaves `fit`."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import mpdp
import mpdp.threads
from mpdp import data, nn, optim
from mpdp.errors import CheckpointError, Preempted
from mpdp.training import checkpoint

X = np.random.default_rng(0).standard_normal((24, 4)).astype("float32")
DATA = data.ArrayDataset(X, (X[:, 0] > 0).astype("int64"))


@pytest.fixture(autouse=True)
def _handlers():
    yield
    gc.collect()  # a loop of its own listens as long as its trainer lives
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)  # a program that was preempted ignores them


class Send(mpdp.Callback):
    def __init__(self, step, number=signal.SIGTERM):
        self.step, self.number, self.errors = step, number, []

    def on_step(self, trainer):
        if trainer.step_count == self.step:
            os.kill(os.getpid(), self.number)

    def on_exception(self, trainer, error):
        self.errors.append(error)


def make(run_dir, *callbacks, **options):
    mpdp.seed(0)
    return mpdp.Trainer(
        nn.Linear(4, 2), nn.cross_entropy, optim.Adam(lr=0.1), run_dir=run_dir, callbacks=callbacks, **options
    )


def steps(run_dir):
    return sorted(int(path.name.split("-")[1]) for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_fit_saves_behind_the_next_update_and_ends_with_75(tmp_path, number):
    send = Send(3, number)
    with pytest.raises(Preempted) as caught:
        make(tmp_path, send).fit(DATA, updates=10, global_batch_size=8)
    assert caught.value.code == 75 and caught.value.agreed and send.errors == [caught.value]
    found = checkpoint.newest(tmp_path / "checkpoints")[0][0]
    assert (found.step, steps(tmp_path)) == (4, [4])
    assert str(caught.value) == (
        f"{signal.Signals(number).name} on 1 of 1 ranks: stopped after update 4; saved as {found.path}"
    )
    trainer, whole = make(tmp_path), make(None)
    assert trainer.resume()
    for each in (trainer, whole):
        each.fit(DATA, updates=10, global_batch_size=8)
    assert np.array_equal(trainer.model.weight.data, whole.model.weight.data)


def test_a_checkpoint_of_that_update_is_not_written_twice(tmp_path):
    with pytest.raises(Preempted, match="stopped after update 4; it was saved already"):
        make(tmp_path, Send(3), save_every=2).fit(DATA, updates=10, global_batch_size=8)
    assert steps(tmp_path) == [2, 4]


def test_a_save_in_the_background_is_waited_for(tmp_path, monkeypatch):
    own, fails = checkpoint.save_file, []

    def slowly(arrays, path):
        time.sleep(0.2)
        if fails and fails.pop():
            raise OSError(28, "No space left on device")
        own(arrays, path)

    monkeypatch.setattr(checkpoint, "save_file", slowly)
    with pytest.raises(Preempted, match="stopped after update 4; it was saved already"):
        make(tmp_path / "a", Send(3), save_every=2, async_save=True).fit(
            DATA, updates=10, global_batch_size=8
        )
    assert steps(tmp_path / "a") == [2, 4]
    fails[:] = [True] * 2
    with pytest.raises(CheckpointError, match="No space left on device"):
        make(tmp_path / "b", Send(3), save_every=4, async_save=True).fit(
            DATA, updates=10, global_batch_size=8
        )
    assert not fails, "it was tried once more"
    fails[:] = [True]
    with pytest.raises(Preempted, match="stopped after update 4; saved as"):
        make(tmp_path / "c", Send(3), save_every=4, async_save=True).fit(
            DATA, updates=10, global_batch_size=8
        )
    assert steps(tmp_path / "c") == [4]


def test_without_a_run_dir_nothing_is_saved():
    with pytest.raises(Preempted, match="stopped after update 2; nothing is saved without a run_dir"):
        make(None, Send(1)).fit(DATA, updates=10, global_batch_size=8)


def test_a_signal_in_the_last_update_is_not_lost(tmp_path):
    with pytest.raises(Preempted):
        make(tmp_path, Send(3)).fit(DATA, updates=3, global_batch_size=8)
    assert steps(tmp_path) == [3]


def test_a_validation_is_broken_off_and_runs_anew(tmp_path):
    class Validation(Send):
        seen = 0

        def __len__(self):
            return 24

        def __getitem__(self, index):
            type(self).seen += 1
            if self.seen == 9:
                os.kill(os.getpid(), signal.SIGTERM)
            return DATA[index]

    with pytest.raises(Preempted):
        make(tmp_path).fit(DATA, epochs=2, global_batch_size=8, validation=Validation(0))
    assert Validation.seen < 24 + 17 and steps(tmp_path) == [3]  # what was read ahead is read
    trainer = make(tmp_path)
    assert trainer.resume() and trainer.epoch == 0
    history = trainer.fit(DATA, epochs=2, global_batch_size=8, validation=DATA)
    assert [row["epoch"] for row in history] == [1, 2] and trainer.step_count == 6


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_a_loop_of_its_own(tmp_path, call):
    trainer = make(tmp_path)
    trainer.step((X[:8], np.zeros(8, dtype="int64")))
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(Preempted):
        getattr(trainer, call)(DATA)
    assert steps(tmp_path) == [1]


def test_a_save_that_fails_is_the_error(tmp_path, monkeypatch):
    def write(*arguments):
        raise CheckpointError("checkpoint: expected to write, got a full disk")

    monkeypatch.setattr(checkpoint, "write_part", write)
    with pytest.raises(CheckpointError, match="a full disk"):
        make(tmp_path, Send(1)).fit(DATA, updates=10, global_batch_size=8)


def test_handlers_are_there_while_fit_runs():
    seen = []

    class Look(mpdp.Callback):
        def on_step(self, trainer):
            seen.append(signal.getsignal(signal.SIGTERM))

    make(None, Look()).fit(DATA, updates=1, global_batch_size=8)
    assert seen != [signal.SIG_DFL] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_handlers_are_put_back_where_threads_end_by_an_error():
    class Fail(mpdp.Callback):
        def on_step(self, trainer):
            if trainer.world.rank == 0:
                while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # until the main thread looks
                    time.sleep(0.01)
                raise OSError("a full disk")
            time.sleep(1)  # rank 1 listens longer than the error takes

    def run():
        mpdp.init(device="cpu", timeout=20)
        make(None, Fail()).fit(DATA, updates=5, global_batch_size=8)

    with pytest.raises(OSError, match="a full disk"):
        mpdp.threads.run(run, 2)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_inside_of_averaged_the_weights_are_saved(tmp_path):
    trainer = make(tmp_path, ema=0.5)
    for _ in range(2):
        trainer.step((X, DATA.arrays[1]))
    weights, average = trainer.model.weight.numpy().copy(), None
    with pytest.raises(Preempted, match="saved as"), trainer.averaged():
        average = trainer.model.weight.numpy().copy()
        os.kill(os.getpid(), signal.SIGTERM)
        trainer.evaluate(DATA)
    found = checkpoint.newest(tmp_path / "checkpoints")[0][1]
    np.testing.assert_array_equal(found["weights/weight"], weights)
    np.testing.assert_array_equal(found["average/weight"], average)
    np.testing.assert_array_equal(trainer.model.weight.numpy(), weights)
    assert not np.array_equal(weights, average)


def test_a_handler_of_the_program_may_ask_to_stop(tmp_path):
    trainer = make(tmp_path, Send(2))
    signal.signal(signal.SIGTERM, lambda number, frame: setattr(trainer, "should_stop", True))
    trainer.fit(DATA, updates=10, global_batch_size=8)
    assert trainer.step_count == 2


def test_a_process_whose_update_does_not_end_is_ended():
    """After the world's timeout, with a line that says why."""
    text = """
    import os, signal, time, numpy as np, mpdp
    from mpdp import data, nn, optim
    mpdp.init(device="cpu", timeout=0.3)
    class Stuck(mpdp.Callback):
        def on_step(self, trainer):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
    trainer = mpdp.Trainer(nn.Linear(4, 2), nn.cross_entropy, optim.SGD(lr=0.1), callbacks=[Stuck()])
    trainer.fit(data.ArrayDataset(np.ones((8, 4), "float32"), np.zeros(8, int)), epochs=1, global_batch_size=8)
    """
    words = [sys.executable, "-c", textwrap.dedent(text)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert "[0/1] error SIGTERM came, and the update under way has not ended since" in done.stderr
