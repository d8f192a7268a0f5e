"""The lock of a run folder: one process at a time, for all its trainers, and never longer than it lives."""

import contextlib
import errno
import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import mpdp
from mpdp import nn, optim
from mpdp.errors import CheckpointError
from mpdp.training import checkpoint, run_lock
from mpdp.training.run_folder import Resumed, RunFolder

LOCKED = r"run_dir: expected a folder where no other job writes, got .*run where another running job does \(process "
HOLD = """
import sys, time
from pathlib import Path
from mpdp.training import run_lock
lock = run_lock.take(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
time.sleep(float(sys.argv[2]))
"""
FORK = """
import os, sys
from pathlib import Path
from mpdp.training import run_lock
lock = run_lock.take(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    open(sys.argv[1] + "/by-the-child", "w").close()
    sys.stdin.read()
    os._exit(0)
while not os.path.exists(sys.argv[1] + "/by-the-child"):
    pass
assert open(sys.argv[1] + "/lock").read().startswith(f"process {os.getpid()} on ")
print(child, flush=True)
os._exit(0)
"""


def start(program, folder, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, process.stdout.readline().strip()


@contextlib.contextmanager
def other_process(folder, seconds=0.0):
    """Another process holds the lock; it ends some seconds after its stdin was closed."""
    process, said = start(HOLD, folder, str(seconds))
    try:
        assert said == "held"
        yield process
    finally:
        process.kill()
        process.communicate()


def is_free(folder):
    """Return whether a process that comes now would get the lock: it is one open file's, not one process's."""
    with open(folder / run_lock.NAME, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    yield tmp_path / "run"
    gc.collect()


def trainer(folder, **options):
    mpdp.seed(0)
    return mpdp.Trainer(nn.Linear(4, 3), nn.cross_entropy, optim.SGD(lr=0.1), run_dir=folder, **options)


def step(made):
    made.step((np.ones((6, 4), "float32"), np.arange(6) % 3))


def test_another_process_is_refused_until_the_first_is_gone_however_it_ends(run):
    with other_process(run) as process:
        with pytest.raises(ValueError, match=rf"{LOCKED}{process.pid} on .*, since .*; let it end or"):
            run_lock.take(run, patience=0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (run / run_lock.NAME).read_text().startswith(f"process {process.pid} on ")
        assert run_lock.take(run, patience=0) is not None


def test_one_that_is_about_to_end_is_waited_for(run):
    with other_process(run, seconds=0.3) as process:
        process.stdin.close()
        assert run_lock.take(run, patience=60) is not None
        process.stdin = None


def test_a_process_has_one_lock_of_a_folder_whatever_it_is_called(run):
    first = run_lock.take(run, patience=0)
    assert run_lock.take(run, patience=0) is first
    run.rename(run.parent / "renamed")
    assert run_lock.take(run.parent / "renamed", patience=0) is first
    run.mkdir()
    assert run_lock.take(run, patience=0) is not first  # made anew
    assert (run.parent / "renamed" / run_lock.NAME).read_text().startswith(f"process {os.getpid()} on ")
    del first
    assert is_free(run.parent / "renamed")
    assert (run.parent / "renamed" / run_lock.NAME).read_text() == ""  # nobody is there


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", r"its file does not say which process"),
        (b"\xff\x00\x1b[31m job 7\nand more", r"\ufffd\[31m job 7"),
        (b"x" * 5000, r"x{200}"),
    ],
)
def test_what_the_file_says_is_shown_with_care(run, text, said):
    with other_process(run):
        (run / run_lock.NAME).write_bytes(text)
        with pytest.raises(ValueError, match=rf"another running job does \({said}\); let it end"):
            run_lock.take(run, patience=0)


def test_a_forked_child_keeps_no_lock(run):
    process, child = start(FORK, run)
    try:
        process.wait()
        os.kill(int(child), 0)  # it lives
        assert is_free(run)
    finally:
        process.communicate("")


@pytest.mark.parametrize("number", ["ENOLCK", "ENOTSUP", "EOPNOTSUPP", "ENOSYS"])
def test_a_file_system_without_locks_has_none(run, monkeypatch, number):
    def flock(*_):
        raise OSError(getattr(errno, number), "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert run_lock.take(run) is None
    t = trainer(run)
    step(t)
    assert t.save().is_dir() and t.folder.locks == []


def test_any_other_error_of_the_lock_is_one_of_the_folder(run, monkeypatch):
    def flock(*_):
        raise OSError(errno.EIO, "a broken disk")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match=r"run_dir: expected a folder that can be written, got .*a broken disk"):
        step(trainer(run))


def test_a_link_in_its_place_is_not_followed(run):
    (run.parent / "precious").write_text("text")
    (run / run_lock.NAME).symlink_to("../precious")
    with pytest.raises(OSError, match=r"run_dir: expected a folder that can be written, got .*lock"):
        step(trainer(run))
    assert (run.parent / "precious").read_text() == "text"


def content(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != run_lock.NAME)
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize("call", ["step", "save", "resume"])
def test_a_trainer_is_refused_where_another_job_writes(run, monkeypatch, call):
    monkeypatch.setattr("mpdp.training.run_files.PATIENCE", 0.1)
    t = trainer(run)
    step(t)
    t.save()
    del t
    gc.collect()
    before = content(run)
    with other_process(run) as process:
        t = trainer(run)
        assert call != "resume" or t.resume()  # to read is free
        at = t.step_count
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"{LOCKED}{process.pid} on "):
                t.save() if call == "save" else step(t)
        assert t.step_count == at and content(run) == before
    if call == "resume":
        step(t)  # it is gone


def test_the_last_trainer_of_a_process_takes_over_and_gives_the_lock_up_when_it_is_gone(run):
    first = trainer(run)
    assert not (run / run_lock.NAME).exists()  # it has written nothing yet
    step(first)
    first.save()
    assert not is_free(run)
    second = trainer(run)
    assert second.resume()
    step(second)
    assert not is_free(run)
    assert first.folder.locks == []
    del second
    gc.collect()
    assert is_free(run)  # although the first is there
    assert first.resume()
    step(first)
    assert not is_free(run)
    del first
    gc.collect()
    assert is_free(run)


def test_rows_that_wait_are_written_before_the_lock_is_given_up(run, monkeypatch):
    order = []
    own = run_lock._close

    def close(descriptor, pid):
        order.append((run / "log.jsonl").read_text().count("\n"))
        own(descriptor, pid)

    monkeypatch.setattr(run_lock, "_close", close)
    t = trainer(run)
    for _ in range(5):
        step(t)
    del t
    gc.collect()
    assert order == [5]


def test_a_save_in_the_background_keeps_it_until_it_is_done(run, monkeypatch):
    go, own = threading.Event(), checkpoint.save_file

    def save_file(arrays, path):
        assert go.wait(20)
        own(arrays, path)

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    t = trainer(run)
    step(t)
    t.save(wait=False)
    thread = t.saves._job._thread
    t.saves._job.forget()
    del t
    gc.collect()
    assert not is_free(run)
    go.set()
    thread.join()
    del thread
    gc.collect()
    assert is_free(run) and len(checkpoint.found_below(run / "checkpoints")) == 1


def test_a_refused_trainer_keeps_no_lock_and_leaves_an_old_run_as_it_is(run):
    step(trainer(run))
    gc.collect()
    (run / run_lock.NAME).unlink()
    with pytest.raises(ValueError, match=r"run_dir: expected a new or empty folder") as caught:
        step(trainer(run))
    assert not (run / run_lock.NAME).exists()
    assert run_lock.take(run, patience=0) is not None  # and gone at once
    with pytest.raises(ValueError, match=r"run_dir: expected a new or empty folder") as caught:
        step(trainer(run))
    assert is_free(run), caught  # the error is still there


def test_a_job_that_has_ended_while_it_was_waited_for_has_used_the_folder(run):
    with other_process(run) as process:
        folder = RunFolder(run, writes=True)

        def ends():
            (run / "log.jsonl").write_text('{"kind": "step"}\n')
            process.kill()

        timer = threading.Timer(0.3, ends)
        timer.start()
        with pytest.raises(ValueError, match=r"run_dir: expected a new or empty folder"):
            folder.claim({}, Resumed(), patience=60)
        timer.join()
    assert (run / "log.jsonl").read_text() == '{"kind": "step"}\n'


def test_the_lock_alone_makes_no_folder_used_and_no_checkpoint(run):
    lock = run_lock.take(run, patience=0)
    assert lock is not None and not RunFolder(run, writes=True).used
    t = trainer(run)
    assert not t.resume()
    with pytest.raises(CheckpointError, match=r"expected"):
        mpdp.load_model(run)
    step(trainer(run))  # new, so nothing needs to be resumed
