"""Optimizers, clipping, averages and schedules over ranks; see programs/optimizers.py for the cases."""

import pytest
from launching import PROGRAMS


@pytest.mark.parametrize(("size", "transport"), [(1, "auto"), (2, "mpi"), (3, "auto")])
def test_optimizers_equal_their_formulas(job, size, transport):
    result = job(
        PROGRAMS / "optimizers.py", n=size, timeout=90, environ={"MPDP_TRANSPORT": transport}
    ).check()
    assert result.output.count("all passed on rank") == size
