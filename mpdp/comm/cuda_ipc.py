"""Collectives between the GPUs of one node, and between ranks that share a GPU, over buffers opened by CUDA IPC.

One kernel is one collective. A large message takes two phases: when all ranks are there, each sums its slice over all
buffers in the order of ranks, in place, and writes it to all of them; a small one takes one phase through stages
that all ranks have mapped, and a few KiB travel in words that carry their own flag. So sums have the bits of a sum in
rank order, run to run and whatever the chunk size. An array that lies in no memory of ``allocate()`` goes through the
stages too; whether all ranks' arrays do is found out on the device, where no rank has to ask another.

A call returns when its kernel is launched on the calling thread's current stream. A collective that is started runs
beside that stream, which comes behind it with :meth:`~mpdp.comm.base.Request.wait`. The host waits for nothing, and
calls may be captured into a graph: call each kind once before, so that its kernel is compiled, and wait for what is
started inside of it. When a rank fails, kernels that wait for it end, set the halt latch, and the next call raises.
Host arrays go to the host communicator. Read ``cuda_src/direct.cu`` for the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..device import Device, device_of
from ..errors import CommunicationError, DeviceMismatchError, on_all_ranks
from .agreement import together
from .base import FLOATS, INTEGERS, LANES, OPS, Buffer, Communicator, Request
from .cuda_family import Family
from .cuda_gpu import CudaGpu
from .cuda_lane import MOST_RANKS, GpuLane, Launch, Sizes
from .cuda_memory import GpuMemory

SMALL_BYTES = 128 << 10
STAGE_BYTES = 32 << 10  # the lanes of a world's two communicators take 8 MiB, two chunks, at up to 4 ranks
MAIL_BYTES = 32 << 10
SHARE_BYTES = 2 << 10
MOST_BLOCKS = {
    "bulk": 32,
    "urgent": 8,
}  # where a rank has a GPU alone: enough for a link, few beside the products
_NAMES = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")
_CODES = {name: code for code, name in enumerate((*_NAMES, *OPS, *FLOATS, *INTEGERS))}
_BYTES = np.dtype(np.uint8)


class _Started(Request):
    def __init__(self, comm: CudaIpcCommunicator, name: str, event: Any) -> None:
        self._comm, self._name, self._event = comm, name, event

    def wait(self) -> None:
        self._comm.look(self._name)
        gpu = self._comm.gpu
        gpu.join(gpu.current(), self._event)


class CudaIpcCommunicator(Communicator):
    """Carry GPU arrays between ranks that have one another's GPU memory mapped, and host arrays as ``host`` does.

    **Collective.** Takes the host communicator over.

    Args:
        host: a communicator over the same ranks, all on one node.
        device: the GPU of this rank.
        family: what it shares with the communicator that it is a duplicate of.
        small_bytes: messages up to here take one phase.
        stage_bytes: what a block moves through a stage at once.
        mail_bytes: what :meth:`send` moves at once.
        share_bytes: what a block sums in words that carry their own flag.
        chunk_bytes: see :class:`Communicator`.
        most_blocks: most blocks of a launch, by lane; fewer where ranks share a GPU, since the blocks of
            all ranks must be able to run at once.
        gpu: how to use the GPU; the default is CUDA.

    Raises:
        CommunicationError: on all ranks, when they cannot map each other's memory, or are more than 16.
        DeviceError: on all ranks, when there is not enough memory.
    """

    transport = "cuda_ipc"
    capturable = True

    def __init__(
        self,
        host: Communicator,
        device: Device,
        *,
        family: Family | None = None,
        small_bytes: int = SMALL_BYTES,
        stage_bytes: int = STAGE_BYTES,
        mail_bytes: int = MAIL_BYTES,
        share_bytes: int = SHARE_BYTES,
        chunk_bytes: int | None = None,
        most_blocks: dict[str, int] | None = None,
        gpu: Any = None,
    ) -> None:
        super().__init__(host.rank, host.size, host.activity)
        self.host, self.device = host, device
        self._lengths = {
            "small_bytes": small_bytes,
            "stage_bytes": stage_bytes,
            "mail_bytes": mail_bytes,
            "share_bytes": share_bytes,
        }
        self._most_blocks = most_blocks
        self.chunk_bytes = chunk_bytes if chunk_bytes is not None else self.chunk_bytes
        if self.size > MOST_RANKS:
            raise on_all_ranks(
                CommunicationError(
                    f"cuda_ipc: expected at most {MOST_RANKS} ranks on a node, got {self.size}"
                )
            )
        if family is None:
            first: Any = together(host, lambda: gpu if gpu is not None else CudaGpu(device))
            family = Family(together(host, lambda: GpuMemory(self.rank, self.size, first)), host.activity)
        self.family = family
        self.gpu: CudaGpu = family.memory.gpu
        blocks = self._blocks() if most_blocks is None else most_blocks
        sizes = {name: Sizes(self.size, blocks[name], **self._lengths) for name in LANES}
        self._shared = family.memory.share(host, sum(sizes[name].nbytes for name in LANES))
        self._lanes: dict[str, GpuLane] = {}
        start = 0
        for name in LANES:
            pointers = [pointer + start for pointer in self._shared]
            self._lanes[name] = GpuLane(family.memory, pointers, sizes[name], name)
            start += sizes[name].nbytes
        family.lanes += self._lanes.values()
        self._launches: dict[tuple[Any, ...], Launch] = {}
        self._closed = False

    def _blocks(self) -> dict[str, int]:
        """Return the most blocks of a lane, so that those of all ranks on one GPU can run at once. **Collective.**"""
        gpu = self.gpu
        mine = gpu.identity.hex() + f" {gpu.multiprocessors}"
        texts = [text.decode().split() for text in self.host.all_gather_bytes(mine.encode())]
        names = [name for name, _ in texts]
        sharing = max(names.count(name) for name in names)
        # Else kernels of another rank stand where a collective's blocks have to.
        self.independent = sharing == 1
        share = min(int(count) for _, count in texts) // sharing
        urgent = max(1, min(MOST_BLOCKS["urgent"], share // 4))
        return {"bulk": max(1, min(MOST_BLOCKS["bulk"], share - urgent)), "urgent": urgent}

    def duplicate(self) -> CudaIpcCommunicator:
        return CudaIpcCommunicator(
            self.host.duplicate(),
            self.device,
            family=self.family,
            **self._lengths,
            chunk_bytes=self.chunk_bytes,
            most_blocks=self._most_blocks,
        )

    @property
    def halt(self) -> int:
        """Address of the halt latch: a 32-bit word in device memory, 1 once a collective was broken off.

        Kernels that must not act on a sum that was never completed read it.
        """
        return self.family.memory.halt

    @property
    def device_bytes(self) -> int:
        return self.family.memory.held_bytes

    def adopt(self, lane: str) -> None:
        self.host.adopt(lane)

    def close(self) -> None:
        """Wait for the last collectives and give the memory of the lanes back. **Collective.**

        Buffers of :meth:`allocate` stay as long as there are views of them.
        """
        if self._closed:
            return
        self._closed = True
        lanes = list(self._lanes.values())
        self.family.settle(lanes, seconds=float("inf"))
        self.family.forget(lanes)
        self.family.memory.close(self._shared, self.host.barrier)
        self.host.close()

    def release(self) -> None:
        self.family.release()
        self.host.release()

    def _allocate(self, nbytes: int, device: Device) -> Buffer:
        if device.kind == "cpu":
            return self.host.allocate(nbytes, device)
        if nbytes == 0 or device != self.device:
            return super()._allocate(nbytes, device)
        return self.family.memory.allocate(self.host, nbytes)

    # -- collectives

    def start_all_reduce(self, array: Any, *, op: str = "sum", lane: str = "bulk") -> Request:
        if self._on_host(array):
            return self.host.start_all_reduce(array, op=op, lane=lane)
        return self._start("all_reduce", array, lane, None, op)

    def start_reduce_scatter(
        self, array: Any, bounds: Sequence[int], *, op: str = "sum", lane: str = "bulk"
    ) -> Request:
        if self._on_host(array):
            return self.host.start_reduce_scatter(array, bounds, op=op, lane=lane)
        return self._start("reduce_scatter", array, lane, bounds, op)

    def start_all_gather(self, array: Any, bounds: Sequence[int], *, lane: str = "bulk") -> Request:
        if self._on_host(array):
            return self.host.start_all_gather(array, bounds, lane=lane)
        return self._start("all_gather", array, lane, bounds)

    def _start(self, name: str, array: Any, lane: str, bounds: Sequence[int] | None, op: str = "") -> Request:
        self._check(array, lane, op or "sum", bounds=bounds)
        if array.size == 0:
            return Request()
        self._enter(name, lane)
        try:
            launch = self._launch(name, array, lane, bounds, -1, op)
            return _Started(self, name, self._lanes[lane].start(launch, array, self.spans))
        finally:
            self.activity.leave()

    def _all_reduce(self, array: Any, op: str, lane: str) -> None:
        if self._on_host(array):
            self.host._all_reduce(array, op, lane)
        else:
            self._run("all_reduce", array, lane, None, -1, op)

    def _reduce(self, array: Any, op: str, root: int, lane: str) -> None:
        if self._on_host(array):
            self.host._reduce(array, op, root, lane)
        else:
            self._run("reduce", array, lane, None, root, op)

    def _reduce_scatter(self, array: Any, bounds: Sequence[int], op: str, lane: str) -> None:
        if self._on_host(array):
            self.host._reduce_scatter(array, bounds, op, lane)
        else:
            self._run("reduce_scatter", array, lane, bounds, -1, op)

    def _broadcast(self, array: Any, root: int, lane: str) -> None:
        if self._on_host(array):
            self.host._broadcast(array, root, lane)
        else:  # each rank passes a slice of the root's on: the root's link carries the array once
            self._run("broadcast", array, lane, None, root)

    def _all_gather(self, array: Any, bounds: Sequence[int], lane: str) -> None:
        if self._on_host(array):
            self.host._all_gather(array, bounds, lane)
        else:
            self._run("all_gather", array, lane, bounds, -1)

    def _exclusive_sum(self, value: int, lane: str) -> int:
        return self.host._exclusive_sum(value, lane)

    def _barrier(self, lane: str) -> None:
        self.host._barrier(lane)

    def _send(self, array: Any, to: int, lane: str) -> None:
        if self._on_host(array):
            self.host._send(array, to, lane)
        else:
            self.look("send")
            self._look_at(array)
            self._lanes[lane].send(array, to)

    def _recv(self, array: Any, source: int, lane: str) -> None:
        if self._on_host(array):
            self.host._recv(array, source, lane)
        else:
            self.look("recv")
            self._look_at(array)
            self._lanes[lane].receive(array, source)

    # -- parts

    def _on_host(self, array: Any) -> bool:
        return type(array) is np.ndarray or device_of(array).kind == "cpu"

    def _slices(self, array: Any) -> list[int]:
        """Return equal slices of whole packs of 16 bytes."""
        pack = 16 // array.itemsize
        each = -(-array.size // (self.size * pack)) * pack
        return [min(rank * each, array.size) for rank in range(self.size + 1)]

    def _run(
        self, name: str, array: Any, lane: str, bounds: Sequence[int] | None, root: int, op: str = ""
    ) -> None:
        self._lanes[lane].run(self._launch(name, array, lane, bounds, root, op), array, self.spans)

    def _launch(
        self, name: str, array: Any, lane: str, bounds: Sequence[int] | None, root: int, op: str
    ) -> Launch:
        """Return what launches a collective, worked out when it was first called with this array.

        Args:
            bounds: elements that each rank makes; None for equal slices.
            root: of a rooted call, else -1.
            op: of a summing call.
        """
        self.look(name)
        memory = self.family.memory
        where = array.data.ptr, array.size, array.dtype, memory.version
        key = (name, op, lane, root, None if bounds is None else tuple(bounds), *where)
        launch = self._launches.get(key)
        if launch is None:
            self._look_at(array)
            if len(self._launches) >= 1024:
                self._launches.clear()
            bounds = self._slices(array) if bounds is None else bounds
            plan = self._plan_sum if op else self._plan_copy
            launch = self._launches[key] = plan(name, array, self._lanes[lane], bounds, root, op)
        return launch

    def _plan_sum(
        self, name: str, array: Any, lane: GpuLane, bounds: Sequence[int], root: int, op: str
    ) -> Launch:
        kept, targets = (0, array.size), (1 << self.size) - 1
        if name == "reduce":
            kept, targets = (kept if self.rank == root else (0, 0)), 1 << root
        elif name == "reduce_scatter":
            kept, targets = (bounds[self.rank], bounds[self.rank + 1]), 1 << self.rank
        code = (_CODES[name], _CODES[op], _CODES[array.dtype.name], array.size, root, *bounds)
        return lane.plan(
            array,
            array.dtype,
            False,
            bounds=bounds,
            count=array.size,
            place=self.family.memory.place(array),
            kept=kept,
            signature=hash(code) & 0xFFFFFFFF,
            maximum=op == "max",
            root=-1,
            targets=targets,
            text=f"{name} ({op}) of {array.size} {array.dtype.name}",
        )

    def _plan_copy(
        self, name: str, array: Any, lane: GpuLane, bounds: Sequence[int], root: int, op: str
    ) -> Launch:
        code = (_CODES[name], _CODES[array.dtype.name], array.size, root, *bounds)
        giver = self.rank if root < 0 else root
        return lane.plan(
            array,
            _BYTES,
            True,
            bounds=[bound * array.itemsize for bound in bounds],
            count=array.nbytes,
            place=self.family.memory.place(array),
            kept=(0, 0),
            signature=hash(code) & 0xFFFFFFFF,
            maximum=False,
            root=root,
            targets=((1 << self.size) - 1) & ~(1 << giver),
            text=f"{name} of {array.size} {array.dtype.name}",
        )

    def look(self, call: str) -> None:
        """Raise what collectives on the device have found, or that a rank has failed. **Local.**"""
        self.activity.check(call)
        text = self.family.mismatch()
        if text is not None:
            raise on_all_ranks(CommunicationError(text))

    def _look_at(self, array: Any) -> None:
        if device_of(array) != self.device:
            raise DeviceMismatchError(
                f"array: expected memory of {self.device}, this rank's GPU, got {device_of(array)}; move it there"
            )
        if array.data.ptr % array.itemsize:
            raise ValueError(
                f"array: expected an address that is a multiple of {array.itemsize} bytes, got {array.data.ptr:#x}; "
                "use .copy()"
            )
