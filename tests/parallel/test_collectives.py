"""The MPI communicator, whatever the piece size and the thread that carries it."""

import pytest
from launching import PROGRAMS


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective(job, size):
    result = job(PROGRAMS / "collectives.py", n=size, timeout=60).check()
    assert result.output.count("collectives passed on rank") == size
