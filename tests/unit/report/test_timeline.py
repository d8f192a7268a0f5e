"""The timeline of one rank and of several, in threads: the file it writes, its figures, and what it leaves behind."""

import json
import time

import numpy as np
import on_device
import pytest
import traces
from thread_ranks import run

import mpdp
from mpdp import nn, optim
from mpdp.comm.activity import Activity
from mpdp.device import CPU
from mpdp.report.timeline import Timeline, chrome_trace
from mpdp.world import World

SECOND = 1_000_000_000


def world_of(comm):
    """Return a world over a communicator of threads."""
    return World(
        rank=comm.rank,
        size=comm.size,
        local_rank=comm.rank,
        local_size=comm.size,
        node=0,
        num_nodes=1,
        device=CPU,
        comm=comm,
        timeout=30.0,
        activity=Activity(),
        transport=comm.transport,
        axes={"data": comm.size},
        _communicators={"data": comm.duplicate()},
    )


def replica(world=None, chunk_bytes=1 << 16):
    mpdp.seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return mpdp.DataParallel(model, world, chunk_bytes=chunk_bytes), optim.SGD(lr=0.01)


def update(parallel, optimizer, final=(True,)):
    x, y = np.ones((8, 64), "float32"), np.zeros(8, "int64")
    for last in final:
        parallel.backward(nn.cross_entropy(parallel(x), y), final=last)
    return parallel.step(optimizer)


def chunk_bytes(parallel):
    return [view.nbytes for view in parallel.reducer.views]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_whose_clocks_differ_stand_on_one_axis(tmp_path, size):
    path = tmp_path / "trace.json"

    def train(comm):
        def clock():
            return time.perf_counter_ns() + comm.rank * 7 * SECOND

        parallel, optimizer = replica(world_of(comm))
        with Timeline(parallel, clock=clock) as timeline:
            for _ in range(4):
                update(parallel, optimizer)
        timeline.write(str(path))
        return (
            timeline.figures(),
            chunk_bytes(parallel),
            [[tuple(s) for s in step] for step in timeline.steps],
        )

    results = run(size, train)
    chunks = results[0][1]
    assert len(chunks) > 2
    trace = traces.load(path, size, chunks)
    other = trace["otherData"]
    assert other["transport"] == "threads"
    for rank in range(size):
        error = other["clock_error_us"][rank]
        assert abs(other["clock_offset_us"][rank] - rank * 7e6) <= error
    # The record makes all ranks meet: on one axis, the last to come to it comes before the first to leave it.
    records = [event for event in trace["traceEvents"] if event["name"] == "step record"]
    slack = sum(other["clock_error_us"])
    for step in range(4 if size > 1 else 0):
        meeting = [[e for e in records if e["pid"] == rank][step] for rank in range(size)]
        assert max(e["ts"] for e in meeting) <= min(e["ts"] + e["dur"] for e in meeting) + slack
    figures = results[0][0]
    assert all(result[0] == figures for result in results)
    assert 0 < figures["communication_us"] <= figures["traced_step_us"]
    assert (
        figures["exposed_communication_us"] == figures["communication_us"]
    )  # the computing thread does the work


def test_a_step_has_all_its_micro_batches_and_evaluation_is_no_step(tmp_path):
    parallel, optimizer = replica()
    with Timeline(parallel, steps=2) as timeline:
        for _ in range(3):
            update(parallel, optimizer, final=(False, False, True))
            parallel.model.eval()
            parallel(np.ones((2, 64), "float32"))
            parallel.model.train()
    names = [[span.name for span in step if span.row == "compute"] for step in timeline.steps]
    assert names == [[*["forward", "loss", "backward"] * 3, "optimizer", f"step {i}"] for i in (1, 2)]
    timeline.write(str(tmp_path / "trace.json"))
    traces.load(tmp_path / "trace.json", 1, chunk_bytes(parallel))


def test_a_gpu_has_a_row_of_its_stream(device, tmp_path):
    parallel, optimizer = replica(on_device.world())
    x, y = on_device.put(np.ones((8, 64), "float32")), on_device.put(np.zeros(8, "int64"))
    with Timeline(parallel) as timeline:
        for _ in range(3):
            parallel.backward(nn.cross_entropy(parallel(x), y))
            parallel.step(optimizer)
    timeline.write(str(tmp_path / "trace.json"))
    traces.load(tmp_path / "trace.json", 1, chunk_bytes(parallel))
    for step in timeline.steps:
        streamed = {span.name: span for span in step if span.row == "stream compute"}
        if device.kind == "cpu":
            assert not streamed
            continue
        whole = next(span for name, span in streamed.items() if name.startswith("step "))
        host = next(span for span in step if span.row == "compute" and span.name == whole.name)
        assert whole.start <= streamed["forward"].start < streamed["forward"].stop
        assert (
            streamed["forward"].stop <= streamed["backward"].start < streamed["optimizer"].stop <= whole.stop
        )
        assert whole.stop - host.start > 0  # no work of a stream before the host has given it


def test_nothing_of_it_is_left_behind():
    parallel, optimizer = replica()
    before = dict(vars(parallel)), dict(vars(parallel.comm))
    with Timeline(parallel) as timeline:
        assert parallel.comm.spans is not None
        assert "forward" in vars(parallel)
    assert timeline.steps == []
    assert timeline.figures()["traced_step_us"] == 0.0
    assert vars(parallel) == before[0]
    assert vars(parallel.comm) | {"spans": None} == before[1] | {"spans": None}
    update(parallel, optimizer)
    assert timeline.steps == []


def test_it_changes_no_bit():
    losses, weights = [], []
    for traced in (False, True):
        parallel, optimizer = replica()
        if traced:
            with Timeline(parallel):
                losses.append([update(parallel, optimizer) for _ in range(3)])
        else:
            losses.append([update(parallel, optimizer) for _ in range(3)])
        weights.append(parallel.weights.copy())
    assert losses[0] == losses[1]
    assert np.array_equal(*weights)


def test_a_failed_step_leaves_no_half_of_one():
    parallel, optimizer = replica()
    with pytest.raises(ZeroDivisionError), Timeline(parallel) as timeline:
        update(parallel, optimizer)
        parallel(np.ones((8, 64), "float32"))
        raise ZeroDivisionError
    assert timeline.steps == [] and "step" not in vars(parallel) and parallel.comm.spans is None


def test_frozen_parameters_change_the_chunks():
    parallel, optimizer = replica()
    with Timeline(parallel) as timeline:
        update(parallel, optimizer)
        parallel.freeze("0.weight", "2.weight")
        update(parallel, optimizer)
    sizes = [[span.nbytes for span in step if span.name.startswith("chunk ")] for step in timeline.steps]
    assert len(sizes[0]) > len(sizes[1]) and sizes[1] == chunk_bytes(parallel)


@pytest.mark.parametrize("steps", [0, -1])
def test_it_keeps_at_least_one_step(steps):
    with pytest.raises(ValueError, match=r"steps: expected 1 or more, got"):
        Timeline(replica()[0], steps=steps)


def test_two_at_a_time_are_refused():
    parallel, optimizer = replica()
    with Timeline(parallel) as outer:
        with pytest.raises(ValueError, match=r"timeline: expected one at a time"), Timeline(parallel):
            pass
        update(parallel, optimizer)
    assert len(outer.steps) == 1


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
    parallel, optimizer = replica()
    with Timeline(parallel) as timeline:
        update(parallel, optimizer)
    with pytest.raises(OSError, match="nowhere"):
        timeline.write(str(tmp_path / "nowhere" / "trace.json"))


def test_a_trace_of_nothing_is_a_trace():
    trace = chrome_trace([{"name": "rank 0", "offset": 0, "error": 0, "steps": []}], "solo")
    assert json.loads(json.dumps(trace))["traceEvents"][0]["args"] == {"name": "rank 0"}
