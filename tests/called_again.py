"""A recorder of graphs on the host: a graph is a function that is called again.

What Python decides while it records (which contributions assign and which add) is kept, as a graph keeps it, and
recording changes no array: so everything about a captured step can be tested without a GPU, but CUDA itself.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from mpdp.kernels.board import LOSS_SCALE


class CalledAgain:
    """Stands in for ``parallel.recorder.CudaRecorder``; ``wrap`` it around the engine that it is given to."""

    held_bytes = 0

    def __init__(self) -> None:
        self.engine: Any = None
        self.recorded = self.launched = 0
        self._marked: dict[int, Any] = {}

    def make_room(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def mark(self, number, request):
        self._marked[number] = request

    def follow(self, number):
        if number in self._marked:  # not so while the first graph is recorded
            self._marked[number].wait()

    def beside(self):
        return contextlib.nullcontext()

    def record(self, body):
        parallel = self.engine.parallel
        written = {p: p._written - parallel._replica.binding.update for p in parallel.parameters.values()}
        arrays = self._state()
        copies = [array.copy() for array in arrays]
        board = self.engine.capture.board
        board.begin = lambda targets, rows: self._begin(board)  # there is no slot yet
        with np.errstate(all="ignore"):  # on numbers that are none yet
            body()
        del board.begin
        for array, copy in zip(arrays, copies):
            array[...] = copy
        self.recorded += 1
        return _Graph(self, body, written)

    def _begin(self, board):
        board.words.view(np.float64)[LOSS_SCALE] = 1.0

    def _state(self):
        parallel, board = self.engine.parallel, self.engine.capture.board
        arrays = [parallel.weights, parallel.arena.array, *self.engine.optimizer.state.values()]
        if parallel._replica.average is not None:
            arrays.append(parallel._replica.average.array)
        arrays = [getattr(array, "array", array) for array in arrays]  # of a HeldArray
        if parallel._replica.masters is not None:
            arrays.append(parallel._replica.masters._wide)
        arrays += [buffer.data for buffer in parallel.buffers.values()]
        if parallel._replica.copies is not None:
            arrays.append(parallel._replica.copies)
        return [*arrays, board.words, board._reports]


class _Graph:
    def __init__(self, recorder, body, written):
        self._recorder, self._body, self._written = recorder, body, written

    def launch(self):
        self._recorder.launched += 1
        parallel = self._recorder.engine.parallel
        for parameter, offset in self._written.items():
            parameter._written = parallel._replica.binding.update + offset
        step, own = parallel.reducer.step, parallel._own
        self._body()
        parallel.reducer.step, parallel._own = step, own


def capture(trainer, required=True, recorder=None):
    """Let a trainer on the CPU run its steps as graphs; returns the recorder."""
    recorder = CalledAgain() if recorder is None else recorder
    trainer.updates.record_with(recorder, required)
    recorder.engine = trainer.updates.graphs
    return recorder


def equal_bits(a, b) -> bool:
    """Whether two arrays hold the same bits."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
