"""The manifest of a checkpoint: what it holds and where, as JSON that is believed in nothing that can be checked.

A manifest comes from a file that anybody may have written. Names stay inside its directory, ranges of a tensor cover it
once, numbers are in range and finite, and nothing is allocated for what the files cannot hold. This module knows text
and numbers; ``checkpoint`` knows files and arrays.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError

FORMAT = "mpdp-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
MOST_BYTES = 1 << 28  # of a manifest: about a million tensors
_MOST = 1 << 62  # elements, steps
_NUMBER = "__mpdp_number__"
_ARRAY = "__mpdp_array__"
_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16",
    "uint8", "bool",
)  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of one tensor, and the file that holds them.

    In the file they are called ``name``, or ``name@start`` where they are not the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    file: str
    sha256: str

    @property
    def size(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def key(self) -> str:
        """Its name in the file."""
        return key_of(self.name, self.start, self.stop, self.size)

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return (self.stop - self.start) * dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class Manifest:
    """What a manifest says; see :class:`~mpdp.training.checkpoint.Checkpoint`."""

    step: int
    serial: int
    metrics: dict[str, float]
    state: dict[str, Any]
    pieces: tuple[Piece, ...]


def key_of(name: str, start: int, stop: int, size: int) -> str:
    """Return how a file calls elements ``start`` to ``stop`` of a tensor of so many. **Local.**"""
    return name if (start, stop) == (0, size) else f"{name}@{start}"


def dtype_of(name: str) -> np.dtype:
    """Return the dtype of a name in ``DTYPES``. **Local.**"""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def text_of(manifest: Manifest) -> str:
    """Return a manifest as JSON, with its own digest. **Local.**"""
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "serial": manifest.serial,
        "metrics": manifest.metrics,
        "tensors": [asdict(piece) for piece in manifest.pieces],
        "state": manifest.state,
    }
    body = json.loads(json.dumps(body, allow_nan=False))  # tuples as lists, as it will be read
    return json.dumps({**body, "digest": digest(body)}, indent=1, allow_nan=False)


def digest(manifest: Mapping[str, Any]) -> str:
    """Return the digest of a manifest without its own. **Local.**"""
    body = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def regular_size(path: Path) -> int:
    """Return the size of a file, if it is one: no link, which may lead elsewhere, and no pipe, which would block.

    **Local.**

    Raises:
        OSError: no such file, or something else.
    """
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path.name} is no regular file")
    return found.st_size


def read(path: Path) -> Manifest:
    """Return the manifest in a checkpoint's directory, checked. **Local.**

    Raises:
        CheckpointError: naming the path and what is wrong with it.
    """
    try:
        size = regular_size(path / MANIFEST)
        if size > MOST_BYTES:
            raise OSError(f"{MANIFEST} has {size} bytes, more than {MOST_BYTES}")
        with open(path / MANIFEST, "rb") as file:
            text = file.read(size).decode()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {path}: expected a directory with a {MANIFEST}, got {error}; check the path"
        ) from error
    try:
        found = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise CheckpointError(
                f"checkpoint {path}: expected a manifest of format {FORMAT!r}, got another file; check the path"
            )
        version = _whole(found, "version")
        if version > VERSION:
            raise CheckpointError(
                f"checkpoint {path}: expected version {VERSION} or older, got {version}; "
                "it was written by a newer mpdp, install that one"
            )
        if found["digest"] != digest(found):
            raise CheckpointError(
                f"checkpoint {path}: expected an intact manifest, got one whose digest differs; take another checkpoint"
            )
        return _checked(found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"checkpoint {path}: expected a manifest as mpdp writes it, got a torn one ({_said(error)}); "
            "take another checkpoint"
        ) from error
    except CheckpointError as error:
        if str(error).startswith("checkpoint "):
            raise
        raise CheckpointError(f"checkpoint {path}: {error}; it was tampered with") from None


def _checked(found: Mapping[str, Any]) -> Manifest:
    metrics, state, tensors = found.get("metrics", {}), found["state"], found["tensors"]
    if not isinstance(state, dict) or not isinstance(tensors, list) or not isinstance(metrics, dict):
        raise ValueError("state, metrics or tensors are of another kind")
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"metric {name} is {value!r}")
    pieces = tuple(_piece(entry) for entry in tensors)
    check_cover(pieces)
    return Manifest(_whole(found, "step"), _whole(found, "serial"), dict(metrics), dict(state), pieces)


def _piece(entry: Any) -> Piece:
    name, shape, dtype, file = entry["name"], entry["shape"], entry["dtype"], entry["file"]
    if not isinstance(file, str) or not _FILE.fullmatch(file) or file == MANIFEST:
        raise CheckpointError(f"expected file names inside it, got {file!r}")
    if not isinstance(name, str) or not name or len(name) > 4096:
        raise CheckpointError(f"expected names of tensors, got {str(name)[:80]!r}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"expected a dtype of {', '.join(DTYPES)} for {name}, got {dtype!r}")
    if not isinstance(shape, list) or len(shape) > 32 or not all(_is_whole(length) for length in shape):
        raise CheckpointError(f"expected a shape for {name}, got {str(shape)[:80]}")
    if math.prod(shape) > _MOST or math.prod(max(length, 1) for length in shape) > _MOST:
        raise CheckpointError(f"expected a shape that some machine can hold for {name}, got {shape}")
    start, stop = _whole(entry, "start"), _whole(entry, "stop")
    if not isinstance(entry["sha256"], str) or not _SHA256.fullmatch(entry["sha256"]):
        raise CheckpointError(f"expected a SHA-256 of {name}, got {str(entry['sha256'])[:80]!r}")
    return Piece(name, tuple(shape), dtype, start, stop, file, entry["sha256"])


def check_cover(pieces: Sequence[Piece]) -> None:
    """Check that the pieces of each tensor agree on its form, and cover it once without a gap. **Local.**

    Raises:
        CheckpointError: naming the tensor; without the path, which the caller knows.
    """
    tensors: dict[str, list[Piece]] = {}
    keys: set[tuple[str, str]] = set()
    for piece in pieces:
        tensors.setdefault(piece.name, []).append(piece)
        if (piece.file, piece.key) in keys:
            raise CheckpointError(f"expected one piece called {piece.key} in {piece.file}, got two")
        keys.add((piece.file, piece.key))
    for name, parts in tensors.items():
        parts.sort(key=lambda piece: (piece.start, piece.stop))
        if any((part.shape, part.dtype) != (parts[0].shape, parts[0].dtype) for part in parts):
            raise CheckpointError(f"expected one shape and dtype of {name}, got several")
        at = 0
        for part in parts:
            if part.start != at or part.stop < at or (part.stop == at and len(parts) > 1):
                raise CheckpointError(
                    f"expected ranges that cover {name} once, got {part.start} to {part.stop} after {at}"
                )
            at = part.stop
        if at != parts[0].size:
            raise CheckpointError(f"expected ranges that cover {parts[0].size} elements of {name}, got {at}")


def pack(value: Any, where: str, arrays: dict[str, np.ndarray], name: str) -> Any:
    """Return a program's state in a form that JSON holds to the bit. **Local.**

    Dicts with text keys, lists, tuples (which come back as lists), text, numbers, None, NumPy arrays and numbers.

    Args:
        value: the state.
        where: whose it is, for messages.
        arrays: takes the arrays, under ``name`` and where in the state they stand.
        name: as what the state's arrays are kept.

    Raises:
        TypeError: something else, naming where it stands.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_NUMBER: str(value)}
    if isinstance(value, np.ndarray):
        if value.dtype.name not in DTYPES:
            raise TypeError(f"{where}: expected an array of numbers, got {value.dtype}; convert it")
        arrays[name] = np.array(value)  # a copy: the program goes on with its own
        return {_ARRAY: name}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key in (_NUMBER, _ARRAY):
                raise TypeError(f"{where}: expected text as keys, got {key!r}; JSON knows no others")
        return {key: pack(item, where, arrays, f"{name}/{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [pack(item, where, arrays, f"{name}/{i}") for i, item in enumerate(value)]
    raise TypeError(
        f"{where}: expected dicts, lists, text, numbers and NumPy arrays, got {type(value).__name__}; "
        "return what it is made of"
    )


def unpack(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return what :meth:`pack` was given. **Local.**

    Raises:
        KeyError: an array that is not there, or a number that is none.
    """
    if isinstance(value, list):
        return [unpack(item, arrays) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_NUMBER}:
            return _NUMBERS[value[_NUMBER]]
        if value.keys() == {_ARRAY}:
            return arrays[value[_ARRAY]]
        return {key: unpack(item, arrays) for key, item in value.items()}
    return value


def _whole(entry: Mapping[str, Any], name: str) -> int:
    value = entry[name]
    if not _is_whole(value):
        raise ValueError(f"{name} is {str(value)[:80]}")
    return int(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is no finite number")
    return value


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
