"""The timeline of a rank's last steps: how long each part took, how much communication was hidden, a Chrome trace.

It works on a :class:`mpdp.DataParallel`, with or without a trainer. While it is entered, its own functions stand in
the place of the replica's ``forward``, ``backward`` and ``step`` and of some calls of the communicator, and the
transport notes when bytes travel (``comm.spans``); before and after that a step runs the code it always runs.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from ..comm.agreement import on_root
from ..comm.base import Communicator, Request
from ..comm.clocks import clock_offset
from ..comm.spans import COMMUNICATION, COMPUTE, Span, Spans, StreamClock, covered
from ..parallel.data_parallel import DataParallel

STEPS = 16


class _Waited(Request):
    """A request whose wait is noted."""

    def __init__(self, request: Request, spans: Spans, lane: str, array: Any) -> None:
        self._request, self._spans, self._lane, self._array = request, spans, lane, array

    def wait(self) -> None:
        start = self._spans.clock()
        self._request.wait()
        self._spans.add(self._lane, f"wait for {self._spans.label(self._array)}", start, kind=COMMUNICATION)


class Timeline:
    """Note the steps of one replica while the ``with`` block lasts.

    **Local** to enter and leave; the figures and the file are collective. A step is the time from its first forward
    pass to the end of its update.

    Args:
        parallel: the wrapped model (``trainer.parallel``).
        steps: how many of the last steps to keep.
        clock: nanoseconds of this rank.

    Example:
        >>> import mpdp, numpy as np
        >>> from mpdp import nn, optim
        >>> parallel, optimizer = mpdp.DataParallel(nn.Linear(4, 3)), optim.SGD(lr=0.1)
        >>> x, y = np.ones((8, 4), "float32"), np.zeros(8, "int64")
        >>> with Timeline(parallel) as timeline:
        ...     parallel.backward(nn.cross_entropy(parallel(x), y))
        ...     loss = parallel.step(optimizer)
        >>> [span.name for span in timeline.steps[0] if span.row == "compute"]
        ['forward', 'loss', 'backward', 'optimizer', 'step 0']
    """

    def __init__(
        self, parallel: DataParallel, steps: int = STEPS, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps: expected 1 or more, got {steps}; {STEPS} is the default")
        self.parallel = parallel
        self.steps: list[list[Span]] = []
        self._count = steps
        self._clock = clock
        self._shadowed: list[tuple[Any, str]] = []
        self._step_start: int | None = None
        self._step_mark: Any = None
        self._forward_end: int | None = None

    # -- taking it

    def __enter__(self) -> Timeline:
        parallel, comm = self.parallel, self.parallel.comm
        if comm.spans is not None:
            raise ValueError(
                "timeline: expected one at a time, got a second of the same ranks; leave the first one before"
            )
        device = parallel.world.device
        streams = StreamClock(device.xp, self._clock) if device.kind == "cuda" else None
        self._spans = Spans(self._count, self._clock, streams)
        comm.note(self._spans)
        self._shadow(parallel, "forward", self._forward)
        self._shadow(parallel, "backward", self._backward)
        self._shadow(parallel, "step", self._step)
        for name in ("start_all_reduce", "start_reduce_scatter", "start_all_gather"):
            self._shadow(comm, name, self._start)
        self._shadow(comm, "reduce_numbers", self._reduce_numbers)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for target, name in self._shadowed:
            delattr(target, name)
        self._shadowed.clear()
        self.parallel.comm.note(None)
        if error is None:
            self.steps = [step for step in self._spans.finished() if any(_is_step(span) for span in step)]

    def _shadow(self, target: Any, name: str, function: Callable[..., Any]) -> None:
        setattr(target, name, partial(function, getattr(target, name)))
        self._shadowed.append((target, name))

    def _begin(self) -> None:
        if self._step_start is not None:
            return
        spans = self._spans
        spans.labels = {id(view): f"chunk {i}" for i, view in enumerate(self.parallel.reducer.views)}
        spans.labels |= {id(view): f"weights {i}" for i, view in enumerate(self.parallel._replica.given)}
        spans.begin_step()
        self._forward_end = None
        self._step_start, self._step_mark = spans.clock(), spans.mark()

    def _compute(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        spans = self._spans
        mark, start = spans.mark(), spans.clock()
        result = call(*arguments, **options)
        spans.add(COMPUTE, name, start)
        spans.add_on_stream(COMPUTE, name, mark, spans.mark())
        return result

    def _forward(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if not self.parallel.model.training:  # an evaluation
            return call(*arguments, **options)
        self._begin()
        result = self._compute("forward", call, *arguments, **options)
        self._forward_end = self._spans.clock()
        return result

    def _backward(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        self._begin()
        if self._forward_end is not None:
            self._spans.add(COMPUTE, "loss", self._forward_end)
            self._forward_end = None
        self._compute("backward", call, *arguments, **options)

    def _step(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self._begin()
        number = self.parallel.step_count
        result = self._compute("optimizer", call, *arguments, **options)
        assert self._step_start is not None
        self._spans.add(COMPUTE, f"step {number}", self._step_start)
        self._spans.add_on_stream(COMPUTE, f"step {number}", self._step_mark, self._spans.mark())
        self._spans.end_step()
        self._step_start = None
        return result

    def _start(
        self,
        call: Callable[..., Request],
        array: Any,
        *arguments: Any,
        lane: str = "bulk",
        **options: Any,
    ) -> Request:
        spans = self._spans
        start = spans.clock()
        request = call(array, *arguments, lane=lane, **options)
        spans.add(lane, f"start {spans.label(array)}", start, kind=COMMUNICATION, nbytes=array.nbytes)
        return _Waited(request, spans, lane, array)

    def _reduce_numbers(
        self, call: Callable[..., tuple[list[int], list[float]]], *arguments: Any
    ) -> tuple[list[int], list[float]]:
        start = self._spans.clock()
        result = call(*arguments)
        self._spans.add("urgent", "step record", start, kind=COMMUNICATION)
        return result

    # -- what it says

    def figures(self) -> dict[str, float]:
        """Return microseconds of a step, of the communication in it, and of the communication that was not hidden.

        **Collective.** Medians over the steps that were kept, the largest of all ranks. Communication is the time in
        which this rank was in a message, or waited for other ranks to come to one, on any thread; exposed is the part
        of it in which the thread that computes was. Where that thread does the work of a transport, the two are equal.
        """
        step, communication, exposed = [], [], []
        for spans in self.steps:
            step.append(next(span.stop - span.start for span in spans if _is_step(span)))
            messages = [span for span in spans if span.kind == COMMUNICATION]
            communication.append(covered([(span.start, span.stop) for span in messages]))
            exposed.append(covered([(span.start, span.stop) for span in messages if span.waited]))
        values = [statistics.median(times) if times else 0.0 for times in (step, communication, exposed)]
        largest = np.array(values, dtype=np.float64) / 1000
        self.parallel.comm.all_reduce(largest, op="max", lane="urgent")
        names = ("traced_step_us", "communication_us", "exposed_communication_us")
        return dict(zip(names, largest.tolist()))

    def write(self, path: str) -> None:
        """Write the steps of all ranks as a Chrome trace; Perfetto (ui.perfetto.dev) opens it.

        **Collective.** A process a rank, a row a lane, thread and stream; rank 0 gathers the others' and writes. Times
        are those of rank 0's clock, see ``comm.clocks``.
        """
        world = self.parallel.world
        offset, error = clock_offset(world.comm, self._clock)
        mine = {
            "name": f"rank {world.rank} of {world.size} ({platform.node()}, {world.device})",
            "offset": offset,
            "error": error,
            "steps": self.steps,
        }
        texts = _gather_on_root(world.comm, json.dumps(mine).encode())

        def save() -> None:
            with open(path, "w", encoding="utf-8") as file:
                json.dump(chrome_trace([json.loads(text) for text in texts], world.transport), file)

        on_root(world.comm, save)


def _is_step(span: Span) -> bool:
    return span.row == COMPUTE and span.name.startswith("step ")


def _gather_on_root(comm: Communicator, data: bytes) -> list[bytes]:
    """Return every rank's bytes on rank 0, by rank, and nothing elsewhere. **Collective.**"""
    length = np.array([len(data)], dtype=np.int64)
    if comm.rank:
        comm.send(length, to=0)
        comm.send(np.frombuffer(data, dtype=np.uint8).copy(), to=0)
        return []
    found = [data]
    for rank in range(1, comm.size):
        comm.recv(length, source=rank)
        content = np.empty(int(length[0]), dtype=np.uint8)
        comm.recv(content, source=rank)
        found.append(content.tobytes())
    return found


def chrome_trace(ranks: Sequence[dict[str, Any]], transport: str) -> dict[str, Any]:
    """Return the trace of some ranks as the JSON object that Chrome's trace viewer and Perfetto read.

    **Local.** The format is the "JSON Object Format" of the Trace Event Format (Google, 2016): complete events (``X``)
    in microseconds, names of processes and threads as metadata (``M``).

    Args:
        ranks: by rank: ``name``, ``steps``, and what ``clock_offset`` said as ``offset`` and ``error``.
        transport: how bytes moved.
    """
    spans = [[Span(*span) for step in rank["steps"] for span in step] for rank in ranks]
    first = min((s.start - rank["offset"] for rank, own in zip(ranks, spans) for s in own), default=0)
    events: list[dict[str, Any]] = []
    for number, (rank, own) in enumerate(zip(ranks, spans)):
        rows = {row: i for i, row in enumerate(sorted({span.row for span in own}, key=_order))}
        events += [
            _named("process_name", number, 0, name=rank["name"]),
            _named("process_sort_index", number, 0, sort_index=number),
        ]
        for row, i in rows.items():
            events += [
                _named("thread_name", number, i, name=row),
                _named("thread_sort_index", number, i, sort_index=i),
            ]
        for span in sorted(own, key=lambda span: (span.start, -span.stop)):
            event = {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "pid": number,
                "tid": rows[span.row],
                "ts": (span.start - rank["offset"] - first) / 1000,
                "dur": (span.stop - span.start) / 1000,
            }
            events.append(event if span.nbytes is None else event | {"args": {"bytes": span.nbytes}})
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "transport": transport,
            "clock": "rank 0's; offsets by the fastest of several exchanges with it, wrong by clock_error_us at most",
            "clock_offset_us": [rank["offset"] / 1000 for rank in ranks],
            "clock_error_us": [rank["error"] / 1000 for rank in ranks],
        },
    }


def _named(kind: str, process: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": arguments}


def _order(row: str) -> tuple[int, str]:
    kinds = (COMPUTE, "bulk", "urgent", "stream")
    return next((i for i, kind in enumerate(kinds) if row.startswith(kind)), len(kinds)), row
