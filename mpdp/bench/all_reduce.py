"""``mpdp bench all-reduce``: the time of an all-reduce against its size, for every transport that runs here.

All ways of a size take turns in one run, so that what else the machine does hits them alike. A large buffer is written
right before each call, as backward writes gradients. The time of a call is from the moment the last rank starts to
the moment the last rank ends, on a GPU when it has done the work; small sizes are called many times in a row.
Before it is timed each way is called some 20 times, as it has been in any training; with a large buffer once or twice.
``(graph)`` is a transport replayed from a captured CUDA graph: what the host costs is then left out.

Bandwidths: ``algbw`` is bytes / seconds; ``busbw`` is algbw * 2 (n-1) / n; ``of copy`` is 2 n bytes of memory traffic
per byte of the buffer, over the speed at which all ranks together copy memory of that size.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from .. import __version__, guard
from ..comm.agreement import on_root, together
from ..comm.base import Communicator
from ..comm.choose import choose, over_mpi
from ..comm.choose_gpu import host_of
from ..comm.tuned import processor
from ..device_memory import devices
from ..errors import CommunicationError, MpdpError, on_all_ranks
from ..world import World, init
from . import cases_of
from .plot import plot_all_reduce, plotting
from .reductions import MANY, GpuMemory, HostMemory, Way, as_dtype, ways
from .torch_peer import TorchPeer, TorchWay, find_torch

SIZES = (*(8**i for i in range(1, 8)), 8 << 20, 64 << 20, 256 << 20)
QUICK_SIZES = (8, 4096, 1 << 20, 16 << 20)
ROUNDS, QUICK_ROUNDS = 15, 5
BLOCK_SECONDS = 0.01
# Before a size is timed, at most: Python makes code faster that has run some times.
WARM_CALLS, WARM_BYTES = 20, 20 << 20


def run(
    *,
    device: str,
    sizes: Sequence[int] | None,
    dtypes: Sequence[str],
    transports: Sequence[str] | None,
    quick: bool,
    json_path: str | None,
    plot_path: str | None,
    torch_python: str | None = None,
) -> int:
    """Measure and print a table; rank 0 writes the JSON object and the plot. **Collective.**

    Returns:
        the exit status: 1 when a sum was wrong.
    """
    if plot_path is not None:
        plotting()  # an error before time is spent
    world = init(device=device)
    for path in (json_path, plot_path):
        if path not in (None, "-"):
            on_root(world.comm, partial(_touch, str(path)))
    say = sys.stderr if json_path == "-" else sys.stdout
    rows: list[dict[str, Any]] = []
    chosen = tuple(sizes or (QUICK_SIZES if quick else SIZES))
    bench = _Bench(world, transports, torch_python, QUICK_ROUNDS if quick else ROUNDS)
    if world.rank == 0:
        print(_HEADER, file=say, flush=True)
    for dtype in dtypes:
        for nbytes in chosen:
            for row in bench.measure(nbytes, dtype):
                rows.append(row)
                if world.rank == 0:
                    print(_line(row), file=say, flush=True)
    bench.close()
    if world.rank == 0:
        result = {
            "benchmark": "all-reduce",
            "system": f"mpdp-{__version__}",
            "device": str(world.device),
            "ranks": world.size,
            "ranks_per_gpu": world.ranks_per_device,
            "processor": _processor(world),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": bench.peer.version if bench.peer else None,
            "rows": rows,
        }
        if json_path == "-":
            print(json.dumps(result), flush=True)
        elif json_path is not None:
            with open(json_path, "w", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        if plot_path is not None:
            plot_all_reduce(result, plot_path)
    return 0 if all(row["right"] for row in rows) else 1


def _touch(path: str) -> None:
    with open(path, "a", encoding="utf-8"):
        pass


def _processor(world: World) -> str:
    if world.device.kind == "cpu":
        return processor()
    return next(gpu.name for gpu in devices() if gpu.device == world.device)


class _Bench:
    """What runs here, and how it is timed. **Collective.**"""

    def __init__(
        self, world: World, transports: Sequence[str] | None, torch_python: str | None, rounds: int
    ) -> None:
        self._world, self._rounds = world, rounds
        self._one_clock = world.num_nodes == 1  # of the kernel, the same for all processes
        self._made: list[Communicator] = []
        self.peer: TorchPeer | None = None
        self._on = HostMemory() if world.device.kind == "cpu" else GpuMemory(world.device)
        self._communicators = self._find(transports)
        asked_for = torch_python is not None or "torch" in (transports or ())
        if world.size > 1 and (asked_for or transports is None):
            self.peer = self._start_torch(torch_python, asked_for)

    def _find(self, transports: Sequence[str] | None) -> dict[str, Communicator]:
        """Return the communicator of each transport, all over the world's ranks."""
        world = self._world
        mpi = over_mpi(host_of(world.comm))
        if mpi is None:
            return {world.transport: world.comm}
        self._made.append(mpi)
        found: dict[str, Communicator] = {}
        for name in transports or cases_of(world.device.kind):
            if name == "torch":
                continue
            if name == "mpi4py" or (name == "mpi" and world.device.kind == "cpu"):
                found[name] = mpi
                continue
            try:
                found[name], _ = choose(
                    name,
                    mpi.duplicate(),
                    world.device,
                    world.node,
                    world.num_nodes,
                    world.log,
                    world.ranks_per_device,
                )
            except MpdpError as error:
                if transports is not None or not error.agreed:
                    raise
                world.log("info", f"not measured: {name}, {error}")
            else:
                self._made.append(found[name])
                guard.current.at_end(found[name].release)
        return found

    def _start_torch(self, python: str | None, asked_for: bool) -> TorchPeer | None:
        world = self._world
        if world.ranks_per_device > 1:
            if asked_for:
                raise on_all_ranks(
                    CommunicationError(
                        "torch: expected a GPU of its own for each rank, as NCCL needs it, got "
                        f"{world.ranks_per_device} ranks on one; leave torch out of --transports"
                    )
                )
            return None
        python = find_torch(world, python, asked_for)
        return None if python is None else TorchPeer(world, python)

    def measure(self, nbytes: int, dtype_name: str) -> list[dict[str, Any]]:
        """Return one row a way for a size. **Collective.**"""
        dtype = as_dtype(dtype_name)
        count = max(1, nbytes // dtype.itemsize)
        found = ways(self._communicators, self._world.device, self._on, count, dtype)
        if self.peer is not None and self._torch_can(self.peer, count, dtype_name):
            found.append(TorchWay(self.peer))
        many = count * dtype.itemsize <= MANY
        calls = {way.name: self._calls(way) if many else 1 for way in found}
        times: dict[str, list[float]] = {way.name: [] for way in found}
        for way in found:
            way.fill(zeros=True)
            way.run(min(WARM_CALLS, WARM_BYTES // (count * dtype.itemsize)))
        for turn in range(self._rounds + 1):
            for way in found:
                number = calls[way.name]
                way.fill(zeros=many or way.at_once > 1)
                seconds = self._seconds(way, number) / (number * way.at_once)
                if turn:  # the first touches memory for the first time
                    times[way.name].append(seconds)
        copy = times.pop("copy", None)
        rows = []
        for way in found:
            if way.reduces:
                right = self._is_right(way)
                rows.append(
                    _row(
                        way.name, count, dtype_name, dtype.itemsize, times[way.name], copy, right, self._world
                    )
                )
        return rows

    def _torch_can(self, peer: TorchPeer, count: int, dtype: str) -> bool:
        try:
            together(self._world.comm, lambda: peer.ask("prepare", count=count, dtype=dtype))
        except MpdpError as error:
            if not error.agreed:
                raise
            self._world.log("info", f"not measured: torch with {dtype}, {error}")
            return False
        return True

    def _calls(self, way: Way) -> int:
        """Return how many calls of a small size are timed at once."""
        way.fill(zeros=True)
        way.run(2)
        once = self._seconds(way, 1)
        if once < BLOCK_SECONDS:
            once = self._seconds(way, 10) / 10
        return max(1, int(BLOCK_SECONDS / once))

    def _seconds(self, way: Way, number: int) -> float:
        """Return the seconds of so many calls, over all ranks."""
        comm = self._world.comm
        comm.barrier()
        start, end = way.run(number)
        latest = np.array([start, end] if self._one_clock else [0.0, end - start])
        comm.all_reduce(latest, op="max", lane="urgent")
        return float(latest[1] - latest[0])

    def _is_right(self, way: Way) -> bool:
        """Return whether one call gives the right sum on every rank."""
        wrong = np.array([not way.is_right()], dtype=np.int64)
        self._world.comm.all_reduce(wrong, op="max", lane="urgent")
        return not wrong[0]

    def close(self) -> None:
        """End what was made. **Collective.**"""
        if self.peer is not None:
            self.peer.close()
        for comm in reversed(self._made):
            comm.close()


def _row(
    name: str,
    count: int,
    dtype: str,
    itemsize: int,
    times: list[float],
    copy: list[float] | None,
    right: bool,
    world: World,
) -> dict[str, Any]:
    nbytes = count * itemsize
    seconds = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4)
    algbw = nbytes / seconds / 1e9
    return {
        "case": name,
        "bytes": nbytes,
        "dtype": dtype,
        "us": seconds * 1e6,
        "quartiles_us": [low * 1e6, high * 1e6],
        "fastest_us": min(times) * 1e6,
        "algbw": algbw,
        "busbw": algbw * 2 * (world.size - 1) / world.size,
        # Both move n buffers: a copy reads and writes each once, an all-reduce too.
        "of_copy": None if copy is None else statistics.median(copy) / seconds,
        "right": right,
    }


_HEADER = (
    f"{'bytes':>11}  {'dtype':<9} {'case':<24} {'median us':>11} {'quartiles':>19} "
    f"{'algbw':>7} {'busbw':>7}  of copy  result"
)


def _line(row: dict[str, Any]) -> str:
    low, high = row["quartiles_us"]
    of_copy = "" if row["of_copy"] is None else f"{row['of_copy']:.0%}"
    return (
        f"{row['bytes']:>11}  {row['dtype']:<9} {row['case']:<24} {row['us']:>11.1f} "
        f"{f'{low:.1f}..{high:.1f}':>19} {row['algbw']:>7.2f} {row['busbw']:>7.2f}  {of_copy:>7}  "
        f"{'right' if row['right'] else 'WRONG'}"
    )
