"""``mpdp bench all-reduce --tune``: measure the sizes that a transport is cut by, and keep them for this hardware.

Up to which size a message takes one phase: by reducing each size both ways, on a GPU in a captured graph. How large a
piece is of what is copied or given to MPI, and how large a chunk of a gradient buffer: by trying some. All ways take
turns in one run, a time is the largest over ranks, and the built-in size stays unless another is faster by a
twentieth. Only speed depends on these sizes where sums are in the order of ranks; see ``docs/reproducibility.md``.
What is done with the result: ``comm.tuned``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..comm import tuned
from ..comm.agreement import on_root
from ..comm.base import Communicator
from ..comm.choose import over_mpi
from ..comm.choose_gpu import host_of
from ..comm.cuda_ipc import SMALL_BYTES, CudaIpcCommunicator
from ..comm.lane import PIECE_BYTES, small_bytes
from ..comm.mpi import PIECE_BYTES as MPI_PIECE_BYTES
from ..comm.mpi import MpiCommunicator
from ..comm.shared_memory import SharedMemoryCommunicator
from ..device import CPU, Device
from ..parallel.arena import GradientArena
from ..parallel.reducer import Reducer
from ..world import World, init
from .reductions import GRAPH_CALLS, GpuMemory

TRANSPORTS = {"cpu": ("shared_memory", "mpi"), "cuda": ("cuda_ipc",)}
MARGIN = 0.95  # of the built-in size's time: another one must be below
SMALL = tuple(1 << k for k in range(10, 19))  # bytes; sizes that are reduced in one phase and in two
GPU_SMALL = tuple(1 << k for k in range(15, 19))  # below, sums go in lines
PIECES = (64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20)
MPI_PIECES = (256 << 10, 1 << 20, 4 << 20, 16 << 20)
CHUNKS = (1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20)
BUFFER_BYTES, QUICK_BUFFER_BYTES = 64 << 20, 4 << 20
WRITE_BYTES = 256 << 10  # a backward pass writes a buffer in parts of this size
ROUNDS, QUICK_ROUNDS = 9, 3

Times = dict[int, float]


def run(*, device: str, transports: Sequence[str] | None, quick: bool, json_path: str | None) -> int:
    """Measure, print and keep the sizes of some transports; rank 0 writes the JSON object. **Collective.**

    Args:
        device: of the ranks.
        transports: some of ``TRANSPORTS`` of the device (default: those that work here).
        quick: smaller buffers and fewer rounds.
        json_path: file of the JSON object; ``-`` is stdout.
    """
    world = init(device=device)
    mpi = over_mpi(host_of(world.comm))
    if mpi is None:
        sys.stderr.write(
            "mpdp bench: error: --tune: expected 2 ranks or more, got 1; start it with mpirun -n N\n"
        )
        return 2
    known = TRANSPORTS[world.device.kind]
    names = transports or [name for name in known if name in ("mpi", world.transport)]
    if not names or not set(names) <= set(known):
        if world.rank == 0:
            got = ", ".join(names) or f"ranks over {world.transport}"
            kind = world.device.kind
            sys.stderr.write(
                f"mpdp bench: error: --tune: expected some of {', '.join(known)} on {kind}, got {got}\n"
            )
        return 2
    on_root(world.comm, tuned.check_folder)  # an error before time is spent
    if json_path not in (None, "-"):
        on_root(world.comm, lambda: open(str(json_path), "a", encoding="utf-8").close())
    say = sys.stderr if json_path == "-" else sys.stdout
    machine = tuned.hardware(mpi, world.device, world.num_nodes, world.ranks_per_device)
    rows = {}
    for name in names:
        measured = _MEASURES[name](world, mpi, quick)
        sizes = {size: int(row["chosen"]) for size, row in measured.items()}
        path = on_root(world.comm, partial(tuned.write, name, machine, sizes))
        rows[name] = {"path": str(path), "sizes": sizes, "measured": measured}
        if world.rank == 0:
            for size, row in measured.items():
                print(_line(name, size, row), file=say, flush=True)
            print(f"{name}: kept in {path}, for the next start on this hardware", file=say, flush=True)
    mpi.close()
    if world.rank == 0 and json_path is not None:
        text = json.dumps({"benchmark": "all-reduce --tune", "hardware": machine, "tuned": rows})
        if json_path == "-":
            print(text, flush=True)
        else:
            Path(json_path).write_text(text + "\n", encoding="utf-8")
    return 0


def _line(transport: str, size: str, row: dict[str, Any]) -> str:
    chosen, default = row["chosen"], row["default"]
    kept = "as built in" if chosen == default else f"instead of {default}"
    return f"{transport:<14} {size:<12} {chosen:>9} {kept}"


# -- decisions: the same on every rank, since all have the same times


def best(times: Mapping[int, float], default: int) -> int:
    """Return the size with the least time, or the default where none is faster by a twentieth. **Local.**

    Example:
        >>> best({1024: 0.97, 2048: 1.0, 4096: 1.2}, 2048), best({1024: 0.5, 2048: 1.0}, 2048)
        (2048, 1024)
    """
    fastest = min(times, key=lambda size: times[size])
    return fastest if times[fastest] < MARGIN * times[default] else default


def crossover(one: Mapping[int, float], two: Mapping[int, float]) -> int:
    """Return the largest size up to which one phase is not slower than two; 64 where it never is. **Local.**

    A loss of a twentieth is taken for noise.

    Example:
        >>> crossover({64: 1.0, 128: 2.0, 256: 5.0}, {64: 2.0, 128: 2.0, 256: 3.0})
        128
    """
    found = 64
    for size in sorted(one):
        if MARGIN * one[size] > two[size]:
            break
        found = size
    return found


# -- measurements


class _Turns:
    """Times of several ways to do the same, that take turns."""

    def __init__(self, comm: Communicator, rounds: int) -> None:
        self._comm, self._rounds = comm, rounds

    def times(self, calls: Mapping[int, Callable[[], object]], many: int = 1) -> Times:
        """Return the median seconds of each call, the largest over ranks in each round. **Collective.**"""
        seconds = np.zeros((self._rounds + 1, len(calls)))
        for turn in seconds:
            for i, call in enumerate(calls.values()):
                self._comm.barrier()
                start = time.perf_counter()
                for _ in range(many):
                    call()
                turn[i] = (time.perf_counter() - start) / many
        flat = seconds.reshape(-1)
        self._comm.all_reduce(flat, op="max", lane="urgent")
        # The first round touches memory for the first time.
        return {size: statistics.median(column) for size, column in zip(calls, seconds[1:].T.tolist())}


def _shared_memory(world: World, mpi: MpiCommunicator, quick: bool) -> dict[str, dict[str, Any]]:
    turns = _Turns(world.comm, QUICK_ROUNDS if quick else ROUNDS)
    nbytes = QUICK_BUFFER_BYTES if quick else BUFFER_BYTES

    def make(**sizes: Any) -> SharedMemoryCommunicator:
        return SharedMemoryCommunicator(mpi.duplicate(), log=world.log, **sizes)

    one, two = make(small_bytes=SMALL[-1]), make(small_bytes=64)
    arrays = {size: (_array(one, size), _array(two, size)) for size in SMALL}
    phases: tuple[Times, Times] = {}, {}
    for size in SMALL:
        calls = {i: partial(comm.all_reduce, arrays[size][i]) for i, comm in enumerate((one, two))}
        times = turns.times(calls, many=20)
        for i in calls:
            phases[i][size] = times[i]
    small = crossover(*phases)
    for comm in (one, two):
        comm.close()

    by_piece = {size: make(small_bytes=small, piece_bytes=size) for size in PIECES}
    private = np.zeros(nbytes // 4, np.float32)
    piece = turns.times({size: partial(comm.all_reduce, private) for size, comm in by_piece.items()})
    for comm in by_piece.values():
        comm.close()

    comm = make(small_bytes=small, piece_bytes=best(piece, PIECE_BYTES))
    chunk = turns.times(_backward(comm, nbytes))
    comm.close()
    return {
        "small_bytes": {
            "chosen": small,
            "default": small_bytes(world.size),
            "one_phase_us": _microseconds(phases[0]),
            "two_phases_us": _microseconds(phases[1]),
        },
        "piece_bytes": _row(piece, PIECE_BYTES),
        "chunk_bytes": _row(chunk, SharedMemoryCommunicator.chunk_bytes),
    }


def _mpi(world: World, mpi: MpiCommunicator, quick: bool) -> dict[str, dict[str, Any]]:
    turns = _Turns(world.comm, QUICK_ROUNDS if quick else ROUNDS)
    nbytes = QUICK_BUFFER_BYTES if quick else BUFFER_BYTES
    comm = mpi.duplicate()
    array = _array(comm, nbytes)

    def in_pieces(size: int) -> None:
        comm.use_sizes(piece_bytes=size)
        comm.all_reduce(array)

    piece = turns.times({size: partial(in_pieces, size) for size in MPI_PIECES})
    comm.use_sizes(piece_bytes=best(piece, MPI_PIECE_BYTES))
    chunk = turns.times(_backward(comm, nbytes))
    comm.close()
    return {
        "piece_bytes": _row(piece, MPI_PIECE_BYTES),
        "chunk_bytes": _row(chunk, MpiCommunicator.chunk_bytes),
    }


def _cuda_ipc(world: World, mpi: MpiCommunicator, quick: bool) -> dict[str, dict[str, Any]]:
    turns = _Turns(world.comm, QUICK_ROUNDS if quick else ROUNDS)
    on = GpuMemory(world.device)

    def make(**sizes: Any) -> CudaIpcCommunicator:
        return CudaIpcCommunicator(mpi.duplicate(), world.device, **sizes)

    def replayed(comm: Communicator, array: Any) -> Callable[[], None]:
        launch = on.captured(partial(comm.all_reduce, array), GRAPH_CALLS)

        def replay() -> None:
            launch()
            on.finish()

        return replay

    ways = make(small_bytes=GPU_SMALL[-1]), make(small_bytes=64)
    phases: tuple[Times, Times] = {}, {}
    for size in GPU_SMALL:
        calls = {i: replayed(comm, _array(comm, size, world.device)) for i, comm in enumerate(ways)}
        for i, seconds in turns.times(calls).items():
            phases[i][size] = seconds / GRAPH_CALLS
    small = crossover(*phases)
    for comm in ways:
        comm.close()
    comm = make(small_bytes=small)
    nbytes = QUICK_BUFFER_BYTES if quick else BUFFER_BYTES
    chunk = turns.times(_backward(comm, nbytes, world.device, on.finish))
    comm.close()
    return {
        "small_bytes": {
            "chosen": small,
            "default": SMALL_BYTES,
            "one_phase_us": _microseconds(phases[0]),
            "two_phases_us": _microseconds(phases[1]),
        },
        "chunk_bytes": _row(chunk, CudaIpcCommunicator.chunk_bytes),
    }


_MEASURES = {"shared_memory": _shared_memory, "mpi": _mpi, "cuda_ipc": _cuda_ipc}


def _array(comm: Communicator, nbytes: int, device: Device = CPU) -> Any:
    return comm.allocate(nbytes, device).array(np.float32, nbytes // 4)


def _backward(
    comm: Communicator, nbytes: int, device: Device = CPU, finish: Callable[[], object] = lambda: None
) -> dict[int, Callable[[], None]]:
    """Return, for each size of a chunk, what writes a gradient buffer from its front and reduces what is final."""
    arena = GradientArena({"gradient": (nbytes // 4,)}, np.float32, device, comm)
    return {
        size: partial(_write_and_reduce, arena, Reducer(arena, chunk_bytes=size), finish) for size in CHUNKS
    }


def _write_and_reduce(arena: GradientArena, reducer: Reducer, finish: Callable[[], object]) -> None:
    step = WRITE_BYTES // arena.dtype.itemsize
    stops = [stop for _, stop in reducer.chunks]
    done = 0
    for start in range(0, len(arena.array), step):
        arena.array[start : start + step] = 0
        while done < len(stops) and stops[done] <= start + step:
            done += 1
        reducer.flush(done)
    reducer.wait()
    finish()


def _row(times: Times, default: int) -> dict[str, Any]:
    return {"chosen": best(times, default), "default": default, "us": _microseconds(times)}


def _microseconds(times: Times) -> dict[str, float]:
    return {str(size): seconds * 1e6 for size, seconds in times.items()}
