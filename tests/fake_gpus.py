"""A stand-in for CuPy on a machine without GPUs: it counts, and writes down what it is asked to do."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def install(monkeypatch: pytest.MonkeyPatch, count: int | str, log: list[str] | None = None) -> ModuleType:
    """Make ``import cupy`` give a module that sees ``count`` GPUs; a text is the driver's refusal to tell."""
    log = log if log is not None else []

    class CUDARuntimeError(RuntimeError):
        pass

    def device_count() -> int:
        log.append("count")
        if isinstance(count, str):
            raise CUDARuntimeError(count)
        return count

    class Device:
        def __init__(self, ordinal: int) -> None:
            self.id = ordinal
            self.pci_bus_id = f"0000:0{ordinal}:00.0"
            self.mem_info = ((10 - ordinal) << 30, 16 << 30)

        def use(self) -> None:
            log.append(f"use {self.id}")

    cupy: Any = ModuleType("cupy")
    cupy.__spec__ = ModuleSpec("cupy", None)
    properties = {"name": b"Fake", "uuid": b"\x01\x02", "totalGlobalMem": 16 << 30}
    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=device_count,
        getDevice=lambda: 0,
        getDeviceProperties=lambda ordinal: {**properties, "uuid": bytes([ordinal] * 16)},
    )
    cupy.cuda = SimpleNamespace(runtime=runtime, Device=Device)
    cupy.get_default_memory_pool = lambda: SimpleNamespace(free_bytes=lambda: 1 << 30)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy
