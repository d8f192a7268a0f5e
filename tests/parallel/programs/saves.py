"""Saves by one rank alone, saves in the background that fail, and programs that end on one: argv = folder, case."""

import contextlib
import resource
import sys
import threading
from pathlib import Path

import numpy as np
from launching import fault, record

import mpdp
from mpdp import data, nn, optim
from mpdp.errors import CheckpointError, DisagreementError
from mpdp.training import checkpoint

FOLDER, CASE = Path(sys.argv[1]), sys.argv[2]
world = mpdp.init(device="cpu", timeout=20)
rank, size = world.rank, world.size
last = rank == size - 1
X, Y = np.random.default_rng(0).standard_normal((12, 4)).astype("float32"), np.arange(12) % 3
DATA = data.ArrayDataset(X, Y)
own_save_file = checkpoint.save_file


def trainer(name, **options):
    mpdp.seed(0)
    model = nn.Sequential(nn.Linear(4, 200), nn.ReLU(), nn.Linear(200, 3))
    return mpdp.Trainer(
        model, nn.cross_entropy, optim.Adam(lr=0.1), run_dir=FOLDER / f"{name}-n{size}", **options
    )


def step(t, times=1):
    for _ in range(times):
        t.step((X[:4], Y[:4]))


def refused(call, *texts):
    """Every rank gets the error, and gets it now."""
    try:
        call()
    except DisagreementError as error:
        assert error.agreed and all(text in str(error) for text in texts), error
    else:
        raise AssertionError(f"no error on rank {rank}")
    world.comm.barrier()


def under_rank_0():
    t = trainer("rank0")
    step(t)
    refused(
        lambda: t.save() if rank == 0 else step(t),
        "save(): expected every rank",
        "rank 0 in save() at step 1",
    )
    refused(lambda: t.save(wait=False) if rank == 0 else step(t), "rank 0 in save() at step 1")
    refused(lambda: t.save() if rank == 0 else t.evaluate(DATA), "rank 0 in save()", "in evaluate()")
    refused(lambda: t.save() if last else t.check_replicas(), "in save()", "in check_replicas()")
    refused(lambda: t.resume() if last else t.save(), "resume()", "in save()")
    assert t.save().is_dir() or rank  # nothing is left of it


def in_a_callback():
    class Alone(mpdp.Callback):
        where, options = "on_step", {}

        def on_step(self, t):
            if self.where == "on_step" and last and t.step_count == 2:
                t.save(**self.options)

        def on_epoch(self, t):
            if self.where == "on_epoch" and last:
                t.save(**self.options)

        def on_checkpoint(self, t, path):
            if self.where == "on_checkpoint" and last:
                self.where = ""
                t.save(**self.options)

    for where in ("on_step", "on_epoch", "on_checkpoint"):
        for wait in (True, False):
            alone = Alone()
            alone.where, alone.options = where, {"wait": wait}
            t = trainer(f"{where}-{wait}", save_every=2, callbacks=[alone])
            refused(
                lambda: t.fit(DATA, epochs=2, global_batch_size=4, progress=False),  # noqa: B023
                "save(): expected every rank to call it at the same step",
                f"rank {size - 1} in save()",
            )


def while_one_is_under_way():
    go = threading.Event()

    def save_file(arrays, path):
        assert go.wait(15)
        own_save_file(arrays, path)

    checkpoint.save_file = save_file
    t = trainer("under-way")
    step(t)
    path = t.save(wait=False)
    step(t, 2)
    refused(lambda: t.save() if last else step(t), f"rank {size - 1} in save() at step 3")
    refused(lambda: t.save(wait=False) if rank == 0 else t.predict(DATA), "rank 0 in save() at step 3")
    assert t.saves.under_way and not path.exists()
    go.set()
    step(t)  # nothing is left of it
    second = t.save()
    checkpoint.save_file = own_save_file
    world.comm.barrier()
    if rank == 0:
        assert [checkpoint.read(p).step for p in (path, second)] == [1, 4]


def again_and_again():
    """A callback that saves whenever it is told of a save ends with an error on all ranks; the next call works."""

    class Always(mpdp.Callback):
        told, wait = 0, True

        def on_checkpoint(self, t, path):
            self.told += 1
            assert self.told < 20, "an endless row of saves"
            t.save(wait=self.wait)

    for wait in (True, False):
        always = Always()
        always.wait = wait
        t = trainer(f"again-{wait}", save_every=2, async_save=not wait, callbacks=[always])
        try:
            t.fit(DATA, updates=30, global_batch_size=4, progress=False)
        except ValueError as error:
            assert error.agreed and "save: expected no call in on_checkpoint of a save" in str(error), error
        else:
            raise AssertionError(f"no error on rank {rank}")
        assert always.told == 2 and not t.saves.under_way
        step(t)


def of_another_run():
    """All ranks refuse a used folder for it, and the folder goes on with its own run."""
    path = trainer("other").save()
    own = trainer("used")
    step(own, 2)
    own.save()
    t = trainer("used")
    assert t.resume(path) and t.step_count == 0
    for call in (t.save, lambda: step(t)):
        try:
            call()
        except ValueError as error:
            assert "run_dir: expected a new or empty folder to go on in from" in str(error), error
            assert size == 1 or error.agreed
        else:
            raise AssertionError(f"no error on rank {rank}")
    assert t.resume() and t.step_count == 2
    step(t)


@contextlib.contextmanager
def full_disk(nbytes):
    """A limit on the size of files stands for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def on_a_full_disk():
    """What the writer of rank 0 meets all ranks raise after the same update, and the run goes on to the same bits."""
    t = trainer("full", keep=10)
    step(t, 2)
    good = t.save()
    with full_disk(700):
        t.save(wait=False)
        while True:
            try:
                step(t)
            except CheckpointError as error:
                assert error.agreed and "free or mend the disk" in str(error), error
                assert size == 1 or "(on rank 0 of" in str(error)
                break
    at = np.array([t.step_count, -t.step_count])
    world.comm.all_reduce(at, op="max")
    assert at[0] == -at[1], "ranks raise at the same step"
    step(t, 10)
    whole = trainer("whole")
    step(whole, t.step_count)
    assert t.parallel.weights.tobytes() == whole.parallel.weights.tobytes()
    if rank == 0:
        assert list(good.parent.iterdir()) == [good]
    assert t.save().parent == good.parent


def ends_on_a_save():
    t = trainer("ends")
    step(t, 3)
    t.save(wait=False)
    record(t.step_count)


def ends_on_a_save_that_fails():
    def save_file(arrays, path):
        raise OSError(28, "No space left on device")

    t = trainer("fails")
    step(t)
    checkpoint.save_file = save_file
    fault()
    t.save(wait=False)


def alone_at_the_end():
    t = trainer("alone")
    step(t)
    fault()
    if rank == 0:
        t.save()


together = [
    under_rank_0,
    in_a_callback,
    again_and_again,
    of_another_run,
    while_one_is_under_way,
    on_a_full_disk,
]
for case in together if CASE == "all" else [globals()[CASE]]:
    case()
    if CASE == "all":
        world.comm.barrier()
        if rank == 0:
            print(f"passed {case.__name__}", flush=True)
