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
