"""Odd but legal situations in training, each against a plain formula; see programs/semantics.py for the cases."""

import pytest
from launching import PROGRAMS


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_odd_situations_are_exact(job, size):
    result = job(PROGRAMS / "semantics.py", n=size, timeout=120).check()
    assert result.output.count("all passed on rank") == size
