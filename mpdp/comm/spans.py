"""Spans: when each part of a rank's last steps ran, on the host and on a GPU's streams.

A communicator has none of them until a timeline is taken (``Communicator.spans`` is None), and then notes where its
own work begins and ends. Bounded: only the last steps are kept. Knows nothing of what is drawn; read
``report.timeline`` for that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

COMPUTE = "compute"
COMMUNICATION = "communication"
STREAM = "stream"


class Span(NamedTuple):
    """Something that took time.

    Attributes:
        row: a lane, ``"compute"``, or a thread or stream by name; spans of one row nest.
        name: what it was.
        kind: ``"compute"``, ``"communication"`` or ``"stream"``.
        start, stop: nanoseconds of this rank's clock.
        nbytes: of a message, or None.
        waited: the thread that computes was inside of it.
    """

    row: str
    name: str
    kind: str
    start: int
    stop: int
    nbytes: int | None
    waited: bool


class StreamClock:
    """Points in the work of a GPU's streams, as nanoseconds of the host's clock.

    **Local.** One event of reference is recorded and waited for at construction; CUDA tells the time between events in
    float32 milliseconds, so a point ten seconds after it is right to a microsecond.

    Args:
        cupy: the module.
        clock: nanoseconds of the host.
    """

    def __init__(self, cupy: Any, clock: Callable[[], int]) -> None:
        self._cuda = cupy.cuda
        self._zero = self.mark(self._cuda.get_current_stream())
        self._zero.synchronize()
        self._nanoseconds = clock()

    def mark(self, stream: Any = None) -> Any:
        """Return an event behind all work submitted so far to a stream (default: the current one)."""
        event = self._cuda.Event()
        event.record(stream if stream is not None else self._cuda.get_current_stream())
        return event

    def nanoseconds(self, event: Any) -> int:
        """Return when the stream came to the event; waits for it."""
        event.synchronize()
        return self._nanoseconds + round(self._cuda.get_elapsed_time(self._zero, event) * 1e6)


class Spans:
    """Note spans, step by step.

    **Local.** Belongs to the thread that makes it, which is the one that computes; others may add to it.

    Args:
        steps: how many of the last steps to keep.
        clock: nanoseconds; of one host all processes read the default alike.
        streams: the clock of this rank's GPU, where it has one.

    Attributes:
        labels: ``id`` of an array to what it is called.
    """

    def __init__(
        self,
        steps: int,
        clock: Callable[[], int] = time.perf_counter_ns,
        streams: StreamClock | None = None,
    ) -> None:
        self.clock = clock
        self.streams = streams
        self.labels: dict[int, str] = {}
        self._owner = threading.get_ident()
        self._open = False
        self._steps: deque[list[Span]] = deque(maxlen=steps)
        self._streamed: deque[list[tuple[str, str, Any, Any, int | None]]] = deque(maxlen=steps)

    def begin_step(self) -> None:
        """Open the next step; what is added from now on belongs to it."""
        self._streamed.append([])
        self._steps.append([])
        self._open = True

    def end_step(self) -> None:
        """Close the step; what is added outside of one is dropped."""
        self._open = False

    def add(self, row: str, name: str, start: int, *, kind: str = COMPUTE, nbytes: int | None = None) -> None:
        """Note what began at ``start`` and ends now."""
        stop = self.clock()
        own = threading.get_ident() == self._owner
        if not own:
            row = f"{row}, {threading.current_thread().name}"
        if self._open:
            waited = own and kind == COMMUNICATION
            self._steps[-1].append(Span(row, name, kind, start, stop, nbytes, waited))

    def label(self, array: Any) -> str:
        """Return what an array is called."""
        return self.labels.get(id(array), "message")

    @contextmanager
    def message(self, lane: str, array: Any) -> Iterator[None]:
        """Note the time in which the bytes of an array travel."""
        start = self.clock()
        try:
            yield
        finally:
            self.add(lane, self.label(array), start, kind=COMMUNICATION, nbytes=array.nbytes)

    def mark(self, stream: Any = None) -> Any:
        """Return a point in a stream's work (default: the current stream's); None without a GPU."""
        return None if self.streams is None else self.streams.mark(stream)

    def add_on_stream(self, row: str, name: str, start: Any, stop: Any, nbytes: int | None = None) -> None:
        """Note what a stream did between two points."""
        if self._open and start is not None:
            self._streamed[-1].append((f"stream {row}", name, start, stop, nbytes))

    def finished(self) -> list[list[Span]]:
        """Return the spans of each step that was kept; waits for the streams."""
        if self.streams is None:
            return [list(step) for step in self._steps]
        at = self.streams.nanoseconds
        return [
            [*step, *(Span(row, name, STREAM, at(a), at(b), n, False) for row, name, a, b, n in streamed)]
            for step, streamed in zip(self._steps, self._streamed)
        ]


def covered(spans: list[tuple[int, int]]) -> int:
    """Return the length of the union of some (start, stop). **Local.**

    Example:
        >>> covered([(0, 10), (5, 12), (20, 21)])
        13
    """
    total, end = 0, None
    for start, stop in sorted(spans):
        if end is None or start > end:
            total, end = total + stop - start, stop
        elif stop > end:
            total, end = total + stop - end, stop
    return total
