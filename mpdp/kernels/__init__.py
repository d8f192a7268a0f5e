"""Kernels: the arithmetic on arrays that a training step does, one implementation a kind of device.

``base`` states the interface, ``cpu`` implements it with NumPy, ``cuda`` with CuPy and kernels of our own,
``random`` holds the counter-based generator that gives the same bits everywhere. Code above this package never
asks which array module it runs on; it asks :func:`of` for the kernels of its arrays.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import cache
from typing import Any

from ..device import Device, device_of
from . import cpu
from .base import Kernels

__all__ = ["Kernels", "for_device", "hold", "move", "of"]

_holder: ContextVar[int] = ContextVar("mpdp_kernels_holder", default=0)


def hold(number: int) -> None:
    """Let the calling context have GPU kernels of its own.

    **Local.** They hold what one stream uses at a time: workspaces, the step for errors. Ranks that are threads of one
    process and may share a GPU therefore each take another number.
    """
    _holder.set(number)


def for_device(device: Device) -> Kernels:
    """Return the kernels of a device. **Local.**

    Raises:
        MissingDependencyError: a GPU, and CuPy is not installed.
        DeviceError: a GPU that this process does not see.
    """
    return cpu.KERNELS if device.kind == "cpu" else _cuda(device.ordinal, _holder.get())


def of(array: Any) -> Kernels:
    """Return the kernels for the device on which ``array`` lives. **Local.**"""
    return for_device(device_of(array))


def move(array: Any, device: Device) -> Any:
    """Return the contents of an array on ``device``; the array itself where it is there already. **Local.**

    A copy waits until it is done.
    """
    source = device_of(array)
    if source == device:
        return array
    if source.kind == "cpu":
        return for_device(device).from_host(array)
    if device.kind == "cpu":
        return of(array).to_numpy(array)
    kernels = for_device(device)
    with of(array).active():
        array = kernels.xp.ascontiguousarray(array)
        kernels.xp.cuda.get_current_stream().synchronize()  # the copy runs on a stream of the other GPU
    with kernels.active():
        copy = array.copy()  # CuPy copies to the current device
        kernels.xp.cuda.get_current_stream().synchronize()
    return copy


@cache
def _cuda(ordinal: int, holder: int) -> Kernels:
    """Return a holder's kernels of a GPU, made when it is first used: importing this package starts no CUDA."""
    from .cuda import CudaKernels

    return CudaKernels(ordinal)
