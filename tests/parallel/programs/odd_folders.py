"""Run folders that are odd or broken: `odd_folders.py FOLDER`; records what each rank was told of each."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
from launching import record

import mpdp
from mpdp import data, nn, optim
from mpdp.training import run_folder

FOLDER = Path(sys.argv[1])
run_folder._FLUSH_SECONDS = 60.0  # the log is written by saves alone, on a slow machine too
world = mpdp.init(device="cpu", timeout=20)
random = np.random.default_rng(0)
x = random.standard_normal((32, 4)).astype("float32")
dataset = data.ArrayDataset(x, (x[:, 0] > 0).astype("int64"))


def run(run_dir, updates=4, resume=False, **options):
    """Train a little, or return what was raised and after how many updates."""
    mpdp.seed(0)
    trainer = mpdp.Trainer(
        nn.Linear(4, 2), nn.cross_entropy, optim.Adam(lr=0.1), run_dir=run_dir, save_every=2, **options
    )
    try:
        if resume and not trainer.resume():
            return "nothing to resume"
        trainer.fit(dataset, updates=updates, global_batch_size=8, progress=False)
    except Exception as error:
        assert world.size == 1 or error.agreed, repr(error)
        return [type(error).__name__, str(error), trainer.step_count]
    return trainer.model.weight.data.tobytes().hex()


def on_rank_0(call):
    if world.rank == 0:
        call()
    world.comm.barrier()


def names():
    """Paths that are unusual, and fine."""
    yield "a b  c"
    yield "quotes ' \" ` $(echo no) %s {0} \\ ; & | * ? [x]"
    yield "line\nbreak\ttab"
    yield "ünïcode-日本語-😀-e\u0301"
    yield "-n"
    yield ".hidden"
    yield os.fsdecode(b"bytes-\xff\xfe\xe9")  # no text in any encoding
    yield "x" * 255
    yield "/".join(["deep" * 10] * 40)  # some 1600 bytes


answers = {}
for name in names():
    whole = run(FOLDER / name, 6)
    shutil_copy = FOLDER / name / "again"
    first = run(shutil_copy, 4)
    answers[ascii(name)] = [run(shutil_copy, 6, resume=True) == whole, first != whole]

file = FOLDER / "file"
on_rank_0(lambda: file.write_text("not a folder"))
bad = FOLDER / "bad"


def damage():
    bad.mkdir()
    (bad / "checkpoints").write_text("not a folder either")
    (FOLDER / "log" / "log.jsonl").mkdir(parents=True)
    (FOLDER / "loop").symlink_to(FOLDER / "loop")


on_rank_0(damage)
refused = {
    "a file": run(file),
    "below a file": run(file / "run"),
    "checkpoints are a file": run(bad),
    "the log is a folder": run(FOLDER / "log"),
    "too long a name": run(FOLDER / ("x" * 256)),
    "too long a path": run(FOLDER / "/".join(["y" * 200] * 30)),
    "a loop of links": run(FOLDER / "loop" / "run"),
    "/proc": run("/proc/run"),
}


class Remove(mpdp.Callback):
    def on_step(self, trainer):
        if trainer.step_count == 3:
            on_rank_0(lambda: shutil.rmtree(trainer.run_dir))


vanished = run(FOLDER / "vanishing", 6, callbacks=[Remove()])
record([answers, refused, vanished])
