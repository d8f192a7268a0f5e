"""Lane: the memory of one lane of a communicator between GPUs, and how a collective on it is launched.

The layout is that of ``cuda_src/direct.cu``: counters of mail, flags, places, stages, mailboxes, lines, own counters.
What the caller waits for is launched on its own stream, and what it only starts on a stream of the lane; either comes
behind the lane's last kernel, so that collectives of one lane run in order and those of another never queue
behind them. Nothing here depends on what is in device memory: a launch may be captured into a graph and replayed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .cuda_gpu import CudaGpu
from .cuda_memory import GpuMemory
from .spans import Spans

MOST_RANKS = 16  # room in the tables of direct.cu
HOST_WORDS = 32
ABORT, STOPPED, MISMATCH, OWN_CALL, WAITS = 0, 1, 2, 3, 16  # words in host memory, as in direct.cu
THREADS = 512
_PACK = 16  # bytes that a thread moves at once
_ONE_PHASE_SHARE = 4096  # bytes of a small message that a block takes
_MOST_LINE_BLOCKS = 8  # that have lines
_IN_LINES = 2  # how a call is carried out, as in direct.cu; 1: in one phase, 0: in two
Launch = Callable[[Any], None]  # launches a kernel on a stream


class Sizes:
    """Where what lies in one rank's memory of a lane.

    Args:
        size: ranks.
        blocks: most blocks of a launch; a block has a row of flags and two stages.
        stage_bytes: of a stage, a multiple of 16.
        mail_bytes: of a mailbox, a multiple of 16.
        small_bytes: messages up to here take one phase.
        share_bytes: what a block sums in lines, a multiple of 16.

    Attributes:
        lined_bytes: sums up to here go in lines, by up to ``line_blocks`` blocks.
    """

    def __init__(
        self, size: int, blocks: int, stage_bytes: int, mail_bytes: int, small_bytes: int, share_bytes: int
    ) -> None:
        lengths = stage_bytes, mail_bytes, share_bytes
        if any(length % _PACK for length in lengths) or min(blocks, *lengths) < 1:
            raise ValueError(
                f"stage_bytes, mail_bytes, share_bytes: expected multiples of {_PACK}, got {stage_bytes}, {mail_bytes} "
                f"and {share_bytes}"
            )
        self.blocks, self.stage_bytes, self.mail_bytes = blocks, stage_bytes, mail_bytes
        self.small_bytes, self.share_bytes = small_bytes, share_bytes
        self.line_blocks = min(blocks, _MOST_LINE_BLOCKS)
        self.lined_bytes = self.line_blocks * share_bytes
        self.line_bytes = 2 * share_bytes  # of a slot
        self.stages = 8 * (2 * MOST_RANKS + 2 * blocks * 2 * MOST_RANKS)
        self.mails = self.stages + 2 * blocks * stage_bytes
        self.lines = self.mails + 2 * size * mail_bytes
        self.counters = self.lines + 2 * self.line_blocks * size * self.line_bytes
        self.nbytes = -(-(self.counters + 8 * 2 * MOST_RANKS + 8 * blocks) // 256) * 256


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
        self._last: Any = None  # the stream of the lane's last kernel
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
                sizes.lines,
                sizes.line_bytes,
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
        """Return what :meth:`run` and :meth:`start` launch, as often as wanted. **Local.**

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
        nbytes, sizes = count * dtype.itemsize, self.sizes
        way = _IN_LINES if nbytes <= sizes.lined_bytes and not copies else int(nbytes <= sizes.small_bytes)
        threads = THREADS
        if way == _IN_LINES:
            blocks = max(1, -(-nbytes // sizes.share_bytes))
            lines = -(-nbytes // (8 * blocks)) + 1
            threads = min(-(-lines // 32) * 32 + 32, THREADS)  # the last 32 look at the flags
        elif way:
            blocks = max(1, min(-(-nbytes // _ONE_PHASE_SHARE), sizes.blocks))
            packs = -(-nbytes // (blocks * _PACK))
            threads = min(max(-(-packs // 32) * 32, 64), THREADS)
        else:
            blocks = max(1, min(-(-nbytes // (self._size * THREADS * _PACK)), sizes.blocks))
        call = [*bounds, array.data.ptr, count, place, *kept, signature, maximum, root, targets, way]
        self._remember(signature, text)
        built = (dtype, self._size, copies)
        return self._gpu.prepare("collective", built, blocks, threads, (self._structure, _structure(call)))

    def run(self, launch: Launch, array: Any = None, spans: Spans | None = None) -> None:
        """Launch a kernel among what the calling thread submits to its current stream.

        **Collective**, a message **local**.

        Args:
            launch: see :meth:`plan`.
            array: what it works on.
            spans: where to note when it runs.
        """
        current = self._gpu.current()
        self._follow(current)
        self._launch(launch, current, array, spans)

    def start(self, launch: Launch, array: Any = None, spans: Spans | None = None) -> Any:
        """Launch a kernel behind what the calling thread has submitted, beside what it submits from now on.

        **Collective.**

        Args:
            launch, array, spans: see :meth:`run`.

        Returns:
            an event behind it.
        """
        gpu, stream = self._gpu, self.stream
        current = gpu.current()
        gpu.mark(self._event, current)
        gpu.join(stream, self._event)
        if self._last is not current:
            self._follow(stream)
        self._launch(launch, stream, array, spans)
        event = gpu.event()
        gpu.mark(event, stream)
        return event

    def _launch(self, launch: Launch, stream: Any, array: Any, spans: Spans | None) -> None:
        if spans is None or self._gpu.capturing(stream):  # an event inside a graph has no time
            launch(stream)
        else:
            begin = spans.mark(stream)
            launch(stream)
            spans.add_on_stream(self.name, spans.label(array), begin, spans.mark(stream), array.nbytes)
        self._last = stream

    def _follow(self, stream: Any) -> None:
        """Let a stream go on behind the lane's last kernel."""
        gpu, last = self._gpu, self._last
        if last is None or last is stream or last == stream:
            return
        if gpu.capturing(last) == gpu.capturing(
            stream
        ):  # a graph is launched behind what ran before it was made
            gpu.mark(self._event, last)
            gpu.join(stream, self._event)

    def send(self, array: Any, to: int) -> None:
        """Launch the sending of an array. **Local.**"""
        self._mail("send_mail", array, to)

    def receive(self, array: Any, source: int) -> None:
        """Launch the receiving of an array. **Local.**"""
        self._mail("receive_mail", array, source)

    def _mail(self, name: str, array: Any, peer: int) -> None:
        built = (np.dtype(np.uint8), self._size, True)
        arguments = (self._structure, array.data.ptr, array.nbytes, peer)
        self.run(self._gpu.prepare(name, built, 1, THREADS, arguments))

    def idle(self) -> bool:
        """Return whether the lane has nothing left to do."""
        return all(stream is None or self._gpu.done(stream) for stream in (self._stream, self._last))

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
