"""Placements over the transports that processes have; see programs/placements.py."""

import pytest
from launching import PROGRAMS


@pytest.mark.parametrize(("transport", "size"), [("shared_memory", 3), ("mpi", 2), ("two_level", 3)])
def test_placements_agree_over_processes(job, tmp_path, transport, size):
    environ = {"MPDP_TRANSPORT": transport, "MPDP_NODES": "2" if transport == "two_level" else "1"}
    result = job(PROGRAMS / "placements.py", "cpu", tmp_path, n=size, timeout=120, environ=environ).check()
    assert result.output.count("all passed on rank") == size


@pytest.mark.parametrize(("transport", "size"), [("cuda_ipc", 1), ("cuda_ipc", 2), ("staged", 2)])
def test_placements_agree_between_gpus(gpu, job, tmp_path, transport, size):
    environ = {"MPDP_TRANSPORT": transport}
    result = job(PROGRAMS / "placements.py", "cuda", tmp_path, n=size, timeout=300, environ=environ).check()
    assert result.output.count("all passed on rank") == size
