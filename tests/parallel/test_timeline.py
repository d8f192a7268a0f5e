"""The timeline of ranks that are processes: its file, its figures, and that clocks of one host need no correction."""

import json
import sys

import launching
import pytest
import traces
from launching import PROGRAMS


@pytest.mark.parametrize(
    ("transport", "workload", "size"),
    [("shared_memory", "mlp", 3), ("mpi", "mlp", 2), ("shared_memory", "chargpt", 2), ("mpi", "chargpt", 2)],
)
def test_every_rank_has_its_rows(job, tmp_path, transport, workload, size):
    path = tmp_path / "trace.json"
    result = job(PROGRAMS / "timeline.py", transport, workload, str(path), n=size, timeout=60).check()
    figures, chunks = result.results[0]
    assert all(value == [figures, chunks] for value in result.results)
    assert len(chunks) > 4 if workload == "chargpt" else len(chunks) == 1
    other = traces.load(path, size, chunks)["otherData"]
    assert other["transport"] == transport
    if workload == "chargpt":  # chunks start in the course of backward, not at its end
        check_spread(json.loads(path.read_text())["traceEvents"])
    for offset, error in zip(other["clock_offset_us"], other["clock_error_us"]):
        assert abs(offset) <= error  # one host, one clock
    assert 0 < figures["communication_us"] <= figures["traced_step_us"]
    # A rank that waits is not computing here, and the largest over ranks is taken of each figure alone.
    assert figures["exposed_communication_us"] == figures["communication_us"]


def check_spread(events):
    """Check that the first chunk starts in the first half of a backward pass: in both, but where the core was lost."""
    own = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    backward = [e for e in own if e["name"] == "backward"]
    starts = [e for e in own if e["name"] == "start chunk 0"]
    assert len(backward) == len(starts) == 2
    parts = [(first["ts"] - whole["ts"]) / whole["dur"] for whole, first in zip(backward, starts)]
    assert min(parts) < 0.5, parts


def test_the_progress_thread_has_a_row_of_its_own(job):
    result = job(PROGRAMS / "timeline.py", "mpi", "thread", "-", n=2).check()
    expected = [["bulk, mpdp bulk lane", f"chunk {i}", 1 << 18, False] for i in range(3)]
    assert result.results == [expected] * 2


def test_bench_train_writes_the_trace_and_the_figures(job, tmp_path):
    result, trace = tmp_path / "result.json", tmp_path / "trace.json"
    line, settings = launching.mpirun(2)
    words = ["-m", "mpdp", "bench", "train", "mlp", "--quick", "--batch", "4", "--json", str(result)]
    done = launching.run(
        [*line, sys.executable, *words, "--trace", str(trace)], environ=settings, timeout=60
    ).check()
    figures = json.loads(result.read_text())
    assert 0 < figures["communication_us"] <= figures["traced_step_us"]
    assert 0 < figures["exposed_communication_us"] <= figures["communication_us"]
    assert f"of which {figures['exposed_communication_us']:.0f} us not hidden" in done.output
    steps = [e for e in traces.load(trace, 2)["traceEvents"] if e["name"].startswith("step ")]
    # As many as there is time for.
    assert 1 <= len({e["name"] for e in steps if e["name"] != "step record"}) <= 16
