"""Odd but legal situations in training, each against a plain formula; see programs/semantics.py for the cases."""

import pytest
from launching import PROGRAMS


@pytest.mark.parametrize(
    ("size", "transport"), [(1, "auto"), (2, "auto"), (3, "auto"), (4, "auto"), (3, "mpi")]
)
def test_odd_situations_are_exact(job, size, transport):
    environ = {"MPDP_TRANSPORT": transport}
    result = job(PROGRAMS / "semantics.py", n=size, timeout=120, environ=environ).check()
    assert result.output.count("all passed on rank") == size
