"""Saving and resuming against the reports of kinds A8, C4 and D, with any number of ranks; argv[1] is a folder.

Without a second argument it trains, saves and goes on; with "load" it is the new process that takes up what was
saved, and tries all that may be wrong with it.
"""

import contextlib
import os
import resource
import shutil
import sys
import time
from pathlib import Path

import numpy as np
from launching import record
from safetensors.numpy import load_file, save_file

import mpdp
from mpdp import data, nn, optim
from mpdp.errors import CheckpointError
from mpdp.training import checkpoint

FOLDER = Path(sys.argv[1])
world = mpdp.init(timeout=20)
rank, size = world.rank, world.size
last = rank == size - 1
random = np.random.default_rng(0)
IDS, NEXT = random.integers(0, 6, 24), random.integers(0, 6, 24)


class Tied(nn.Module):
    def __init__(self):
        self.embed = nn.Embedding(6, 4)
        self.hidden = nn.Linear(4, 4)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.hidden(self.embed(x)).tanh())


def trainer(model=None, run_dir=None, **options):
    mpdp.seed(0)
    options = {"optimizer": optim.Adam(lr=0.05), "schedule": optim.WarmupCosine(2, 10), **options}
    return mpdp.Trainer(
        model or Tied(), nn.cross_entropy, options.pop("optimizer"), run_dir=run_dir, **options
    )


def fit(t, updates):
    t.fit(data.ArrayDataset(IDS, NEXT), updates=updates, global_batch_size=8)


def everything(t):
    """Return the bytes of weights, optimizer state, counts and rate."""
    state = {k: v.tobytes() for k, v in t.optimizer.state_arrays().items()}
    return state | {"weights": t.parallel.weights.tobytes(), "lr": t.lr, "step": t.step_count}


def on_all_ranks(flag):
    """Return whether the flag holds on every rank, and that all ranks are here."""
    flags = np.array([not flag], dtype=np.int64)
    world.comm.all_reduce(flags)
    return flags[0] == 0


def refused(call, *texts):
    """Check that a call raises one CheckpointError on all ranks that names all the texts on one line."""
    try:
        call()
    except CheckpointError as error:
        assert error.agreed or size == 1
        message = str(error)
        assert "\n" not in message
        for text in texts:
            assert text in message, (text, message)
    else:
        raise AssertionError("no error")
    world.comm.barrier()


def copies(name, source=FOLDER / "tied"):
    """Return a copy of a run's folder that every rank sees."""
    target = FOLDER / f"{name}-n{size}"
    if rank == 0:
        shutil.copytree(source, target)
    world.comm.barrier()
    return target


def newest_of(run):
    """Return the newest checkpoint's directory."""
    return max((run / "checkpoints").iterdir(), key=lambda path: path.name)


@contextlib.contextmanager
def changed(module, name, value, here=True):
    old = getattr(module, name)
    if here:
        setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, old)


@contextlib.contextmanager
def full_disk(limit):
    """Let rank 0 write no file beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# -- saving


def save():
    t = trainer(run_dir=FOLDER / "deep" / "er" / "tied", keep=10)
    fit(t, 2)
    t.save()
    fit(t, 3)
    path = t.save()
    names = load_file(path / "part-00000.safetensors").keys()
    assert [name for name in names if "out" in name] == [] and "weights/embed.weight" in names
    assert len(names) == 3 * len(t.parallel.parameters)
    fit(t, 6)
    if rank == 0:
        os.rename(FOLDER / "deep" / "er" / "tied", FOLDER / "tied")
        np.savez(FOLDER / "whole.npz", weights=t.parallel.weights, **t.optimizer.state_arrays())


def tied_weights_come_back_as_one():
    """D8: in a new process, and the run goes on as the one that was never stopped (C4, D6)."""
    t = trainer(run_dir=copies("tied"))
    assert t.resume() and t.step_count == 3
    assert t.model.out.weight is t.model.embed.weight
    fit(t, 6)
    whole = np.load(FOLDER / "whole.npz")
    assert np.array_equal(t.parallel.weights, whole["weights"])
    for name, array in t.optimizer.state_arrays().items():
        assert np.array_equal(array, whole[name]), name
    t.check_replicas()


def rank_0_decides_whether_there_is_a_checkpoint():
    """A8: another rank does not see the file yet; C4: or has no such folder at all."""
    run = copies("seen")

    def missing(path, *args, **kwargs):
        if str(run) in str(path):
            raise FileNotFoundError(2, "not here yet", str(path))
        return stat(path, *args, **kwargs)

    stat = os.stat
    for blind in range(size):
        t = trainer(run_dir=run)
        with changed(os, "stat", missing, rank == blind):
            if blind == rank:
                assert not run.exists() and not os.path.exists(run)
            found = t.resume()
        assert on_all_ranks(found == (blind != 0)) and t.step_count == (3 if found else 0)
        t.check_replicas()
    t = trainer(run_dir=run if rank == 0 else "/nonexistent")
    assert t.resume() and t.step_count == 3
    fit(t, 4)
    t.check_replicas()


def a_torn_newest_is_passed_over():
    """D9: with a warning by resume(), with an error by resume(path); all ranks agree."""

    def empty(path):
        path.write_bytes(b"")

    def cut(path):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def flip(path):
        content = bytearray(path.read_bytes())
        content[-3 if path.suffix == ".safetensors" else len(content) // 2] ^= 1
        path.write_bytes(content)

    def directory(path):
        path.unlink()
        path.mkdir()

    def text(path):
        path.write_text("not a checkpoint")

    for name in ("manifest.json", "part-00000.safetensors"):
        for damage in (empty, cut, flip, directory, text):
            run = copies(f"torn-{damage.__name__}-{name}")
            newest = newest_of(run)
            if rank == 0:
                damage(newest / name)
            world.comm.barrier()
            t = trainer(run_dir=run)
            before = everything(t)
            refused(lambda: t.resume(newest), str(newest), "expected")  # noqa: B023
            assert everything(t) == before
            assert t.resume() and t.step_count == 2
            t.check_replicas()
    run = copies("torn-all")
    if rank == 0:
        for path in (run / "checkpoints").iterdir():
            (path / "manifest.json").unlink()
    world.comm.barrier()
    assert trainer(run_dir=run).resume() is False


def another_model_is_refused_whole():
    """D7: missing, unexpected and mismatched names are listed, and nothing is half-loaded; order does not matter."""

    class Pair(nn.Module):
        def __init__(self, names=("a", "b"), dtype="float32", width=4):
            for name in names:
                setattr(self, name, nn.Linear(4, 4, bias=False, dtype=dtype))
            self.shift = mpdp.autodiff.Parameter(np.zeros((width, 3)[:1] if width == 3 else (4, 3), dtype))

        def forward(self, x):
            return self.b(self.a(x))

    def build(*args, precision="float32", **kwargs):
        return trainer(
            Pair(*args, **kwargs),
            optimizer=optim.SGD(lr=0.1),
            precision=precision,
            run_dir=FOLDER / f"pair{size}",
        )

    t = build()
    t.model.a.weight.data[...] = 1.0
    path = t.save()
    for other, texts in (
        (build(names=("a", "c")), ("missing parameter c.weight", "unexpected parameter b.weight")),
        (build(names=("a", "b", "c")), ("missing parameter c.weight",)),
        (build(names=("a",)), ("unexpected parameter b.weight",)),
        (build(width=3), ("parameter shift is float32[4, 3] there, float32[3] here",)),
        (
            build(dtype="float64", precision="float64"),
            ("parameter a.weight is float32[4, 4] there, float64",),
        ),
    ):
        before = everything(other)
        refused(lambda: other.resume(path), "nothing was loaded", *texts)  # noqa: B023
        assert everything(other) == before
    swapped = build(names=("b", "a"))
    assert swapped.resume(path)
    assert np.all(swapped.model.a.weight.data == 1.0) and not np.any(swapped.model.b.weight.data == 1.0)


def rank_0_alone_makes_folders():
    """D10: below a folder that does not exist, with a slow mkdir; others wait for it. D11: and for the file."""

    def mkdir(*args, **kwargs):
        assert rank == 0, "mkdir on another rank"
        time.sleep(0.05)
        return make(*args, **kwargs)

    def slow(*args, **kwargs):
        time.sleep(0.3)
        save_file(*args, **kwargs)

    make = os.mkdir
    run = FOLDER / f"n{size}" / "a" / "b" / "c"
    with changed(os, "mkdir", mkdir), changed(checkpoint, "save_file", slow):
        t = trainer(run_dir=run)
        fit(t, 1)
        path = t.save()
        assert checkpoint.load(checkpoint.read(path)).keys() >= {"weights/embed.weight"}
        assert path.parent == run / "checkpoints"
        made = mpdp.new_run_dir("name", base=FOLDER / f"n{size}" / "d" / "e")
        assert made.is_dir() and made.parent == (FOLDER / f"n{size}" / "d" / "e").resolve()
    world.comm.barrier()


def a_full_disk_is_an_error_on_all_ranks_and_the_last_checkpoint_stays():
    """D1: here a limit on the size of files stands for the full disk."""
    t = trainer(run_dir=FOLDER / f"full-n{size}", keep=10)
    fit(t, 2)
    path = t.save()
    good = everything(t)
    fit(t, 4)
    with full_disk(700):
        refused(t.save, "checkpoint: expected to write below", "free or mend the disk")
    if rank == 0:
        left = [p.name for p in path.parent.iterdir()]
        assert left == [path.name], left
    other = trainer(run_dir=FOLDER / f"full-n{size}")
    assert other.resume() and everything(other) == good
    assert t.save().is_dir()  # the program may catch the error on all ranks and go on
    t = trainer(run_dir=FOLDER / f"full-log-n{size}", save_every=4)
    fit(t, 1)
    with full_disk(10):  # inside fit, and not even the log can be written
        refused(lambda: fit(t, 4), "checkpoint: expected to write", "free or mend the disk")
    fit(t, 5)
    t.check_replicas()


def text_of_any_encoding_may_stand_in_a_path():
    """K5: also bytes that are no text at all."""
    for name in (os.fsdecode("gro\u00df \u2603".encode()), os.fsdecode(b"latin-\xe4")):
        t = trainer(run_dir=FOLDER / f"{name}-n{size}")
        fit(t, 1)
        path = t.save()
        assert path.is_dir() and path.parent.parent == FOLDER / f"{name}-n{size}"
        made = mpdp.new_run_dir("run", base=FOLDER / name)
        assert made.is_dir()
        assert trainer(run_dir=FOLDER / f"{name}-n{size}").resume()


if len(sys.argv) == 2:
    save()
else:
    cases = [
        tied_weights_come_back_as_one,
        rank_0_decides_whether_there_is_a_checkpoint,
        a_torn_newest_is_passed_over,
        another_model_is_refused_whole,
        rank_0_alone_makes_folders,
        a_full_disk_is_an_error_on_all_ranks_and_the_last_checkpoint_stays,
        text_of_any_encoding_may_stand_in_a_path,
    ]
    if len(sys.argv) > 3:
        cases = [function for function in cases if function.__name__ in sys.argv[3:]]
    for function in cases:
        function()
        world.comm.barrier()
    record(len(cases))
