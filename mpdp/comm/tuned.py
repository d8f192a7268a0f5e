"""Sizes that were measured on a machine: the file that keeps them, and rank 0's copy as the one all ranks use.

Until ``mpdp bench all-reduce --tune`` has run, every transport uses the constants that its code states. What that
measures lies in the user's cache directory, a file for each transport and hardware. Rank 0 alone reads it, when the
world starts, and gives the sizes to all: ranks with different sizes would not understand one another. A file that is
broken is named in a warning and left aside.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import cores
from ..device import Device
from .agreement import on_root
from .base import Communicator
from .mpi import MpiCommunicator

Sizes = dict[str, int]
Hardware = dict[str, str | int]

_FORMAT = 1
_UNIT = 64  # bytes; every size is a multiple of a cache line, hence of every element
_SMALL = (64, 256 << 10)
_PIECE = (4 << 10, 4 << 20)  # of an area that every rank has, twice, for each lane
_CHUNK = (16 << 10, 1 << 30)
TUNABLE: dict[str, dict[str, tuple[int, int]]] = {
    "shared_memory": {"small_bytes": _SMALL, "piece_bytes": _PIECE, "chunk_bytes": _CHUNK},
    "mpi": {"piece_bytes": (64 << 10, 1 << 30), "chunk_bytes": _CHUNK},
    "cuda_ipc": {"small_bytes": _SMALL, "chunk_bytes": _CHUNK},
}


def processor() -> str:
    """Return the name of this machine's processor. **Local.**"""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def hardware(mpi: MpiCommunicator, device: Device, num_nodes: int, ranks_per_device: int = 1) -> Hardware:
    """Return what measured sizes hold for, as this rank sees it. **Local.**

    Args:
        mpi: the ranks.
        device: of this rank.
        num_nodes: that they are on.
        ranks_per_device: most ranks that share a GPU.
    """
    found: Hardware = {
        "processor": processor(),
        "cores": cores.cores(),
        "ranks": mpi.size,
        "nodes": num_nodes,
        "mpi": mpi.vendor,
    }
    if device.kind == "cuda":
        found["gpu"] = device.xp.cuda.runtime.getDeviceProperties(device.ordinal)["name"].decode()
        found["ranks_per_gpu"] = ranks_per_device
    return found


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where measured sizes are kept: ``mpdp`` below ``XDG_CACHE_HOME`` or ``~/.cache``. **Local.**

    Raises:
        RuntimeError: there is no home directory.
    """
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "mpdp"


def path_of(transport: str, machine: Hardware) -> Path:
    """Return the file of a transport's sizes on some hardware. **Local.**"""
    digest = hashlib.blake2b(json.dumps(machine, sort_keys=True).encode(), digest_size=8).hexdigest()
    return folder() / f"{transport}-{digest}.json"


def write(transport: str, machine: Hardware, sizes: Sizes) -> Path:
    """Keep a transport's sizes and return the file. **Local.**

    Raises:
        ValueError: sizes that :func:`read` would refuse.
        OSError: it cannot be written.
    """
    wrong = _wrong(transport, sizes)
    if wrong:
        raise ValueError(wrong)
    path = path_of(transport, machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": _FORMAT, "transport": transport, "hardware": machine, "sizes": sizes}
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(
            json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n", encoding="utf-8"
        )
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def check_folder() -> None:
    """Make the folder, and raise what :func:`write` would after minutes of measuring. **Local.**

    Raises:
        OSError: nothing can be written there.
        RuntimeError: there is no home directory.
    """
    folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder()):
        pass


def read(transport: str, machine: Hardware, warn: Callable[[str], None]) -> Sizes:
    """Return the sizes that were measured for a transport; none where there is no file, or a broken one. **Local.**

    Args:
        transport: of ``TUNABLE``.
        machine: what they must have been measured on.
        warn: gets a line that names a file which cannot be used, and why.
    """
    try:
        path = path_of(transport, machine)
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, RuntimeError):
        return {}
    except OSError as error:
        warn(f"sizes for {transport}: expected a readable {path}, got {error}; the built-in ones are used")
        return {}
    try:
        content = json.loads(text)
        wrong = _wrong_content(transport, machine, content)
    except (ValueError, RecursionError) as error:  # of JSON, and of text that is no UTF-8
        wrong = f"expected JSON, got {error}"
    if wrong:
        warn(
            f"sizes for {transport}: {path} is broken ({wrong}); the built-in ones are used: "
            "delete it, or measure again with: mpdp bench all-reduce --tune"
        )
        return {}
    return dict(content["sizes"])


def agreed(comm: Communicator, machine: Hardware, log: Callable[[str, str], None]) -> dict[str, Sizes]:
    """Return the sizes that rank 0 has for each transport, on every rank. **Collective.**

    Args:
        comm: the ranks.
        machine: the hardware as rank 0 sees it; other ranks' views do not matter.
        log: writes a level and a line, once for the job.
    """

    def found() -> bytes:
        sizes = {name: read(name, machine, lambda line: log("warning", line)) for name in TUNABLE}
        return json.dumps({name: own for name, own in sizes.items() if own}).encode()

    mine = on_root(comm, found)
    return json.loads(comm.broadcast_bytes(mine))


def told(sizes: Sizes) -> str:
    """Return sizes as text for the log; nothing where there are none. **Local.**

    Example:
        >>> told({"small_bytes": 64, "piece_bytes": 4096})
        '; tuned: small_bytes 64, piece_bytes 4096'
    """
    return "; tuned: " + ", ".join(f"{name} {size}" for name, size in sizes.items()) if sizes else ""


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _wrong_content(transport: str, machine: Hardware, content: Any) -> str:
    """Return what is wrong with the content of a file, or nothing."""
    if not isinstance(content, dict):
        return f"expected an object, got {type(content).__name__}"
    digest = content.pop("digest", None)
    if digest != _digest(content):
        return "its content does not fit its checksum"
    if content.get("format") != _FORMAT:
        return f"expected format {_FORMAT}, got {content.get('format')!r}"
    if content.get("transport") != transport or content.get("hardware") != machine:
        return "it is of another transport or hardware"
    return _wrong(transport, content.get("sizes"))


def _wrong(transport: str, sizes: Any) -> str:
    """Return what is wrong with sizes, or nothing."""
    if not isinstance(sizes, dict) or not sizes:
        return f"expected sizes by name, got {sizes!r}"
    for name, size in sizes.items():
        if name not in TUNABLE[transport]:
            return f"expected some of {', '.join(TUNABLE[transport])}, got {name!r}"
        low, high = TUNABLE[transport][name]
        if type(size) is not int or not low <= size <= high or size % _UNIT:
            return f"expected {name} to be a multiple of {_UNIT} in {low}..{high}, got {size!r}"
    return ""
