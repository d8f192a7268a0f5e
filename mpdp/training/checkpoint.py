"""The checkpoint format: safetensors parts and a JSON manifest, in a directory that appears whole or not at all.

The manifest lists each tensor's name, shape, dtype, element range, file and checksum, so any rank may write a part
and nothing depends on the number of ranks; a digest of its own ends it. Parts and manifest are written to a
temporary directory and flushed to disk before one rename. What is newest and whole is read from the content: names and
times are never trusted. This module knows files and NumPy arrays, no ranks and no models.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ..errors import CheckpointError

FORMAT = "mpdp-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
_TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: where it lies, what it holds, and the run's state beside the tensors."""

    path: Path
    step: int
    serial: int
    state: dict[str, Any]
    tensors: tuple[dict[str, Any], ...]


def write(root: Path, step: int, tensors: Mapping[str, np.ndarray], state: Mapping[str, Any]) -> Path:
    """Write a checkpoint below ``root`` and return its directory.

    **Local.** One rank calls it. Nothing that was there before is touched until the new one is whole.

    Args:
        root: the folder of a run's checkpoints; made if missing.
        step: finished updates.
        tensors: name to array; each is stored whole, whatever its shape.
        state: JSON-able rest of the run's state.

    Raises:
        CheckpointError: the disk is full, read-only or gone; the temporary directory is removed.
    """
    temporary = root / f"{_TEMPORARY}{os.getpid()}-{step}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        serial = 1 + max((c.serial for c in _manifests(root)), default=0)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        part = "part-00000.safetensors"
        arrays = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in tensors.items()}
        save_file(arrays, temporary / part)
        _flush(temporary / part)
        entries = [
            {
                "name": name,
                "shape": list(array.shape),
                "dtype": array.dtype.name,
                "start": 0,
                "stop": int(array.size),
                "file": part,
                "sha256": _digest(array),
            }
            for name, array in arrays.items()
        ]
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "serial": serial,
            "tensors": entries,
            "state": state,
        }
        manifest["digest"] = _manifest_digest(manifest)
        with open(temporary / MANIFEST, "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary / part, (temporary / MANIFEST).stat().st_mode)  # safetensors ignores the umask
        _flush(temporary)
        final = root / f"step-{step:010d}-{serial:06d}"
        os.rename(temporary, final)
        _flush(root)
        return final
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint: expected to write below {root}, got {error}; free or mend the disk"
        ) from error


def read(path: Path) -> Checkpoint:
    """Return the checkpoint in a directory after checking its manifest; tensors are not read yet.

    **Local.**

    Raises:
        CheckpointError: naming the path and what is wrong with it.
    """
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"checkpoint {path}: expected a directory with a {MANIFEST}, got {error}; check the path"
        ) from error
    try:
        manifest = json.loads(text)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise CheckpointError(
                f"checkpoint {path}: expected a manifest of format {FORMAT!r}, got another file; check the path"
            )
        if manifest["version"] > VERSION:
            raise CheckpointError(
                f"checkpoint {path}: expected version {VERSION} or older, got {manifest['version']}; "
                "it was written by a newer mpdp"
            )
        if manifest["digest"] != _manifest_digest(manifest):
            raise CheckpointError(
                f"checkpoint {path}: expected an intact manifest, got one whose digest differs; take another checkpoint"
            )
        tensors = tuple(manifest["tensors"])
        for entry in tensors:
            name = entry["file"]
            if name != os.path.basename(name) or name in ("", ".", ".."):
                raise CheckpointError(
                    f"checkpoint {path}: expected file names inside it, got {name!r}; it was tampered with"
                )
        return Checkpoint(path, int(manifest["step"]), int(manifest["serial"]), manifest["state"], tensors)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {path}: expected a manifest in JSON, got a torn one ({error}); take another checkpoint"
        ) from error


def load(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """Read all tensors and check every byte against its checksum.

    **Local.**

    Raises:
        CheckpointError: a part is missing, torn or changed.
    """
    parts: dict[str, dict[str, np.ndarray]] = {}
    tensors: dict[str, np.ndarray] = {}
    for entry in checkpoint.tensors:
        name, file = entry["name"], entry["file"]
        if file not in parts:
            try:
                parts[file] = load_file(checkpoint.path / file)
            except (OSError, SafetensorError, ValueError) as error:
                raise CheckpointError(
                    f"checkpoint {checkpoint.path}: expected an intact {file}, got {error}; take another checkpoint"
                ) from error
        whole = (entry["start"], entry["stop"]) == (0, int(np.prod(entry["shape"], dtype=np.int64)))
        array = parts[file].get(name if whole else f"{name}@{entry['start']}")
        if (
            array is None
            or array.dtype.name != entry["dtype"]
            or array.size != entry["stop"] - entry["start"]
        ):
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: expected {name} as the manifest says, got another; "
                "take another checkpoint"
            )
        if _digest(array) != entry["sha256"]:
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: expected intact bytes of {name}, got others than were written; "
                "take another checkpoint"
            )
        if name not in tensors:
            tensors[name] = np.empty(entry["shape"], dtype=entry["dtype"])
        tensors[name].reshape(-1)[entry["start"] : entry["stop"]] = array.reshape(-1)
    return tensors


def newest(root: Path) -> tuple[tuple[Checkpoint, dict[str, np.ndarray]] | None, list[str]]:
    """Return the newest complete checkpoint below ``root`` with its tensors, and why newer ones were passed over.

    **Local.** Newest is the highest serial number in a manifest.
    """
    reasons: list[str] = []
    for checkpoint in sorted(_manifests(root, reasons), key=lambda c: c.serial, reverse=True):
        try:
            return (checkpoint, load(checkpoint)), reasons
        except CheckpointError as error:
            reasons.append(str(error))
    return None, reasons


def prune(root: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest complete checkpoints, and what killed saves and removals left.

    **Local.** The rank that writes calls it: below one root there is one writer.
    """
    found = sorted(_manifests(root), key=lambda c: c.serial, reverse=True)
    _clear(root)
    for checkpoint in found[keep:]:
        # Out of sight at once: what is left of a broken removal must not look like a torn checkpoint.
        os.rename(checkpoint.path, root / f"{_TEMPORARY}{checkpoint.path.name}")
    _clear(root)


def _clear(root: Path) -> None:
    for entry in root.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(entry, ignore_errors=True)


def has_any(root: Path) -> bool:
    """Return whether anything that was written as a checkpoint lies below ``root``. **Local.**"""
    return root.is_dir() and any(not entry.name.startswith(_TEMPORARY) for entry in root.iterdir())


def _manifests(root: Path, reasons: list[str] | None = None) -> list[Checkpoint]:
    found = []
    if root.is_dir():
        for entry in sorted(root.iterdir()):
            if entry.name.startswith(_TEMPORARY):
                continue
            try:
                found.append(read(entry))
            except CheckpointError as error:
                if reasons is not None:
                    reasons.append(str(error))
    return found


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _flush(path: Path) -> None:
    """Have the disk hold what was written to a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
