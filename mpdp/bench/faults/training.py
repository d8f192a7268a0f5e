"""The training that is broken: a script for n ranks, told by its environment what one of them does and when.

It trains a small network with dropout, Adam and augmentation, saves every third update (every one where nothing is to
be broken), and goes on from the newest checkpoint of its folder. Undisturbed it always computes the same bits.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from typing import Any


def crash_in_c() -> None:
    """Read address 0."""
    ctypes.string_at(0)


def at_exit() -> None:
    """Do what is due when the program is over."""
    if MINE:
        FAULT.now()
        crash_in_c()


if json.loads(os.environ.get("MPDP_FAULT", "{}")).get("kind") == "crash_at_exit":
    # Behind the end of mpdp and of MPI: what is registered first runs last, so this stands before any import of mpdp.
    atexit.register(at_exit)

from mpdp.bench.faults.moment import Fault  # noqa: E402
from mpdp.launch import announced  # noqa: E402

FAULT: Fault = Fault.told()
UPDATES, SAVE_EVERY, BATCH = 24, 3, 8
PAUSE = 0.02  # seconds an update takes beside its arithmetic, so that a random moment may lie anywhere
_announcement = announced(os.environ)
MINE: bool = (0 if _announcement is None else _announcement.rank) == FAULT.rank


def stay_in_c() -> None:
    """Sleep in C with the interpreter's lock held: no thread of this rank runs."""
    ctypes.PyDLL(None).sleep(3600)


def run_out_of_memory() -> None:
    """Allow this process no more memory than it has, and ask for it piece by piece."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + (1 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    held = []
    while True:
        held.append(bytearray(1 << 16))


def spin() -> None:
    """Compute for ever."""
    while True:
        pass


ANYWHERE = {  # what may happen in any thread, at any place of the program
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": crash_in_c,
    "abort": os.abort,
    "os_exit_0": lambda: os._exit(0),
    "os_exit_3": lambda: os._exit(3),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stuck_in_c": stay_in_c,
}


def later(seconds: float, act: Any) -> None:
    """Do it after a while, whatever the program does then."""

    def wait() -> None:
        time.sleep(seconds)
        FAULT.now()
        act()

    threading.Thread(target=wait, daemon=True).start()


if MINE and FAULT.step == 0 and FAULT.kind in ANYWHERE:
    later(FAULT.delay, ANYWHERE[FAULT.kind])

import numpy as np  # noqa: E402

import mpdp  # noqa: E402
from mpdp import data, nn, optim  # noqa: E402
from mpdp.bench.faults.samples import SAMPLES, Samples, augment  # noqa: E402

if FAULT.kind == "crash_before_exit":  # before the end of mpdp: the others wait in theirs
    atexit.register(at_exit)


def fail(what: str) -> None:
    FAULT.now()
    raise ValueError(what)


def due(kind: str, step: int) -> bool:
    return MINE and kind == FAULT.kind and step >= FAULT.step


class Net(nn.Module):
    def __init__(self) -> None:
        if MINE and FAULT.kind == "constructor":
            fail("a bad width")
        self.inner = nn.Linear(12, 16)
        self.dropout = nn.Dropout(0.2)
        self.outer = nn.Linear(16, 3)

    def forward(self, x: Any) -> Any:
        if self.training and due("model", progress.step):
            fail("a bad model")
        return self.outer(self.dropout(self.inner(x)).relu())


def loss(output: Any, target: Any) -> Any:
    if due("loss", progress.step):
        fail("a bad loss")
    return nn.cross_entropy(output, target)


def transform(sample: Any, random: Any) -> Any:
    if due("transform", progress.step):
        fail("a bad transform")
    return augment(sample, random)


class Progress(mpdp.Callback):
    """Know where the training stands, take some time, and do what is due."""

    step = 1  # the update under way

    def on_step(self, trainer: Any) -> None:
        time.sleep(PAUSE)
        self.step = trainer.step_count + 1
        if MINE and self.step == FAULT.step:
            misbehave(trainer)

    def on_validation(self, trainer: Any, metrics: Any) -> None:
        if due("validation", self.step):
            fail("a bad validation")


progress = Progress()


def misbehave(trainer: Any) -> None:
    """Do what is due in the step that begins."""
    kind = FAULT.kind
    if kind in ANYWHERE:
        later(FAULT.delay, ANYWHERE[kind])
        return
    acts = {
        "callback": lambda: fail("a bad callback"),
        "thread": lambda: threading.Thread(target=fail, args=["a bad thread"], name="mine").start(),
        "memory": run_out_of_memory,
        "spin": spin,
        "exit_0": lambda: sys.exit(0),
        "exit_3": lambda: sys.exit(3),
        "extra_collective": lambda: trainer.world.comm.all_reduce(np.zeros(3)),
        "save_alone": trainer.save,
        "flipped_bit": lambda: flip(trainer),
        "device_memory": fill_the_device,
        "device_fault": fault_on_the_device,
    }
    if kind in acts and not (kind.startswith("exit") and FAULT.loop == "own"):
        FAULT.now()
        acts[kind]()


def fill_the_device() -> None:
    """Ask the GPU for more memory than it has."""
    import cupy

    cupy.empty(1 << 50, dtype=np.uint8)


def fault_on_the_device() -> None:
    """Let a kernel write to an address that is nobody's, and wait for it."""
    import cupy

    code = 'extern "C" __global__ void bad(unsigned long long at) { *(int *)at = 1; }'
    cupy.RawKernel(code, "bad")((1,), (1,), (np.uint64(1 << 60),))
    cupy.cuda.Device().synchronize()


def flip(trainer: Any) -> None:
    """Flip the lowest bit of one weight, as a bad memory cell does."""
    trainer.parallel.weights.view(np.uint32)[0] ^= 1


def dataset() -> Any:
    """Return the training data, which on one rank may be broken."""
    share = BATCH // (1 if _announcement is None else _announcement.size)
    at = share * (FAULT.step - 1)
    if FAULT.kind.startswith("worker"):
        samples = Samples(FAULT if MINE else None, share // 2 * (FAULT.step - 1))
        return data.Workers(data.Transform(samples, augment, random=True), 2)
    broken = MINE and FAULT.kind in ("dataset", "read", "nan")
    return data.Transform(Samples(FAULT if broken else None, at), transform, random=True)


def own_loop(trainer: Any) -> None:
    """Train as a program does that has a loop of its own."""
    world, samples = trainer.world, Samples()
    for step in range(trainer.step_count + 1, UPDATES + 1):
        if MINE and step == FAULT.step and FAULT.kind in ("return", "exit_0", "exit_3", "skipped_batch"):
            FAULT.now()
            if FAULT.kind == "return":
                return
            if FAULT.kind != "skipped_batch":
                sys.exit(int(FAULT.kind[-1]))
            continue
        first, last = (BATCH * part // world.size for part in (world.rank, world.rank + 1))
        rows = (np.arange(first, last) + BATCH * (step - 1)) % SAMPLES
        trainer.step((samples.x[rows], samples.y[rows]))
    if trainer.position.saved_step != trainer.step_count:
        trainer.save()


def main() -> None:
    if MINE and FAULT.kind == "before_init":
        fail("a bad setting")
    world = mpdp.init(device=FAULT.device, timeout=FAULT.timeout)
    trainer = mpdp.Trainer(
        Net(),
        loss,
        optim.Adam(lr=0.01),
        world=world,
        run_dir=os.path.join(FAULT.folder, "run"),
        # Where nothing is to be broken every update: a signal may have the broken run saved at any of them.
        save_every=1 if FAULT.kind == "none" else SAVE_EVERY,
        keep=1000 if FAULT.kind == "none" else 3,
        callbacks=[progress],
    )
    trainer.resume()
    progress.step = trainer.step_count + 1
    if MINE and FAULT.step == progress.step == 1:
        misbehave(trainer)
    if FAULT.loop == "own":
        own_loop(trainer)
    else:
        trainer.fit(dataset(), updates=UPDATES, global_batch_size=BATCH, validation=Samples(), progress=False)


if __name__ == "__main__":
    main()
