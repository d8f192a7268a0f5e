"""Steps as graphs on several ranks, see programs/graphs.py: with real graphs on GPUs, and with stand-ins on the CPU."""

import pytest
from launching import PROGRAMS


@pytest.mark.parametrize("mode", ["cpu", "inside"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_stand_ins_have_the_bits_of_eager_steps(job, size, mode):
    result = job(PROGRAMS / "graphs.py", mode, n=size, timeout=120).check()
    assert result.output.count("all passed on rank") == size


@pytest.mark.parametrize(("transport", "size"), [("cuda_ipc", 1), ("cuda_ipc", 2), ("staged", 2)])
def test_graphs_have_the_bits_of_eager_steps(gpu, job, size, transport):
    environ = {"MPDP_TRANSPORT": transport}
    result = job(PROGRAMS / "graphs.py", "cuda", n=size, timeout=300, environ=environ).check()
    assert result.output.count("all passed on rank") == size


@pytest.mark.parametrize(("size", "what"), [(1, "dropped"), (2, "kept")])
def test_a_failed_last_update_ends_the_program_with_its_error(job, size, what):
    result = job(PROGRAMS / "graph_end.py", "cpu", what, n=size, timeout=60)
    assert result.rc != 0 and not result.timed_out and not result.orphans, f"{result}"
    assert result.output.count("at the end") == size
    report = f"NonFiniteError: loss: expected a finite sum at step 5, got nan (from rank {size - 1})"
    assert report in result.output, f"{result}"


@pytest.mark.parametrize(("size", "what"), [(1, "kept"), (2, "dropped")])
def test_a_bad_label_in_the_last_update_on_a_gpu(gpu, job, size, what):
    result = job(PROGRAMS / "graph_end.py", "cuda", what, n=size, timeout=60)
    assert result.rc != 0 and not result.timed_out and not result.orphans, f"{result}"
    found = "ValueError: target: expected class indices in 0..2, got 7 at sample 1"
    assert result.output.count("at the end") == size and found in result.output, f"{result}"
