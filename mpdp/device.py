"""Device: where arrays live, as a value that is known at run time.

A device is a kind (``"cpu"`` or ``"cuda"``) and an ordinal; two devices are equal when both are.
This module knows array modules and nothing of ranks, tapes or messages. Which GPU a rank gets is decided in
``device_choice``, how much memory GPUs have is asked in ``device_memory``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from .errors import DeviceError, DeviceMismatchError, MissingDependencyError

_KINDS = ("cpu", "cuda")


@dataclass(frozen=True, order=True)
class Device:
    """Name a device by kind and ordinal; ``Device("cuda:1")`` equals ``Device("cuda", 1)``.

    **Local.** Creating one touches no hardware.

    Args:
        kind: ``"cpu"``, ``"cuda"`` or either with an ordinal, as in ``"cuda:1"``.
        ordinal: index of the GPU as this process sees it; always 0 for the CPU.

    Raises:
        ValueError: an unknown kind or a negative ordinal.

    Example:
        >>> Device("cuda:1") == Device("cuda", 1)
        True
        >>> str(Device("cpu"))
        'cpu'
    """

    kind: str
    ordinal: int = 0

    def __post_init__(self) -> None:
        kind, colon, text = self.kind.partition(":")
        ordinal: Any = self.ordinal
        if colon:
            if not text.isdigit():
                raise ValueError(f'device: expected "cpu", "cuda" or "cuda:<ordinal>", got {self.kind!r}')
            ordinal = int(text)
        if kind not in _KINDS:
            raise ValueError(f'device: expected "cpu", "cuda" or "cuda:<ordinal>", got {self.kind!r}')
        if not isinstance(ordinal, int) or ordinal < 0 or (kind == "cpu" and ordinal != 0):
            raise ValueError(f"device: expected an ordinal of 0 or more (0 on the CPU), got {ordinal!r}")
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "ordinal", ordinal)

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"cuda:{self.ordinal}"

    @property
    def xp(self) -> ModuleType:
        """The array module of the device: ``numpy``, or ``cupy`` for a GPU."""
        if self.kind == "cpu":
            import numpy

            return numpy
        try:
            import cupy  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise MissingDependencyError(
                f"device {self}: expected CuPy to be installed, found none; "
                'install it with: pip install "mpdp[cuda13]" (or cuda12 for CUDA 12)'
            ) from error
        return cupy

    def use(self) -> Device:
        """Make the device the current one of this thread, and return it. **Local.**

        Arrays are made on the current GPU, and a new thread begins with GPU 0: whatever starts a thread that
        works on a GPU calls this in it first. On the CPU it does nothing.
        """
        if self.kind == "cuda":
            self.xp.cuda.Device(self.ordinal).use()
        return self


CPU = Device("cpu")
cuda = cache(lambda ordinal: Device("cuda", ordinal))
"""Return the GPU of an ordinal, always the same object: an operation asks for it several times."""


def as_device(device: Device | str) -> Device:
    """Return ``device`` as a :class:`Device`. **Local.**"""
    if isinstance(device, Device):
        return device
    if isinstance(device, str):
        return Device(device)
    raise TypeError(f'device: expected a Device or a string such as "cpu", got {type(device).__name__}')


def device_of(array: Any) -> Device:
    """Return the device an array lives on; NumPy arrays and scalars live on the CPU. **Local.**"""
    where = getattr(array, "device", None)
    if where is None or where == "cpu":
        return CPU
    if isinstance(where, Device):
        return where
    ordinal = getattr(where, "id", None)
    if ordinal is None:
        raise DeviceError(f"array: expected one of NumPy or CuPy, got {type(array).__name__}")
    return cuda(int(ordinal))


def same_device(operation: str, *arrays: Any) -> Device:
    """Return the device that all arrays share.

    **Local.** CuPy itself copies silently between GPUs, or crashes in ``dot``; mpdp never moves data
    behind the caller's back.

    Raises:
        DeviceMismatchError: naming the operation and the devices.
    """
    first = device_of(arrays[0])
    for array in arrays[1:]:
        found = device_of(array)
        if found is not first and found != first:
            names = ", ".join(str(device_of(a)) for a in arrays)
            raise DeviceMismatchError(
                f"{operation}: expected operands on one device, got {names}; move one with tensor.to(device)"
            )
    return first
