"""Host buffers over MPI, in place and in pieces.

Both MPI wheels slow down by a factor of two above 32 MiB a call (they map a scratch buffer afresh for each),
and Open MPI refuses counts above 2^31-1, so a message travels in pieces of at most ``piece_bytes``.
MPI's names stay in this file. Device pointers are refused: no MPI on PyPI is CUDA-aware, and a
pointer handed to one that is not is a segmentation fault.

Where ranks fill a node's cores, collectives block the calling thread: neither MPI makes progress on
``Iallreduce`` while Python computes, and a second thread would take the core from the first. Where the host is
free (GPU ranks), ``progress="thread"`` carries the bulk lane in a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..device import CPU, device_of
from ..errors import CommunicationError
from .activity import Activity
from .base import LANES, Communicator, Request
from .progress import ProgressThread

PIECE_BYTES = 4 << 20  # flat between 256 KiB and 16 MiB on MPICH and Open MPI, half the speed above 32 MiB
_WIDENED = (
    "float16",
    "bfloat16",
)  # no portable MPI reduction; one MPI sums bfloat16 wrongly without an error


class MpiCommunicator(Communicator):
    """Carry host arrays over MPI.

    **Collective.** Duplicates ``mpi_comm`` once a lane, so that a user's own messages never match.

    Args:
        mpi_comm: an mpi4py intracommunicator.
        activity: what the liveness ring watches.
        piece_bytes: largest message of one MPI call, in bytes.
        progress: ``"caller"`` (blocking calls in the calling thread) or ``"thread"``.
        device_pointers: hand GPU arrays to MPI, on the user's word that it is CUDA-aware.
        chunk_bytes: see :class:`Communicator`.
    """

    transport = "mpi"
    chunk_bytes = PIECE_BYTES  # one call of MPI a chunk
    chunk_edge = 4

    def __init__(
        self,
        mpi_comm: Any,
        activity: Activity | None = None,
        *,
        piece_bytes: int = PIECE_BYTES,
        progress: str = "caller",
        device_pointers: bool = False,
        chunk_bytes: int | None = None,
    ) -> None:
        if progress not in ("caller", "thread"):
            raise ValueError(f'progress: expected "caller" or "thread", got {progress!r}')
        if piece_bytes < 8:
            raise ValueError(f"piece_bytes: expected 8 or more, got {piece_bytes}")
        super().__init__(mpi_comm.Get_rank(), mpi_comm.Get_size(), activity)
        from mpi4py import MPI

        self._mpi = MPI
        self._ops = {"sum": MPI.SUM, "max": MPI.MAX}
        self._lanes = {lane: mpi_comm.Dup() for lane in LANES}
        self._owners = {lane: threading.get_ident() for lane in LANES}
        self._windows: list[Any] = []
        self.piece_bytes = piece_bytes
        self.chunk_bytes = chunk_bytes if chunk_bytes is not None else self.chunk_bytes
        self.progress = progress
        self.device_pointers = device_pointers
        if device_pointers:
            self.transport = "mpi_device"
        self._thread: ProgressThread | None = None
        if progress == "thread" and self.size > 1:
            if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
                raise CommunicationError(
                    'progress: expected an MPI with MPI_THREAD_MULTIPLE for "thread", '
                    f'got thread level {MPI.Query_thread()}; use progress="caller"'
                )
            self._thread = ProgressThread("mpdp bulk lane")
            self._owners["bulk"] = self._thread.ident

    def duplicate(self) -> MpiCommunicator:
        return MpiCommunicator(
            self._lanes["urgent"],
            self.activity,
            piece_bytes=self.piece_bytes,
            progress=self.progress,
            device_pointers=self.device_pointers,
            chunk_bytes=self.chunk_bytes,
        )

    @property
    def vendor(self) -> str:
        """Name and version of the MPI, such as ``"MPICH 4.3.0"``."""
        name, version = self._mpi.get_vendor()
        return f"{name} {'.'.join(map(str, version))}"

    def use_sizes(self, piece_bytes: int | None = None, chunk_bytes: int | None = None) -> None:
        """Use other sizes from now on, also in duplicates. **Collective** in effect: the same on all ranks."""
        self.piece_bytes = piece_bytes if piece_bytes is not None else self.piece_bytes
        self.chunk_bytes = chunk_bytes if chunk_bytes is not None else self.chunk_bytes

    def split(self, color: int | None = None) -> MpiCommunicator:
        """Return a communicator over the ranks that give the same color, in the order of ranks.

        **Collective.**

        Args:
            color: None on all ranks: those that can share memory, so the ranks of one host.
        """
        if color is None:
            part = self._lanes["urgent"].Split_type(self._mpi.COMM_TYPE_SHARED, key=self.rank)
        else:
            part = self._lanes["urgent"].Split(color, self.rank)
        try:
            return MpiCommunicator(part, self.activity, piece_bytes=self.piece_bytes)
        finally:
            part.Free()

    def start_all_reduce(self, array: Any, *, op: str = "sum", lane: str = "bulk") -> Request:
        if self._thread is None or lane != "bulk":
            return super().start_all_reduce(array, op=op, lane=lane)
        self._check(array, lane, op)
        return self._thread.submit(lambda: Communicator.all_reduce(self, array, op=op, lane=lane))

    def all_reduce(self, array: Any, *, op: str = "sum", lane: str = "bulk") -> None:
        if self._thread is not None and lane == "bulk" and threading.get_ident() != self._thread.ident:
            self.start_all_reduce(array, op=op, lane=lane).wait()
        else:
            super().all_reduce(array, op=op, lane=lane)

    def adopt(self, lane: str) -> None:
        super().adopt(lane)
        self._owners[lane] = threading.get_ident()

    def plain_all_reduce(self, array: np.ndarray) -> None:
        """Sum an array over ranks with one call of MPI, as a program without this library would.

        **Collective.** What benchmarks compare with: no pieces, no checks, MPI's own dtypes alone.
        """
        self._lanes["bulk"].Allreduce(self._mpi.IN_PLACE, array)

    def swap(
        self, outgoing: Sequence[tuple[int, Any]], incoming: Sequence[tuple[int, Any]], lane: str
    ) -> None:
        """Send arrays to some ranks while those of others come in; each is of one piece. Empty ones stay at home.

        **Collective** over the ranks that are named.
        """
        comm = self._lane(lane)
        requests = [comm.Irecv(array.view(np.uint8), source) for source, array in incoming if array.size]
        requests += [comm.Isend(array.view(np.uint8), to) for to, array in outgoing if array.size]
        self._mpi.Request.Waitall(requests)

    def gather_rows(self, mine: np.ndarray, rows: np.ndarray, lane: str) -> None:
        """Fill row r with what rank r brings: a few bytes (uint8), equally many on all ranks. **Collective.**"""
        self._lane(lane).Allgather(mine, rows)

    def shared_window(self, nbytes: int) -> list[np.ndarray]:
        """Return zeroed memory of every rank as uint8 arrays, in a window of MPI.

        **Collective.** All ranks are on one node and ask for the same number of bytes. MPI frees a window on all
        ranks together: :meth:`close` does.
        """
        window = self._mpi.Win.Allocate_shared(nbytes, 1, comm=self._lanes["urgent"])
        self._windows.append(window)
        memories: list[Any] = [window.Shared_query(rank)[0] for rank in range(self.size)]
        parts = [np.frombuffer(memory, dtype=np.uint8) for memory in memories]
        parts[self.rank].fill(0)
        self._lanes["urgent"].Barrier()
        return parts

    def close(self) -> None:
        """Stop the progress thread and free the duplicates. **Collective** (MPI frees them together)."""
        for window in self._windows:
            window.Free()
        if self._thread is not None:
            self._thread.close()
        for comm in self._lanes.values():
            comm.Free()

    # -- the transport's part

    def _lane(self, lane: str, array: Any = None) -> Any:
        if threading.get_ident() != self._owners[lane]:
            if self._thread is not None and lane == "bulk":
                raise CommunicationError("lane bulk: expected all_reduce (the progress thread carries it)")
            raise CommunicationError(
                f"lane {lane}: expected calls from the thread that made the communicator, got another; "
                "give each thread comm.duplicate(), made on every rank"
            )
        if array is not None and device_of(array) != CPU:
            if self.device_pointers:
                device_of(array).xp.cuda.get_current_stream().synchronize()  # MPI knows nothing of streams
                return self._lanes[lane]
            raise CommunicationError(
                f"array: expected host memory for transport mpi, got {device_of(array)}; "
                "an MPI that is not CUDA-aware crashes on device pointers"
            )
        return self._lanes[lane]

    def _pieces(self, array: Any) -> Any:
        count = max(1, self.piece_bytes // array.itemsize)
        if array.size <= count:
            return (array,)
        return (array[i : i + count] for i in range(0, array.size, count))

    def _all_reduce(self, array: Any, op: str, lane: str) -> None:
        comm = self._lane(lane, array)
        for piece in self._pieces(array):
            wide = encode(piece, op)
            comm.Allreduce(self._mpi.IN_PLACE, wide, op=self._ops[op])
            decode(wide, piece, op)

    def _reduce(self, array: Any, op: str, root: int, lane: str) -> None:
        comm = self._lane(lane, array)
        for piece in self._pieces(array):
            wide = encode(piece, op)
            if self.rank == root:
                comm.Reduce(self._mpi.IN_PLACE, wide, op=self._ops[op], root=root)
                decode(wide, piece, op)
            else:
                comm.Reduce(wide, None, op=self._ops[op], root=root)

    def _broadcast(self, array: Any, root: int, lane: str) -> None:
        comm = self._lane(lane, array)
        for piece in self._pieces(array.view(np.uint8)):
            comm.Bcast(piece, root=root)

    def _reduce_scatter(self, array: Any, bounds: Sequence[int], op: str, lane: str) -> None:
        # Reduced slice by slice to its owner: MPI's Reduce_scatter needs a second buffer of the whole size.
        for root in range(self.size):
            part = array[bounds[root] : bounds[root + 1]]
            if part.size:
                self._reduce(part, op, root, lane)

    def _all_gather(self, array: Any, bounds: Sequence[int], lane: str) -> None:
        for root in range(self.size):
            part = array[bounds[root] : bounds[root + 1]]
            if part.size:
                self._broadcast(part, root, lane)

    def _exclusive_sum(self, value: int, lane: str) -> int:
        mine, below = np.array([value], dtype=np.int64), np.zeros(1, dtype=np.int64)
        self._lane(lane).Exscan(mine, below, op=self._mpi.SUM)
        return 0 if self.rank == 0 else int(below[0])

    def _barrier(self, lane: str) -> None:
        self._lane(lane).Barrier()

    def _send(self, array: Any, to: int, lane: str) -> None:
        comm = self._lane(lane, array)
        for piece in self._pieces(array.view(np.uint8)):
            comm.Send(piece, dest=to)

    def _recv(self, array: Any, source: int, lane: str) -> None:
        comm = self._lane(lane, array)
        for piece in self._pieces(array.view(np.uint8)):
            comm.Recv(piece, source=source)


def encode(piece: Any, op: str) -> Any:
    """Return what MPI reduces for ``piece``: itself, a float32 copy, or for a float maximum sortable integers.

    MPI leaves the maximum of (1, NaN) open: Open MPI loses the NaN, MPICH gives ranks different answers.
    As integers with NaN above infinity the order is total.
    """
    name = piece.dtype.name
    xp = device_of(piece).xp
    wide = piece.astype(np.float32) if name in _WIDENED else piece
    if op == "max" and wide.dtype.kind == "f":
        codes = wide.astype(np.float64).view(np.int64)
        codes = xp.where(codes < 0, codes ^ np.int64(0x7FFFFFFFFFFFFFFF), codes)
        codes[xp.isnan(wide)] = np.iinfo(np.int64).max
        return codes
    return wide


def decode(wide: Any, piece: Any, op: str) -> None:
    """Write the reduced form back into ``piece``."""
    if wide is piece:
        return
    if op == "max" and wide.dtype == np.int64 and piece.dtype.kind not in "iu":
        codes = device_of(piece).xp.where(wide < 0, wide ^ np.int64(0x7FFFFFFFFFFFFFFF), wide)
        values = codes.view(np.float64).copy()
        values[wide == np.iinfo(np.int64).max] = np.nan
        piece[...] = values.astype(piece.dtype)
    else:
        piece[...] = wide.astype(piece.dtype)
