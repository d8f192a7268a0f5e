"""Lane: the memory of one lane of a communicator between GPUs, and how a collective on it is launched.

The layout is that of ``cuda_src/direct.cu``: counters of mail, flags, places, stages, mailboxes, own counters. A lane
has a stream of its own, so that collectives of one lane run in order and those of another never queue behind
them. Nothing here depends on what is in device memory: a launch may be captured into a graph and replayed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .cuda_gpu import CudaGpu
from .cuda_memory import GpuMemory

MOST_RANKS = 16  # room in the tables of direct.cu
HOST_WORDS = 32
ABORT, STOPPED, MISMATCH, OWN_CALL, WAITS = 0, 1, 2, 3, 16  # words in host memory, as in direct.cu
THREADS = 512
_PACK = 16  # bytes that a thread moves at once
_ONE_PHASE_SHARE = 4096  # bytes of a small message that a block takes


class Sizes:
    """Where what lies in one rank's memory of a lane.

    Args:
        size: ranks.
        blocks: most blocks of a launch; a block has a row of flags and two stages.
        stage_bytes: of a stage, a multiple of 16.
        mail_bytes: of a mailbox, a multiple of 16.
        small_bytes: messages up to here take one phase.
    """

    def __init__(self, size: int, blocks: int, stage_bytes: int, mail_bytes: int, small_bytes: int) -> None:
        if stage_bytes % _PACK or mail_bytes % _PACK or min(blocks, stage_bytes, mail_bytes) < 1:
            raise ValueError(
                f"stage_bytes, mail_bytes: expected multiples of {_PACK}, got {stage_bytes} and {mail_bytes}"
            )
        self.blocks, self.stage_bytes, self.mail_bytes = blocks, stage_bytes, mail_bytes
        self.small_bytes = small_bytes
        self.stages = 8 * (2 * MOST_RANKS + 2 * blocks * 2 * MOST_RANKS)
        self.mails = self.stages + 2 * blocks * stage_bytes
        self.counters = self.mails + 2 * size * mail_bytes
        self.nbytes = -(-(self.counters + 8 * 2 * MOST_RANKS + 8 * blocks) // 256) * 256


class Launch(NamedTuple):
    """A kernel and what it is launched with, as for :meth:`CudaGpu.launch`."""

    name: str
    built: tuple[Any, int, bool]
    blocks: int
    threads: int
    arguments: tuple[Any, ...]


class GpuLane:
    """One lane as this rank has it mapped.

    **Local** to construct, over memory that is shared already.

    Args:
        memory: what the ranks share.
        pointers: each rank's memory of the lane.
        sizes: its layout.
        name: of the lane, for reports.
    """

    def __init__(self, memory: GpuMemory, pointers: Sequence[int], sizes: Sizes, name: str) -> None:
        self.name, self.sizes = name, sizes
        self._gpu: CudaGpu = memory.gpu
        self._size = memory.size
        self._rank = memory.rank
        self._stream: Any = None
        self._event = memory.gpu.event()  # used again and again: what waits for it, waits for it as it stood
        self.host = memory.gpu.pinned(HOST_WORDS)
        self._words = memoryview(self.host)  # type: ignore[arg-type]  # four times as fast to look at
        self._noted: float | None = None
        self._known: dict[int, str] = {}  # signatures of the latest calls
        self._structure = _structure(
            [
                *pointers,
                self.host.ctypes.data,
                memory.halt,
                memory.regions,
                memory.rank,
                sizes.blocks,
                sizes.stages,
                sizes.stage_bytes,
                sizes.mails,
                sizes.mail_bytes,
                sizes.counters,
            ]
        )

    @property
    def stream(self) -> Any:
        """The stream of the lane, made when it is first used."""
        if self._stream is None:
            self._stream = self._gpu.stream()
        return self._stream

    def plan(
        self,
        array: Any,
        dtype: np.dtype,
        copies: bool,
        *,
        bounds: Sequence[int],
        count: int,
        place: int,
        kept: tuple[int, int],
        signature: int,
        maximum: bool,
        root: int,
        targets: int,
        text: str,
    ) -> Launch:
        """Return what :meth:`run` launches, as often as wanted. **Local.**

        Args:
            array: this rank's.
            dtype: of the elements that bounds and count speak of; uint8 where parts are copied.
            copies: parts are copied, not summed.
            bounds: elements that each rank makes.
            count: elements in all.
            place: of the array, see ``cuda_memory``.
            kept: elements of the sum that this rank needs.
            signature: 32 bits that are equal on all ranks.
            maximum: instead of the sum.
            root: whose array is copied; -1 if each rank gives its own part.
            targets: one bit for each rank that gets what this one makes.
            text: the call in words, for an error.
        """
        nbytes = count * dtype.itemsize
        small = nbytes <= self.sizes.small_bytes
        each = _ONE_PHASE_SHARE if small else self._size * THREADS * _PACK
        blocks = max(1, min(-(-nbytes // each), self.sizes.blocks))
        packs = -(-nbytes // (blocks * _PACK))  # of a block in one phase
        threads = min(max(-(-packs // 32) * 32, 64), THREADS) if small else THREADS
        call = [*bounds, array.data.ptr, count, place, *kept, signature, maximum, root, targets, small]
        self._remember(signature, text)
        built = (dtype, self._size, copies)
        return Launch("collective", built, blocks, threads, (self._structure, _structure(call)))

    def run(self, launch: Launch) -> None:
        """Launch a kernel behind all that the calling thread has submitted. **Collective**, a message **local**."""
        gpu, stream, event = self._gpu, self.stream, self._event
        gpu.mark(event, gpu.current())
        gpu.join(stream, event)
        gpu.launch(*launch, stream)

    def send(self, array: Any, to: int) -> None:
        """Launch the sending of an array. **Local.**"""
        self._mail("send_mail", array, to)

    def receive(self, array: Any, source: int) -> None:
        """Launch the receiving of an array. **Local.**"""
        self._mail("receive_mail", array, source)

    def _mail(self, name: str, array: Any, peer: int) -> None:
        built = (np.dtype(np.uint8), self._size, True)
        arguments = (self._structure, array.data.ptr, array.nbytes, peer)
        self.run(Launch(name, built, 1, THREADS, arguments))

    def join(self) -> None:
        """Let the calling thread's further work come after the collectives of the lane. **Local.**"""
        self._gpu.mark(self._event, self.stream)
        self._gpu.join(self._gpu.current(), self._event)

    def mark(self) -> Any:
        """Return a new event behind all collectives of the lane. **Local.**"""
        event = self._gpu.event()
        self._gpu.mark(event, self.stream)
        return event

    def idle(self) -> bool:
        """Return whether the lane has nothing left to do."""
        return self._stream is None or self._gpu.done(self._stream)

    # -- what the kernels report

    def _remember(self, signature: int, text: str) -> None:
        if signature not in self._known:
            if len(self._known) >= 256:
                self._known.clear()
            self._known[signature] = text

    def mismatch(self) -> str | None:
        """Return what the ranks disagree on, if a collective has found another one on another rank. **Local.**"""
        found = self._words[MISMATCH]
        if not found:
            return None
        own = self._known.get(self._words[OWN_CALL], "a collective")
        return (
            f"{own}: expected the same collective on all ranks, got another on rank {found - 1} (lane {self.name}, "
            f"found by rank {self._rank} on the GPU); run the same code with the same arguments"
        )

    def waiting(self) -> tuple[str, float] | None:
        """Return which ranks a collective has waited for, if for long, and since when. **Local.**"""
        words = self.host[WAITS : WAITS + self._size]
        if not words.any():
            self._noted = None
            return None
        if self._noted is None:
            self._noted = time.monotonic()
        ranks = ", ".join(str(rank) for rank in np.flatnonzero(words))
        return f"a collective on the GPU, lane {self.name}, waits for rank {ranks}", self._noted


def _structure(words: Sequence[int]) -> Any:
    """Return 64-bit words as a structure that kernels take by value."""
    data = np.array(words, dtype=np.int64)
    return data.view(np.dtype((np.void, data.nbytes)))[0]
