"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import launching
import on_device
from hypothesis import HealthCheck, settings

import mpdp
from mpdp import guard
from mpdp.device import Device

# `pytest --hypothesis-profile=long` tries two hundred times as many examples where a test does not say how many.
settings.register_profile("long", max_examples=20_000, deadline=None)
# Else the same examples each time, however slow the machine is: no test fails by chance.
settings.register_profile(
    "short", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("short")


@pytest.fixture(scope="session", autouse=True)
def _world_of_the_tests() -> None:
    """Join the world of this process on the CPU, also where there is a GPU that ``"auto"`` would take."""
    mpdp.init(device="cpu")


@pytest.fixture(autouse=True)
def _signals_of_the_tests() -> Iterator[None]:
    """Let no trainer with a loop of its own, which a test has left alive, take signals in the tests after it."""
    yield
    guard.current.notice._listeners.clear()
    guard.current.notice.sync()


@pytest.fixture(autouse=True)
def _updates_of_the_tests() -> Iterator[None]:
    """Forget the failed updates of trainers that are gone: at the end of a program they are its error."""
    yield
    _forget_updates()


def pytest_sessionfinish() -> None:
    gc.collect()
    _forget_updates()


def _forget_updates() -> None:
    updates = sys.modules.get("mpdp.training.updates")
    if updates is not None:
        updates._unread.clear()


@pytest.fixture
def job() -> Callable[..., launching.Result]:
    """Run a script as n ranks: ``job("script.py", "argument", n=3, form="mpdp run")``; see `launching`."""
    if launching.mpi() is None:
        if "mpi" in os.environ.get("MPDP_REQUIRE", "").split(","):
            pytest.fail("MPDP_REQUIRE names mpi, and mpi4py finds no MPI library with a launcher")
        pytest.skip("mpi4py finds no MPI library with a launcher")
    return launching.launch


@pytest.fixture
def gpu() -> None:
    """Skip the test where there is no GPU; ``MPDP_REQUIRE=cuda`` makes that a failure."""
    on_device.use("cuda")
    on_device.leave()


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Run the test on the CPU and on a GPU; ``MPDP_REQUIRE=cuda`` makes a missing GPU a failure."""
    yield on_device.use(request.param)
    on_device.leave()
