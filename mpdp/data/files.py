"""Files of arrays, mapped: a batch reads its own rows, and the ranks of a node share the pages of the system's cache.

Owns the opening of ``.npy``, ``.npz`` and plain files of tokens. An array that is mapped counts once in a node's
memory, however many ranks read it, and the system can drop it at any time.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

Path = str | os.PathLike[str]
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of a zip member: its name and extra field follow, then the data


def map_npy(path: Path) -> np.ndarray:
    """Return the array of a ``.npy`` file, mapped. **Local.**

    Raises:
        ValueError: no such format, or Python objects in it.
    """
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"path: expected a .npy file of numbers, got {os.fspath(path)} ({error}); write it with numpy.save"
        ) from error


def map_npz(path: Path, names: Sequence[str] = ()) -> list[np.ndarray]:
    """Return arrays of a ``.npz`` file: mapped where they are stored as they are, read where they are compressed.

    **Local.**

    Args:
        path: the file.
        names: which, in this order; all of them by default.

    Raises:
        KeyError: no such array.
        ValueError: no such format, or Python objects in it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            missing = [name for name in names if name not in members]
            if missing:
                raise KeyError(
                    f"names: expected some of {', '.join(members)} in {os.fspath(path)}, got {missing[0]!r}"
                )
            return [_member(path, archive, members[name]) for name in names or members]
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise ValueError(
            f"path: expected a .npz file of numbers, got {os.fspath(path)} ({error}); write it with numpy.savez"
        ) from error


def map_tokens(path: Path, dtype: Any = None) -> np.ndarray:
    """Return the integers of a file of tokens, mapped. **Local.** See ``TokenDataset.from_file``."""
    if os.fspath(path).endswith(".npy"):
        return map_npy(path)
    if dtype is None:
        raise ValueError(
            f'dtype: expected that of the integers in {os.fspath(path)}, got none; pass dtype="uint16" or another'
        )
    size, item = os.path.getsize(path), np.dtype(dtype).itemsize
    if size % item or not size:
        raise ValueError(
            f"dtype: expected a file of whole {np.dtype(dtype)} numbers, got {os.fspath(path)} of {size} bytes; "
            "check dtype"
        )
    return np.memmap(path, dtype, mode="r")


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """Return one array of a zip file."""
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        if info.compress_type != zipfile.ZIP_STORED:
            file.seek(0)
            return np.lib.format.read_array(file, allow_pickle=False)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, fortran, dtype = read(file)
        skipped = file.tell()
    if dtype.hasobject:
        raise ValueError("Python objects in it")
    with open(path, "rb") as raw:
        raw.seek(info.header_offset)
        fields = _LOCAL_HEADER.unpack(raw.read(_LOCAL_HEADER.size))
    start = info.header_offset + _LOCAL_HEADER.size + fields[-2] + fields[-1]
    if 0 in shape:  # nothing to map
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", start + skipped, shape, "F" if fortran else "C")
