"""Spans: what is kept, what transports note of their own, and a GPU's streams without a GPU."""

import itertools
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from thread_ranks import run

from mpdp.comm.solo import SoloCommunicator
from mpdp.comm.spans import COMMUNICATION, STREAM, Spans, StreamClock, covered
from mpdp.comm.staged import CudaCopies


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted).map(tuple), max_size=12))
def test_covered_is_the_length_of_the_union(spans):
    assert covered(spans) == len({i for start, stop in spans for i in range(start, stop)})


def ticking():
    return itertools.count(0, 10).__next__


def test_only_the_last_steps_are_kept_and_nothing_between_them():
    spans = Spans(3, ticking())
    for step in range(50):
        spans.add("compute", "before the step", 0)
        spans.begin_step()
        for _ in range(step):
            spans.add("compute", f"in {step}", spans.clock())
        spans.end_step()
        spans.add("compute", "behind the step", 0)
    assert [{span.name for span in step} for step in spans.finished()] == [{"in 47"}, {"in 48"}, {"in 49"}]
    assert [len(step) for step in spans.finished()] == [47, 48, 49]


def noting(comm):
    spans = Spans(1)
    spans.begin_step()
    comm.note(spans)
    return spans


def test_a_blocking_transport_notes_a_message_where_it_travels():
    comm = SoloCommunicator()
    spans = noting(comm)
    array = np.ones(100, np.float32)
    spans.labels = {id(array): "chunk 7"}
    comm.start_all_reduce(array).wait()
    comm.all_reduce(np.ones(2), lane="urgent")
    comm.all_reduce(np.empty(0))
    comm.note(None)
    comm.all_reduce(array)
    first, second = spans.finished()[0]
    assert (first.row, first.name, first.nbytes, first.waited) == ("bulk", "chunk 7", 400, True)
    assert (second.row, second.name, second.nbytes, second.waited) == ("urgent", "message", 16, True)
    assert first.kind == second.kind == COMMUNICATION


def test_direct_notes_each_message_once_also_where_it_is_carried_out_later():
    def reduce(comm):
        mapped = comm.allocate(3 << 20).array(np.float32, 3 << 18)
        arrays = [
            mapped[: 1 << 18],
            mapped[1 << 18 : 2 << 18],
            mapped[2 << 18 :],
            np.ones(1 << 18, np.float32),
        ]
        arrays.append(np.ones(4, np.float32))
        spans = noting(comm)
        spans.labels = {id(array): f"chunk {i}" for i, array in enumerate(arrays)}
        for request in [comm.start_all_reduce(array) for array in arrays]:
            request.wait()
        return [(span.row, span.name, span.nbytes) for span in spans.finished()[0]]

    expected = [("bulk", f"chunk {i}", nbytes) for i, nbytes in enumerate([1 << 20] * 4 + [16])]
    assert run(3, reduce) == [expected] * 3


class FakeCupy:
    """Streams whose work takes as many milliseconds as bytes were copied, and events on them."""

    def __init__(self):
        cupy = self

        class Stream:
            def __init__(self, non_blocking=False):
                self.at = 0.0
                self.ptr = self

        class Event:
            def __init__(self, block=False, disable_timing=False):
                self.at, self.timed = None, not disable_timing

            def record(self, stream=None):
                self.at = (stream or cupy.current).at

            def synchronize(self):
                assert self.at is not None

        def elapsed(start, stop):
            assert start.timed and stop.timed
            return stop.at - start.at

        def copy(target, source, nbytes, direction, stream):
            stream.at += nbytes

        self.current = Stream()
        self.cuda = SimpleNamespace(
            Stream=Stream,
            Event=Event,
            Device=lambda ordinal: threading.Lock(),
            get_current_stream=lambda: self.current,
            get_elapsed_time=elapsed,
            runtime=SimpleNamespace(memcpyAsync=copy, memcpyDeviceToHost=2, memcpyHostToDevice=1),
        )


MILLISECOND = 1_000_000


def test_a_point_on_a_stream_is_told_in_the_hosts_clock():
    cupy = FakeCupy()
    clock = StreamClock(cupy, lambda: 500)
    cupy.current.at = 2.5
    assert clock.nanoseconds(clock.mark()) == 500 + 2.5 * MILLISECOND
    assert clock.nanoseconds(clock.mark(cupy.cuda.Stream())) == 500


def test_copies_are_noted_on_their_streams_while_a_timeline_is_taken():
    cupy = FakeCupy()
    copies = CudaCopies(SimpleNamespace(xp=cupy, ordinal=0))
    host = np.zeros(3, np.float32)
    array = SimpleNamespace(data=SimpleNamespace(ptr=0), nbytes=12)
    copies.fetch(array, host, [])
    spans = Spans(1, streams=StreamClock(cupy, lambda: 0))
    spans.begin_step()
    copies.spans = spans
    copies.fetch(array, host, [])
    copies.put(host, array)
    copies.spans = None
    copies.put(host, array)
    out, back = spans.finished()[0]
    assert (out.row, out.kind, out.nbytes, out.waited) == ("stream copy out", STREAM, 12, False)
    assert (out.start, out.stop) == (12 * MILLISECOND, 24 * MILLISECOND)
    assert (back.row, back.start, back.stop) == ("stream copy in", 0, 12 * MILLISECOND)


def test_without_a_gpu_a_point_is_none():
    spans = Spans(1)
    spans.begin_step()
    spans.add_on_stream("compute", "forward", spans.mark(), spans.mark())
    assert spans.finished() == [[]]


def test_an_error_of_a_message_passes_through():
    class Broken(SoloCommunicator):
        def _all_reduce(self, array, op, lane):
            raise OSError("cable")

    comm = Broken()
    spans = noting(comm)
    with pytest.raises(OSError, match="cable"):
        comm.all_reduce(np.ones(3))
    assert len(spans.finished()[0]) == 1
