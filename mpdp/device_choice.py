"""Which device a rank gets, from what the launcher and the environment say.

:func:`choose_gpu` is the rule, a pure function; :func:`choose_device` asks CuPy for what it needs and is called
before MPI is initialised. Counting GPUs makes no context on any of them. Nothing here knows MPI.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from .device import CPU, Device, as_device, cuda
from .errors import DeviceError, MissingDependencyError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ENTRY = re.compile(r"\d+|GPU-[0-9A-Fa-f-]+|MIG-[0-9A-Za-z/-]+")


@dataclass(frozen=True)
class GpuChoice:
    """What the rule gives one rank.

    Attributes:
        ordinal: index of its GPU among those that CUDA shows to this process.
        visible: what ``CUDA_VISIBLE_DEVICES`` must be before CUDA starts; None leaves it alone.
        wraps: a lower local rank has the same GPU, because ranks outnumber GPUs.
    """

    ordinal: int
    visible: str | None = None
    wraps: bool = False


def choose_gpu(local_rank: int, visible: str | None, count: int) -> GpuChoice:
    """Return the GPU of a rank: that of its local rank, counted round the GPUs it can see.

    **Local.** Where the launcher shows each rank a GPU of its own (Slurm's ``--gpus-per-task``), all ranks see
    one GPU and take ordinal 0. CUDA shows a process one MIG slice at most, the first of the list; ranks that
    were given a list of slices therefore each name their own before CUDA starts.

    Args:
        local_rank: index of the rank among those of its node.
        visible: value of ``CUDA_VISIBLE_DEVICES``; None if unset.
        count: GPUs that CUDA shows under that value; not used for a list of MIG slices.

    Raises:
        DeviceError: no GPU can be seen.

    Example:
        >>> choose_gpu(5, "0,1,2,3", 4)
        GpuChoice(ordinal=1, visible=None, wraps=True)
    """
    entries = listed(visible)
    if entries == []:
        raise DeviceError(
            f"device cuda: expected a visible GPU, got {VISIBLE}={visible!r} which hides all; unset it, or use "
            'device="cpu"'
        )
    slices = _slices(entries)
    if len(slices) > 1:
        return GpuChoice(0, slices[local_rank % len(slices)], local_rank >= len(slices))
    if count < 1:
        raise DeviceError(
            f"device cuda: expected a GPU that CUDA can use, got none ({VISIBLE} is {visible!r}); look at "
            'nvidia-smi and the driver, or use device="cpu"'
        )
    return GpuChoice(local_rank % count, None, local_rank >= count)


def listed(visible: str | None) -> list[str] | None:
    """Return the entries of ``CUDA_VISIBLE_DEVICES`` that count, None if unset. **Local.**

    As CUDA does, the list ends before its first entry that is none, such as -1 or ``NoDevFiles``.

    Example:
        >>> listed("0, 2,-1,3")
        ['0', '2']
    """
    if visible is None:
        return None
    entries: list[str] = []
    for entry in visible.split(","):
        if not _ENTRY.fullmatch(entry.strip()):
            break
        entries.append(entry.strip())
    return entries


def choose_device(
    asked: Device | str, local_rank: int, environ: MutableMapping[str, str]
) -> tuple[Device, str]:
    """Return the device of this rank and, for ``"auto"`` where CuPy is installed, why it is that one.

    **Local.** To be called before MPI is initialised and before anything uses a GPU. Sets
    ``CUDA_VISIBLE_DEVICES`` in ``environ`` where the ranks share a list of MIG slices.

    Args:
        asked: ``"auto"``, ``"cpu"``, ``"cuda"`` (by local rank) or ``"cuda:<ordinal>"`` (the same for all).
        local_rank: index of the rank among those of its node.
        environ: the process's environment.

    Raises:
        MissingDependencyError: a GPU was asked for, and CuPy is not installed.
        DeviceError: a GPU was asked for that cannot be seen.
    """
    if asked == "auto":
        return _choose_automatically(local_rank, environ)
    device = as_device(asked)
    if device.kind == "cpu":
        return CPU, ""
    cupy = device.xp
    if asked == "cuda":
        return _gpu_of(cupy, local_rank, environ), ""
    count, why = _count(cupy, environ)
    if device.ordinal >= count:
        raise DeviceError(
            f"device: expected an ordinal below the {count} GPUs that this process sees, got {device}"
            f"{' (' + why + ')' if why else ''}; look at nvidia-smi and {VISIBLE}"
        )
    return device, ""


def _choose_automatically(local_rank: int, environ: MutableMapping[str, str]) -> tuple[Device, str]:
    if importlib.util.find_spec("cupy") is None:
        return CPU, ""
    if listed(environ.get(VISIBLE)) == []:  # hidden on purpose
        return CPU, ""
    try:
        cupy = cuda(0).xp
    except MissingDependencyError as error:
        return CPU, f"CuPy cannot be imported: {error.__cause__}"
    if not _slices(listed(environ.get(VISIBLE))):
        count, why = _count(cupy, environ)
        if count == 0:
            return CPU, f"CuPy sees no GPU: {why}"
    device = _gpu_of(cupy, local_rank, environ)
    return device, f"CuPy sees {_gpus(_count(cupy, environ)[0])}"


def _gpu_of(cupy: Any, local_rank: int, environ: MutableMapping[str, str]) -> Device:
    visible = environ.get(VISIBLE)
    several = len(_slices(listed(visible))) > 1  # then CUDA must not be asked before the variable is set
    choice = choose_gpu(local_rank, visible, 0 if several else _count(cupy, environ)[0])
    if choice.visible is not None:
        environ[VISIBLE] = choice.visible
    return cuda(choice.ordinal)


def _count(cupy: Any, environ: Mapping[str, str]) -> tuple[int, str]:
    """Return how many GPUs CUDA shows, and what it says if there are none."""
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:  # no driver, or one that is too old
        return 0, str(error)
    return count, "" if count else f"{VISIBLE} is {environ.get(VISIBLE)!r}"


def _slices(entries: list[str] | None) -> list[str]:
    """Return the MIG slices of a list that holds nothing else."""
    return entries if entries and all(entry.startswith("MIG-") for entry in entries) else []


def _gpus(count: int) -> str:
    return f"{count} {'GPU' if count == 1 else 'GPUs'}"
