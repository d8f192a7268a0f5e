"""Modules of other libraries on several ranks; runs where the library can be imported."""

import importlib.util

import pytest
from launching import PROGRAMS


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_a_torch_module_trains_on_n_ranks_as_on_one(job):
    for n in (1, 2, 3):
        result = job(PROGRAMS / "interop_torch.py", n=n, timeout=60).check()
        assert len(result.results) == n and len({digest for digest, _ in result.results}) == 1, result
        assert all(difference < 1e-12 for _, difference in result.results), result
