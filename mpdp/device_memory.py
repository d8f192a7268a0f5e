"""How much memory the GPUs of this node have, and which pieces of work go where.

Nothing is tracked: whoever wants to know asks the driver, which sees other processes too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .device import Device, cuda
from .errors import MissingDependencyError

POLICIES = ("most_free", "round_robin")
_GIB = 1 << 30


@dataclass(frozen=True)
class DeviceInfo:
    """A GPU as this process sees it.

    Attributes:
        device: its kind and ordinal.
        name: the product's name.
        uuid: the driver's name for it, equal in every process; ``""`` where the driver does not say.
        free: bytes that this process could still take, those included that CuPy's pool holds ready.
        total: bytes in all.
    """

    device: Device
    name: str
    uuid: str
    free: int
    total: int


def devices() -> list[DeviceInfo]:
    """Return the GPUs that this process sees, with free and total memory; none without CuPy or a GPU.

    **Local.** Asks NVML, which makes no context: on a GPU that is not this process's own, nothing is left
    behind. Where NVML is missing, CUDA itself is asked, which costs a context (about 500 MB) on each GPU.

    Example:
        >>> all(info.free <= info.total for info in devices())
        True
    """
    try:
        cupy = cuda(0).xp
    except MissingDependencyError:
        return []
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError:  # no driver
        return []
    if count == 0:
        return []
    current, pool = runtime.getDevice(), cupy.get_default_memory_pool()
    found = []
    with _Nvml() as nvml:
        for ordinal in range(count):
            properties = runtime.getDeviceProperties(ordinal)
            uuid, free, total = nvml.look(cupy.cuda.Device(ordinal).pci_bus_id)
            if total == 0 or total > 1.25 * properties["totalGlobalMem"]:  # a MIG slice is less than its GPU
                free, total = cupy.cuda.Device(ordinal).mem_info
            cached = pool.free_bytes() if ordinal == current else 0
            name = properties["name"].decode()
            found.append(DeviceInfo(cuda(ordinal), name, uuid, min(free + cached, total), total))
    return found


def identity(device: Device) -> bytes:
    """Return 64 bytes that name the GPU itself, equal in every process of the node. **Local.**

    It is its PCI address, and what CUDA calls its UUID, by which two MIG slices of one GPU differ.
    """
    properties = device.xp.cuda.runtime.getDeviceProperties(device.ordinal)
    uuid = properties.get("uuid", b"")
    text = device.xp.cuda.Device(device.ordinal).pci_bus_id.encode() + bytes(uuid)[:16]
    return text[:64].ljust(64, b"\0")


def place(
    sizes: Sequence[int],
    policy: str = "most_free",
    *,
    margin: float = 0.1,
    among: Iterable[DeviceInfo] | None = None,
) -> list[Device]:
    """Choose a GPU for each of several pieces by free memory.

    **Local.** Where several processes place at once, let one rank of a node do it and broadcast the answer:
    what is free changes between the question and the allocation.

    Args:
        sizes: bytes of each piece.
        policy: ``"most_free"`` takes the longest piece first and gives it to the GPU with most free memory left;
            ``"round_robin"`` takes the pieces as they come and goes round the GPUs that have room.
        margin: share of each GPU's total that stays free, for contexts, libraries and fragmentation.
        among: the GPUs (default: all of :func:`devices`).

    Returns:
        a device for each piece, in the order of ``sizes``.

    Raises:
        ValueError: a piece that fits nowhere, with a table of what is left; a bad argument.

    Example:
        >>> gpus = [DeviceInfo(Device("cuda", i), "GPU", "", free, 100) for i, free in enumerate((60, 90))]
        >>> [str(device) for device in place([20, 40, 30], among=gpus)]
        ['cuda:1', 'cuda:1', 'cuda:0']
    """
    if policy not in POLICIES:
        raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
    if not 0.0 <= margin < 1.0:
        raise ValueError(f"margin: expected a share in [0, 1), got {margin}")
    if any(size < 0 for size in sizes):
        raise ValueError(f"sizes: expected bytes of 0 or more, got {min(sizes)}")
    gpus = list(devices() if among is None else among)
    if not gpus and sizes:
        raise ValueError("devices: expected a GPU at least, got none; see mpdp.devices()")
    left = [max(0, gpu.free - int(margin * gpu.total)) for gpu in gpus]
    order = range(len(sizes))
    if policy == "most_free":
        order = sorted(order, key=lambda i: -sizes[i])  # type: ignore[assignment]
    chosen: list[Device | None] = [None] * len(sizes)
    turn = 0
    for piece in order:
        candidates = [i for i in range(len(gpus)) if left[i] >= sizes[piece]]
        if not candidates:
            raise ValueError(_nothing_fits(piece, sizes, gpus, left, margin))
        if policy == "most_free":
            best = max(candidates, key=lambda i: left[i])
        else:
            best = min(candidates, key=lambda i: (i - turn) % len(gpus))
            turn = best + 1
        left[best] -= sizes[piece]
        chosen[piece] = gpus[best].device
    return [device for device in chosen if device is not None]


def _nothing_fits(
    piece: int, sizes: Sequence[int], gpus: list[DeviceInfo], left: list[int], margin: float
) -> str:
    rows = "".join(
        f"\n  {gpu.device!s:8} {gpu.name:24} {gpu.free / _GIB:9.2f} free {left[i] / _GIB:9.2f} left of "
        f"{gpu.total / _GIB:9.2f} GiB"
        for i, gpu in enumerate(gpus)
    )
    return (
        f"sizes: expected piece {piece} of {sizes[piece] / _GIB:.2f} GiB to fit on a GPU beside the others "
        f"(a margin of {margin:.0%} stays free), got none with room; make pieces smaller or use more GPUs{rows}"
    )


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Nvml:
    """The driver's management library, for as long as the block runs; says nothing where it is missing."""

    def __init__(self) -> None:
        self._library: Any = None

    def __enter__(self) -> _Nvml:
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            if library.nvmlInit_v2() == 0:
                self._library = library
        except (OSError, AttributeError):
            pass
        return self

    def __exit__(self, *exception: object) -> None:
        if self._library is not None:
            self._library.nvmlShutdown()

    def look(self, bus: str) -> tuple[str, int, int]:
        """Return (uuid, free bytes, total bytes) of the GPU at a PCI address; zeros if NVML cannot tell."""
        handle, memory = ctypes.c_void_p(), _Memory()
        uuid = ctypes.create_string_buffer(96)
        nvml = self._library
        if nvml is None or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(handle)) != 0:
            return "", 0, 0
        if nvml.nvmlDeviceGetUUID(handle, uuid, len(uuid)) != 0:
            uuid.value = b""
        if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            return uuid.value.decode(), 0, 0
        return uuid.value.decode(), memory.free, memory.total
