"""The checkpoint format: safetensors parts and a JSON manifest, in a directory that appears whole or not at all.

The manifest lists each tensor's name, shape, dtype, element range, file and checksum, so any rank may write a part
and nothing depends on the number of ranks; a digest of its own ends it. Parts and manifest are written to a
temporary directory and flushed to disk before one rename. What is newest and whole is read from the content: names and
times are never trusted. This module knows files and NumPy arrays, no ranks and no models; ``manifest`` is what it
believes of what it reads.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..errors import CheckpointError
from . import manifest
from .manifest import MANIFEST, VERSION, Manifest, Piece

__all__ = ["MANIFEST", "VERSION"]
TEMPORARY = ".tmp-"
_NAME = re.compile(r"step-(\d{10,})-(\d{6,})", re.ASCII)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: where it lies, what it holds, and the run's state beside the tensors.

    Attributes:
        path: its directory.
        step: finished updates. ``serial``: grows with each save below one root.
        metrics: the numbers of the epoch that ended with it, if one did.
        state: JSON-able rest of the run's state.
        pieces: where its tensors are.
    """

    path: Path
    step: int
    serial: int
    metrics: dict[str, float]
    state: dict[str, Any]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Slice:
    """Elements from ``start`` on of a tensor: what one rank writes.

    Attributes:
        name, shape: of the whole tensor.
        start: first element.
        array: the elements; contiguous, of any shape.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    array: np.ndarray


def begin(root: Path, step: int) -> tuple[Path, Path, int]:
    """Make the temporary directory of a checkpoint.

    **Local.** The one rank that will :func:`commit` calls it.

    Returns:
        the temporary directory, the one it will become, and its serial number.

    Raises:
        CheckpointError: the disk is full, read-only or gone.
    """
    temporary = root / f"{TEMPORARY}{os.getpid()}-{step}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        serial = 1 + _last_serial(root)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    except OSError as error:
        raise _unwritten(root, error) from error
    return temporary, root / f"step-{step:010d}-{serial:06d}", serial


def write_part(temporary: Path, writer: int, slices: Sequence[Slice]) -> list[Piece]:
    """Write what one rank has into a file of its own, flush it to disk, and return what the manifest says of it.

    **Local.** Nothing is copied, and other threads run meanwhile.

    Raises:
        CheckpointError: the disk is full, read-only or gone.
    """
    part = f"part-{writer:05d}.safetensors"
    pieces, arrays = [], {}
    try:
        for piece in slices:
            native = piece.array.dtype.newbyteorder("=")  # safetensors keeps one order of bytes
            flat = np.ascontiguousarray(piece.array, native).reshape(-1)
            stop, size = piece.start + flat.size, int(np.prod(piece.shape, dtype=np.int64))
            key = manifest.key_of(piece.name, piece.start, stop, size)
            if key in arrays:
                raise CheckpointError(f"checkpoint: expected one tensor called {key}, got two; rename one")
            arrays[key] = flat.reshape(piece.shape) if key == piece.name else flat
            pieces.append(
                Piece(
                    piece.name,
                    tuple(piece.shape),
                    flat.dtype.name,
                    piece.start,
                    stop,
                    part,
                    checksum(flat),
                )
            )
        save_file(arrays, temporary / part)
        _flush(temporary / part)
    except (OSError, SafetensorError) as error:
        raise _unwritten(temporary.parent, error) from error
    return pieces


def commit(
    temporary: Path,
    final: Path,
    step: int,
    serial: int,
    pieces: Sequence[Piece],
    state: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
) -> Path:
    """Write the manifest of parts that lie in the temporary directory, and rename that. **Local.**

    Raises:
        CheckpointError: the disk is full, read-only or gone, or the parts do not make whole tensors.
    """
    manifest.check_cover(pieces)
    try:
        text = manifest.text_of(Manifest(step, serial, dict(metrics or {}), dict(state), tuple(pieces)))
        with open(temporary / MANIFEST, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mode = (temporary / MANIFEST).stat().st_mode
        for part in {piece.file for piece in pieces}:
            os.chmod(temporary / part, mode)  # safetensors ignores the umask
        _flush(temporary)
        os.rename(temporary, final)
        _flush(final.parent)
    except OSError as error:
        raise _unwritten(final.parent, error) from error
    return final


def write(
    root: Path,
    step: int,
    tensors: Mapping[str, np.ndarray],
    state: Mapping[str, Any],
    metrics: Mapping[str, float] | None = None,
) -> Path:
    """Write a checkpoint below ``root`` and return its directory.

    **Local.** One rank calls it, and writes all. Nothing that was there before is touched until the new one is whole.

    Args:
        root: the folder of a run's checkpoints; made if missing.
        step: finished updates.
        tensors: name to array; each is stored whole, whatever its shape.
        state: JSON-able rest of the run's state.
        metrics: numbers by which checkpoints are compared.

    Raises:
        CheckpointError: the disk is full, read-only or gone; the temporary directory is removed.
    """
    temporary, final, serial = begin(root, step)
    try:
        slices = [Slice(name, array.shape, 0, array) for name, array in tensors.items()]
        return commit(temporary, final, step, serial, write_part(temporary, 0, slices), state, metrics)
    except CheckpointError:
        discard(temporary)
        raise


def discard(temporary: Path) -> None:
    """Remove what a save that failed has left. **Local.**"""
    shutil.rmtree(temporary, ignore_errors=True)


def read(path: Path) -> Checkpoint:
    """Return the checkpoint in a directory after checking its manifest; tensors are not read yet.

    **Local.**

    Raises:
        CheckpointError: naming the path and what is wrong with it.
    """
    found = manifest.read(path)
    return Checkpoint(path, found.step, found.serial, found.metrics, found.state, found.pieces)


def load(checkpoint: Checkpoint, wanted: Callable[[str], bool] | None = None) -> dict[str, np.ndarray]:
    """Read tensors and check every byte of them against its checksum.

    **Local.** It takes the memory of what it returns and of one piece.

    Args:
        checkpoint: of :func:`read`.
        wanted: whether a tensor of a name is read; None reads all.

    Raises:
        CheckpointError: a part is missing, torn, changed, or no regular file.
    """
    parts: dict[str, list[Piece]] = {}
    for piece in checkpoint.pieces:
        if wanted is None or wanted(piece.name):
            parts.setdefault(piece.file, []).append(piece)
    for file, pieces in parts.items():  # before anything is allocated for what they are said to hold
        try:
            size = manifest.regular_size(checkpoint.path / file)
            if size < sum(piece.nbytes for piece in pieces):
                raise OSError(f"{size} bytes, less than the manifest says")
        except OSError as error:
            raise _torn(checkpoint, file, error) from error
    tensors: dict[str, np.ndarray] = {}
    for file, pieces in parts.items():
        try:
            with safe_open(checkpoint.path / file, framework="np") as opened:
                for piece in pieces:
                    _take(checkpoint, piece, opened, tensors)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, MemoryError) as error:
            raise _torn(checkpoint, file, error) from error
    return tensors


def _take(checkpoint: Checkpoint, piece: Piece, opened: Any, tensors: dict[str, np.ndarray]) -> None:
    """Read one piece to its place among the tensors."""
    array = opened.get_tensor(piece.key)
    if array.dtype.name != piece.dtype or array.size != piece.stop - piece.start:
        raise CheckpointError(
            f"checkpoint {checkpoint.path}: expected {piece.name} as the manifest says, got another; "
            "take another checkpoint"
        )
    if checksum(array) != piece.sha256:
        raise CheckpointError(
            f"checkpoint {checkpoint.path}: expected intact bytes of {piece.name}, got others than were written; "
            "take another checkpoint"
        )
    if piece.key == piece.name:
        tensors[piece.name] = array.reshape(piece.shape)
        return
    if piece.name not in tensors:
        tensors[piece.name] = np.empty(piece.shape, manifest.dtype_of(piece.dtype))
    tensors[piece.name].reshape(-1)[piece.start : piece.stop] = array.reshape(-1)


def found_below(root: Path, reasons: list[str] | None = None) -> list[Checkpoint]:
    """Return the checkpoints below ``root`` whose manifest is intact, newest first: by the serial number in it.

    **Local.**

    Args:
        root: the folder of a run's checkpoints.
        reasons: takes why others were passed over.
    """
    found = []
    if root.is_dir():
        for entry in sorted(root.iterdir()):
            if entry.name.startswith(TEMPORARY):
                continue
            try:
                found.append(read(entry))
            except CheckpointError as error:
                if reasons is not None:
                    reasons.append(str(error))
    return sorted(found, key=lambda c: c.serial, reverse=True)


def newest(root: Path) -> tuple[tuple[Checkpoint, dict[str, np.ndarray]] | None, list[str]]:
    """Return the newest complete checkpoint below ``root`` with its tensors, and why newer ones were passed over.

    **Local.** Newest is the highest serial number in a manifest.
    """
    reasons: list[str] = []
    for checkpoint in found_below(root, reasons):
        try:
            return (checkpoint, load(checkpoint)), reasons
        except CheckpointError as error:
            reasons.append(str(error))
    return None, reasons


def best(checkpoints: Sequence[Checkpoint], metric: str, mode: str) -> Checkpoint | None:
    """Return the one with the best value of a metric, of equal ones the first; None where none has it. **Local.**

    Args:
        checkpoints: newest first.
        metric: a name in their ``metrics``.
        mode: ``"min"`` or ``"max"``.
    """
    having = [checkpoint for checkpoint in checkpoints if metric in checkpoint.metrics]
    sign = 1 if mode == "min" else -1
    return min(having, key=lambda found: (sign * found.metrics[metric], found.step), default=None)


def prune(root: Path, keep: int, metric: str | None = None, mode: str = "min") -> None:
    """Remove all but the ``keep`` newest checkpoints and the best one, and what killed saves and removals left.

    **Local.** The rank that writes calls it: below one root there is one writer.

    Args:
        root: the folder of a run's checkpoints.
        keep: how many of the newest stay.
        metric: see :func:`best`; None keeps no best one.
        mode: see :func:`best`.

    Raises:
        OSError: one could not be removed.
    """
    found = found_below(root)
    spared = None if metric is None else best(found, metric, mode)
    _clear(root)
    for checkpoint in found[keep:]:
        if checkpoint is not spared:
            # Out of sight at once: what is left of a broken removal must not look like a torn checkpoint.
            os.rename(checkpoint.path, root / f"{TEMPORARY}{checkpoint.path.name}")
    _clear(root)


def _clear(root: Path) -> None:
    for entry in root.glob(f"{TEMPORARY}*"):
        if entry.is_symlink():
            entry.unlink(missing_ok=True)  # what it leads to is not ours
        else:
            shutil.rmtree(entry, ignore_errors=True)


def has_any(root: Path) -> bool:
    """Return whether anything that was written as a checkpoint lies below ``root``. **Local.**"""
    return root.is_dir() and any(not entry.name.startswith(TEMPORARY) for entry in root.iterdir())


def _last_serial(root: Path) -> int:
    """Return the highest serial number below ``root``, also of torn ones, whose names are taken."""
    names = (_NAME.fullmatch(entry.name) for entry in root.iterdir())
    in_names = max((int(match[2]) for match in names if match is not None), default=0)
    return max([in_names, *(checkpoint.serial for checkpoint in found_below(root))])


def checksum(array: np.ndarray) -> str:
    """Return the SHA-256 of an array's bytes. **Local.**"""
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def piece_as_json(piece: Piece) -> dict[str, Any]:
    """Return a piece as a rank tells it to the one that writes the manifest. **Local.**"""
    return asdict(piece)


def _torn(checkpoint: Checkpoint, file: str, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {checkpoint.path}: expected an intact {file}, got {error}; take another checkpoint"
    )


def _unwritten(root: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"checkpoint: expected to write below {root}, got {error}; free or mend the disk")


def _flush(path: Path) -> None:
    """Have the disk hold what was written to a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
