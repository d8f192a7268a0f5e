"""Where the tests of the `device` fixture put their arrays.

One test body runs on every device: what an operation works on comes from ``xp`` or goes through ``put``; what is
compared comes back through ``host``. Without the fixture all of this is NumPy.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from typing import Any

import numpy as np
import pytest

import mpdp
from mpdp import kernels
from mpdp.autodiff import Tensor
from mpdp.device import CPU, Device


class Place:
    """The device that the running test is on."""

    def __init__(self) -> None:
        self.device: Device = CPU

    @property
    def kernels(self) -> Any:
        """The kernels of the device."""
        return kernels.for_device(self.device)


here = Place()


class _ArrayModule:
    """NumPy or CuPy, whichever the running test is on."""

    def __getattr__(self, name: str) -> Any:
        return getattr(here.device.xp, name)


xp = _ArrayModule()


def put(value: Any) -> Any:
    """Return a NumPy array, a list or a number as an array on the device of the test."""
    return kernels.move(np.asarray(value), here.device)


def host(value: Any) -> np.ndarray:
    """Return a tensor's or an array's contents as a NumPy array."""
    value = value.data if isinstance(value, Tensor) else value
    return np.asarray(kernels.of(value).to_numpy(value)) if hasattr(value, "dtype") else np.asarray(value)


def world() -> mpdp.World:
    """Return the world of the tests, on the device of the running one."""
    return dataclasses.replace(mpdp.init(), device=here.device)


def only_on_the_cpu(why: str) -> None:
    """Skip the running test on a GPU."""
    if here.device != CPU:
        pytest.skip(f"not on a GPU: {why}")


class found_later:
    """``pytest.raises``, also for what a GPU finds while the host has gone on: it is asked at the end of the block."""

    def __init__(self, error: type[Exception], match: str) -> None:
        self._raises = pytest.raises(error, match=match)

    def __enter__(self) -> Any:
        return self._raises.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        if kind is None and here.device.kind == "cuda":
            xp.cuda.get_current_stream().synchronize()
            error = here.kernels.pending_error()
            kind = None if error is None else type(error)
        return self._raises.__exit__(kind, error, trace)


def use(kind: str) -> Device:
    """Put the running test on a device; skip it, or fail it, where there is no such device."""
    device = Device(kind)
    if kind == "cuda":
        why = _missing_gpu()
        if why and "cuda" in os.environ.get("MPDP_REQUIRE", "").split(","):
            pytest.fail(f"MPDP_REQUIRE names cuda, and {why}")
        if why:
            pytest.skip(why)
    here.device = device.use()
    if kind == "cuda":
        here.kernels.begin_step(0)  # whatever test was here before
    return device


def leave() -> None:
    """Go back to the CPU; an error that nobody asked for fails the test."""
    device, here.device = here.device, CPU
    if device.kind == "cuda":
        device.xp.cuda.get_current_stream().synchronize()
        error = kernels.for_device(device).pending_error()
        assert error is None, error


def _missing_gpu() -> str:
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    runtime = Device("cuda").xp.cuda.runtime
    try:
        return "" if runtime.getDeviceCount() else "CUDA shows no GPU"
    except runtime.CUDARuntimeError as error:
        return f"CUDA shows no GPU: {error}"
