"""``mpdp bench all-reduce``: the time of an all-reduce against its size, for every transport that runs here.

All cases of a size take turns in one run, so that what else the machine does hits them alike. A large buffer is written
right before each call, as backward writes gradients. The time of a call is from the moment the last rank starts to
the moment the last rank ends; small sizes are called many times in a row.

Bandwidths: ``algbw`` is bytes / seconds; ``busbw`` is algbw * 2 (n-1) / n; ``of copy`` is 2 n bytes of memory traffic
per byte of the buffer, over the speed at which all ranks together copy memory of that size.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from ..comm.agreement import on_root
from ..comm.base import Communicator
from ..comm.choose import choose, over_mpi
from ..comm.mpi import MpiCommunicator
from ..comm.tuned import processor
from ..parallel.arena import GradientArena
from ..parallel.layout import SPAN
from ..parallel.reducer import Reducer
from ..world import World, init
from . import CASES
from .plot import plot_all_reduce, plotting

SIZES = (*(8**i for i in range(1, 8)), 8 << 20, 64 << 20, 256 << 20)
QUICK_SIZES = (8, 4096, 1 << 20, 16 << 20)
ROUNDS, QUICK_ROUNDS = 15, 5
MANY = 64 << 10  # bytes; up to here one time is that of many calls
BLOCK_SECONDS = 0.01
REDUCER_BYTES = 1 << 20  # from here on also through the reducer
COPY_BYTES = 16 << 20  # from here on compared with a copy of memory


@dataclass
class _Case:
    """One way to reduce one size.

    Attributes:
        array: what is reduced.
        call: reduces it, on all ranks.
    """

    name: str
    array: np.ndarray
    call: Callable[[], object]
    reduces: bool = True


def run(
    *,
    device: str,
    sizes: Sequence[int] | None,
    dtypes: Sequence[str],
    transports: Sequence[str] | None,
    quick: bool,
    json_path: str | None,
    plot_path: str | None,
) -> int:
    """Measure and print a table; rank 0 writes the JSON object and the plot. **Collective.**"""
    if plot_path is not None:
        plotting()  # an error before time is spent
    world = init(device=device)
    for path in (json_path, plot_path):
        if path not in (None, "-"):
            on_root(world.comm, partial(_touch, str(path)))
    say = sys.stderr if json_path == "-" else sys.stdout
    rows: list[dict[str, Any]] = []
    chosen = tuple(sizes or (QUICK_SIZES if quick else SIZES))
    communicators = _communicators(world, transports)
    if world.rank == 0:
        print(_HEADER, file=say, flush=True)
    for dtype in dtypes:
        for nbytes in chosen:
            for row in _measure(world, communicators, nbytes, dtype, QUICK_ROUNDS if quick else ROUNDS):
                rows.append(row)
                if world.rank == 0:
                    print(_line(row), file=say, flush=True)
    if world.rank == 0:
        result = {
            "benchmark": "all-reduce",
            "device": str(world.device),
            "ranks": world.size,
            "processor": processor(),
            "rows": rows,
        }
        if json_path == "-":
            print(json.dumps(result), flush=True)
        elif json_path is not None:
            with open(json_path, "w", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        if plot_path is not None:
            plot_all_reduce(result, plot_path)
    return 0


def _touch(path: str) -> None:
    with open(path, "a", encoding="utf-8"):
        pass


def _communicators(world: World, transports: Sequence[str] | None) -> dict[str, Communicator]:
    """Return the communicator of each transport, all over the world's ranks. **Collective.**"""
    mpi = over_mpi(world.comm)
    if mpi is None:
        return {world.transport: world.comm}
    found: dict[str, Communicator] = {}
    for name in transports or CASES:
        if name in ("mpi", "mpi4py"):
            found[name] = mpi
        elif transports is not None:
            found[name] = choose(name, mpi, world.device, world.num_nodes, world.log)[0]
        elif world.transport == name:
            found[name] = world.comm.duplicate()
    return found


def _measure(
    world: World, communicators: dict[str, Communicator], nbytes: int, dtype_name: str, rounds: int
) -> list[dict[str, Any]]:
    """Return one row a case for a size. **Collective.**"""
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype_name == "bfloat16" else dtype_name)
    count = max(1, nbytes // dtype.itemsize)
    cases = _cases(communicators, count, dtype)
    clock = _Clock(world)
    content = _content(count, dtype, world.rank)
    calls = {case.name: 1 for case in cases}
    if count * dtype.itemsize <= MANY:
        for case in cases:
            case.array[...] = 0
            _calls(case, 10)
            calls[case.name] = max(1, int(BLOCK_SECONDS * 10 / clock.seconds(partial(_calls, case, 10))))
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    for turn in range(rounds + 1):
        for case in cases:
            number = calls[case.name]
            case.array[...] = content if number == 1 else 0
            seconds = clock.seconds(partial(_calls, case, number)) / number
            if turn:  # the first touches memory for the first time
                times[case.name].append(seconds)
    copy = times.pop("copy", None)
    rows = []
    for case in cases:
        if case.reduces:
            right = _is_right(case, content, count, dtype, world)
            rows.append(
                _row(case.name, count, dtype_name, dtype.itemsize, times[case.name], copy, right, world)
            )
    return rows


def _calls(case: _Case, number: int) -> None:
    for _ in range(number):
        case.call()


def _cases(communicators: dict[str, Communicator], count: int, dtype: np.dtype) -> list[_Case]:
    cases = []
    nbytes = count * dtype.itemsize
    for name, comm in communicators.items():
        array = comm.allocate(nbytes).array(dtype, count)
        if name == "mpi4py":
            if dtype.name not in ("float16", "bfloat16"):  # MPI has no portable sum of them
                assert isinstance(comm, MpiCommunicator)
                cases.append(_Case(name, array, partial(comm.plain_all_reduce, array)))
            continue
        lane = "urgent" if nbytes < SPAN else "bulk"
        cases.append(_Case(name, array, partial(comm.all_reduce, array, lane=lane)))
        if nbytes >= REDUCER_BYTES and count % SPAN == 0 and dtype.name in ("float16", "float32", "float64"):
            arena = GradientArena({"gradient": (count,)}, dtype, comm=comm)
            cases.append(_Case(f"{name}, reducer", arena.array, Reducer(arena).finish))
    if nbytes >= COPY_BYTES:
        source, target = np.zeros(count, dtype), np.zeros(count, dtype)
        cases.append(_Case("copy", source, partial(np.copyto, target, source), reduces=False))
    return cases


def _content(count: int, dtype: np.dtype, rank: int) -> np.ndarray:
    """Return small integers, whose sums are exact in every dtype."""
    return ((np.arange(count) + rank) % 5).astype(dtype)


def _is_right(case: _Case, content: np.ndarray, count: int, dtype: np.dtype, world: World) -> bool:
    """Return whether one call gives the right sum on every rank. **Collective.**"""
    case.array[...] = content
    case.call()
    total = np.zeros(count, dtype=dtype)
    for rank in range(world.size):
        total += _content(count, dtype, rank)
    wrong = np.array([not np.array_equal(case.array, total)], dtype=np.int64)
    world.comm.all_reduce(wrong, op="max", lane="urgent")
    return not wrong[0]


class _Clock:
    """Time calls that all ranks make together."""

    def __init__(self, world: World) -> None:
        self._comm = world.comm
        self._one_clock = world.num_nodes == 1  # of the kernel, the same for all processes

    def seconds(self, call: Callable[[], None]) -> float:
        """Return the seconds of ``call``, over all ranks. **Collective.**"""
        self._comm.barrier()
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        latest = np.array([start, end] if self._one_clock else [0.0, end - start])
        self._comm.all_reduce(latest, op="max", lane="urgent")
        return float(latest[1] - latest[0])


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
