"""Fixtures for all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import launching


@pytest.fixture
def job() -> Callable[..., launching.Result]:
    """Run a script as n ranks: ``job("script.py", "argument", n=3, form="mpdp run")``; see `launching`."""
    if launching.mpi() is None:
        if "mpi" in os.environ.get("MPDP_REQUIRE", "").split(","):
            pytest.fail("MPDP_REQUIRE names mpi, and mpi4py finds no MPI library with a launcher")
        pytest.skip("mpi4py finds no MPI library with a launcher")
    return launching.launch
