"""The board on a GPU: slots and reports in pinned host memory, which kernels read and write across the bus.

The docstrings are in ``board``; the kernels are ``cuda_src/step.cu``. A launch that is captured finds its slot by a
counter in device memory, so replays need nothing but what :meth:`~mpdp.kernels.board.Board.write` wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .board import HEAD, Board, Loss
from .cuda_source import THREADS, number, stored

_ARRAYS = 4  # that one launch of `fetch` copies
_MOST_BLOCKS = 1056  # eight a multiprocessor of an H200
_EACH = 16 * 2 * THREADS  # bytes that a block copies


class CudaBoard(Board):
    """The board of a GPU. **Local.**"""

    def __init__(self, kernels: Any, slots: int, numbers: int, sources: int, reports: int) -> None:
        super().__init__(kernels, slots, numbers, sources, reports)
        self._sums: Any = None

    def _host_memory(self, words: int) -> np.ndarray:
        array = np.frombuffer(self.kernels.xp.cuda.alloc_pinned_memory(8 * words), np.int64, words)
        array[:] = 0
        return array

    def _synchronize(self) -> None:
        self.kernels.xp.cuda.get_current_stream().synchronize()

    def _point(self, at: int, sources: Sequence[Any]) -> None:
        where = [source.data.ptr for source in sources]
        self._pointers.pack_into(self._ring_bytes, at, *where, *[0] * (self.sources - len(where)))

    def _launch(
        self, name: str, gradient: Any, loss: Any, blocks: int, threads: int, *arguments: Any
    ) -> None:
        built = ("G", stored(gradient), "T", stored(loss))
        self.kernels.launch("step", name, built, blocks, threads, self.words, *arguments)

    def begin(self, targets: Sequence[Any], rows: int) -> None:
        words = HEAD + 2 * self.table + len(targets)
        self._launch(
            "begin", np.float32, np.float32, 1, THREADS,
            self._ring.ctypes.data, self.slots, self.width, self.table, words,
        )  # fmt: skip
        for first in range(0, len(targets), _ARRAYS):
            some = targets[first : first + _ARRAYS]
            places: list[Any] = [0, 0] * _ARRAYS
            for i, target in enumerate(some):
                places[2 * i : 2 * i + 2] = target, target.nbytes
            blocks = max(1, min(-(-max(target.nbytes for target in some) // _EACH), _MOST_BLOCKS))
            self._launch(
                "fetch", np.float32, np.float32, blocks, THREADS, self.table, first, rows, *places
            )  # fmt: skip

    def take(self, total: Any, factor: float, count: Any, first: bool) -> None:
        self._launch("take", np.float32, total.dtype, 1, 1, total, float(factor), *number(count), first)

    def signal(self, count: int) -> None:
        self._launch("signal", np.float32, np.float32, 1, 1, self._signal.ctypes.data, count)

    def look(self, gradient: Any, span: int) -> None:
        spans = len(self._own)
        self.kernels.launch(
            "step", "look", ("G", stored(gradient.dtype), "T", "float"), spans, THREADS, self.words, self.parts, spans,
            gradient, gradient.size, span, self._own, self._rank, self.parts.size - spans,
        )  # fmt: skip

    def decide(self, gradient: Any, span: int, broken: int = 0, loss: Loss | None = None) -> None:
        total, factor, count = (None, 0.0, 0.0) if loss is None else loss
        spans, kind = -(-gradient.size // span), "float" if total is None else stored(total.dtype)
        built = ("G", stored(gradient.dtype), "T", kind)
        ranks, sums, blocks = 0, self.parts, 1
        if self.parts is None:
            blocks = spans = max(spans, 1)
            if self._sums is None or len(self._sums) != blocks:
                self._sums = self.kernels.xp.empty(blocks, np.float64)
            sums = self._sums
        else:
            spans, ranks = len(self._own), self.parts.size - len(self._own)
        self.kernels.launch(
            "step", "decide", built, blocks, THREADS, self.words, sums, spans, gradient, gradient.size, span,
            self._reports.ctypes.data, self.reports, broken, total, float(factor), *number(count), ranks,
        )  # fmt: skip
