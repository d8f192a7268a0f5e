"""Every collective, whatever the transport, the piece size and the thread that carries it."""

import pytest
from launching import PROGRAMS


@pytest.mark.parametrize("transport", ["mpi", "shared_memory", "two_level"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_collective(job, size, transport):
    environ = {"MPDP_TRANSPORT": transport, "MPDP_NODES": "2" if transport == "two_level" else None}
    result = job(PROGRAMS / "collectives.py", n=size, timeout=120, environ=environ).check()
    assert result.output.count("collectives passed on rank") == size
    assert result.output.count(f", {transport}\n") >= size


def test_every_collective_of_a_world_of_one(job):
    result = job(PROGRAMS / "collectives.py", n=1).check()
    assert "collectives passed on rank 0 of 1, solo" in result.output
