"""Python work of a step in parallel/ and comm/ does not grow with the number of parameters, but with chunks."""

import sys
from pathlib import Path

import numpy as np

import mpdp
from mpdp import autodiff, nn, optim

PACKAGE = Path(mpdp.__file__).parent
COUNTED = (str(PACKAGE / "parallel"), str(PACKAGE / "comm"))


class Many(nn.Module):
    """A model of ``count`` parameters with the same number of elements in all."""

    def __init__(self, count, elements=200_000):
        self.parts = [autodiff.Parameter(np.ones(elements // count, dtype="float32")) for _ in range(count)]

    def forward(self, x):
        total = x.mean() * 0.0
        for part in self.parts:
            total = total + part.mean()
        return total


def lines_of_a_step(count, chunk_bytes):
    """Return how many lines of parallel/ and comm/ one update executes, once its plan is known."""
    parallel = mpdp.DataParallel(Many(count), chunk_bytes=chunk_bytes)
    optimizer = optim.SGD(lr=0.01)
    x = np.ones((4, 1), dtype="float32")

    def step():
        parallel.backward(parallel(x))
        parallel.step(optimizer)

    step()
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(COUNTED):
            return None
        if event == "line":
            lines += 1
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(previous)
    return lines, len(parallel._replica.reducer.chunks)


def test_ten_and_a_thousand_parameters_cost_the_same():
    few, chunks = lines_of_a_step(10, 1 << 17)
    many, more_chunks = lines_of_a_step(1000, 1 << 17)
    # A thousand ranges are padded to more elements: compare at the same number of chunks.
    assert many <= 1.2 * few * more_chunks / chunks
    assert many - few <= 0.2 * few + 30 * (more_chunks - chunks)


def test_the_count_sees_chunks():
    few, chunks = lines_of_a_step(10, 1 << 30)
    many, more_chunks = lines_of_a_step(10, 1 << 15)
    assert more_chunks > 10 * chunks
    assert many > few + 3 * (more_chunks - chunks)
