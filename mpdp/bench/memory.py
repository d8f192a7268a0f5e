"""``mpdp bench memory``: what data and steps take of a host's memory.

Two figures. *Mapped*: rank 0 writes one ``.npy``, every rank reads all its rows through a loader, and the proportional
set sizes (PSS: each page's size divided by the processes that map it) are added up over ranks, less what they were
before: one copy of the file, or as many as ranks. *Steps*: the resident size of a rank over 400 updates of ``fit`` with
a log, a writer and the garbage collector off, and the tapes that are alive at the end.
"""

from __future__ import annotations

import gc
import json
import platform
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__, nn, optim
from ..autodiff import Tape
from ..comm.agreement import on_root, together
from ..comm.base import Communicator
from ..data import ArrayDataset, Loader
from ..errors import DeviceError
from ..nn import seed
from ..training import Callback, CsvWriter, Trainer
from ..world import World, init

ROW_BYTES = 4096
STEPS = 400
SETTLED = 100  # updates after which the size should not grow any more
QUICK_BYTES = 64 << 20
BYTES = 1 << 30


def run(*, quick: bool, nbytes: int | None, folder: str | None, json_path: str | None) -> int:
    """Measure; rank 0 prints two lines and writes the JSON object. **Collective.**"""
    world = init(device="cpu")
    size = nbytes or (QUICK_BYTES if quick else BYTES)
    result = {
        "system": f"mpdp-{__version__}",
        "ranks": world.size,
        **measure_mapped(world, size, folder),
        **measure_steps(world),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
    if world.rank == 0:
        out = sys.stderr if json_path == "-" else sys.stdout
        print(
            f"{world.size} ranks reading one mapped array of {size / 2**20:,.0f} MiB: "
            f"{result['mapped_bytes'] / 2**20:,.0f} MiB more in all, {result['mapped_ratio']:.2f} x its size",
            file=out,
        )
        print(
            f"{STEPS} updates with a log, garbage collector off: {result['steps_growth_bytes'] / 2**10:,.0f} KiB more "
            f"after update {SETTLED}, {result['live_tapes']} tapes alive",
            file=out,
            flush=True,
        )
        if json_path == "-":
            print(json.dumps(result), flush=True)
        elif json_path is not None:
            Path(json_path).write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 0


def measure_mapped(world: World, nbytes: int, folder: str | None) -> dict[str, Any]:
    """Return what all ranks together take to read one mapped array. **Collective.**"""
    comm = world.axis("data")
    made: list[tempfile.TemporaryDirectory[str]] = []

    def write() -> str:
        made.append(tempfile.TemporaryDirectory(dir=folder, prefix="mpdp-bench-"))
        path = str(Path(made[0].name, "array.npy"))
        array = np.lib.format.open_memmap(
            path, mode="w+", dtype=np.uint8, shape=(max(1, nbytes // ROW_BYTES), ROW_BYTES)
        )
        for start in range(0, len(array), 4096):
            array[start : start + 4096] = start % 251
        array.flush()
        return path

    path = on_root(comm, write)
    name = comm.broadcast_bytes(None if path is None else path.encode()).decode()
    try:
        before = _sum(comm, together(comm, proportional_bytes))
        mapped = ArrayDataset.from_npy(name)
        total = 0
        for parts in Loader(mapped, 1024, shuffle=True, dtype=None):
            total += sum(int(part.inputs[0][:, 0].sum()) for part in parts if part.inputs is not None)
        rows = len(mapped)
        expected = sum((start % 251) * min(4096, rows - start) for start in range(0, rows, 4096))
        if total != expected:
            raise AssertionError(f"read {total}, wrote {expected}")
        comm.barrier()  # all have all pages mapped
        after = _sum(comm, proportional_bytes())
        comm.barrier()  # nobody lets go before all have looked
    finally:
        for temporary in made:
            temporary.cleanup()
    taken = after - before
    return {
        "array_bytes": rows * ROW_BYTES,
        "mapped_bytes": taken,
        "mapped_ratio": taken / (rows * ROW_BYTES),
    }


class _Sizes(Callback):
    """Note the resident size when the run has settled and at its end."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def on_step(self, trainer: Trainer) -> None:
        if trainer.step_count in (SETTLED, STEPS):
            self.seen[trainer.step_count] = resident_bytes()


def measure_steps(world: World) -> dict[str, Any]:
    """Return how much a rank grows over updates without the garbage collector, the largest of all. **Collective.**"""
    comm = world.axis("data")
    seed(0)
    random = np.random.default_rng(0)
    x, y = random.standard_normal((4096, 64)).astype("float32"), random.integers(0, 10, 4096)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))
    sizes = _Sizes()
    folder = on_root(comm, lambda: tempfile.TemporaryDirectory(prefix="mpdp-bench-"))
    run_dir = comm.broadcast_bytes(None if folder is None else folder.name.encode()).decode()
    trainer = Trainer(
        model,
        nn.cross_entropy,
        optim.AdamW(lr=1e-3),
        world=world,
        run_dir=Path(run_dir, "run"),
        callbacks=[sizes, CsvWriter()],
    )
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        trainer.fit(ArrayDataset(x, y), updates=STEPS, global_batch_size=256, progress=False)
        tapes = live(Tape)
    finally:
        if enabled:
            gc.enable()
    comm.barrier()
    if folder is not None:
        folder.cleanup()
    worst = np.array([sizes.seen[STEPS] - sizes.seen[SETTLED], tapes], dtype=np.int64)
    comm.all_reduce(worst, op="max", lane="urgent")
    return {
        "steps": STEPS,
        "settled_after": SETTLED,
        "steps_growth_bytes": int(worst[0]),
        "live_tapes": int(worst[1]),
    }


def live(kind: type) -> int:
    """Return how many objects of a class are alive. **Local.**

    In one call, so that no other thread gets on: one that builds a tuple must be the only one to hold it.
    """
    return list(map(type, chain.from_iterable(map(gc.get_objects, (None,))))).count(kind)


def proportional_bytes() -> int:
    """Return this process's share of the memory that it uses: pages that several map count in part. **Local.**

    Raises:
        DeviceError: a system that does not say.
    """
    return _kilobytes("/proc/self/smaps_rollup", "Pss:") * 1024


def resident_bytes() -> int:
    """Return the resident size of this process. **Local.**"""
    return _kilobytes("/proc/self/status", "VmRSS:") * 1024


def _kilobytes(path: str, field: str) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith(field))
    except (OSError, StopIteration) as error:
        raise DeviceError(
            f"bench memory: expected a Linux with {field[:-1]} in {path}, got {error!r}; run it on one"
        ) from error


def _sum(comm: Communicator, value: int) -> int:
    total = np.array([value], dtype=np.int64)
    comm.all_reduce(total, lane="urgent")
    return int(total[0])
