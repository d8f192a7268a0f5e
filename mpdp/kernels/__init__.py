"""Kernels: the arithmetic on arrays that a training step does, one implementation a kind of device.

``base`` states the interface, ``cpu`` implements it with NumPy, ``random`` holds the counter-based
generator that gives the same bits everywhere. Code above this package never asks which array module
it runs on; it asks :func:`of` for the kernels of its arrays.
"""

from __future__ import annotations

from typing import Any

from ..device import Device, device_of
from ..errors import DeviceError
from . import cpu
from .base import Kernels

__all__ = ["Kernels", "for_device", "of"]


def for_device(device: Device) -> Kernels:
    """Return the kernels of a device. **Local.**"""
    if device.kind == "cpu":
        return cpu.KERNELS
    raise DeviceError(f"device: expected cpu (the kernels of this version), got {device}")


def of(array: Any) -> Kernels:
    """Return the kernels for the device on which ``array`` lives. **Local.**"""
    return for_device(device_of(array))
