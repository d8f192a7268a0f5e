"""Folders of images, a folder a class. Needs Pillow: ``pip install mpdp[images]``."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np

from ..errors import MissingDependencyError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


class ImageFolder:
    """Serve the images of a folder that has a folder for each class.

    **Local.** Sample i is (image, class): float32 of shape (channels, height, width) in 0..1, and the number of its
    class. Files are listed once, sorted by name, so the order depends on no file system; ``fit`` checks that all ranks
    found the same ones. Files and folders whose names begin with a dot are left out.

    Args:
        folder: with a folder a class, which may have more folders inside.
        size: (height, width) that every image is scaled to (bilinear); None keeps each its own, for transforms that
            crop.
        channels: 1 (grey), 3 (RGB) or 4 (RGBA); images are converted.

    Attributes:
        classes: names of the classes, sorted.
        files: (path, number of the class) of each sample.

    Raises:
        ValueError: no class, or a class without images.
        MissingDependencyError: Pillow is not installed.
    """

    def __init__(
        self, folder: str | os.PathLike[str], size: tuple[int, int] | None = None, channels: int = 3
    ) -> None:
        _pillow()
        if channels not in _MODES:
            raise ValueError(f"channels: expected 1, 3 or 4, got {channels!r}; 3 is RGB")
        if size is not None and (len(size) != 2 or min(size) < 1):
            raise ValueError(f"size: expected (height, width) of 1 or more, got {size!r}; as in (32, 32)")
        self.folder, self.size, self.channels = os.fspath(folder), size, channels
        with os.scandir(self.folder) as entries:
            self.classes = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
        if not self.classes:
            raise ValueError(
                f"folder: expected a folder for each class in {self.folder}, got none; sort the images"
            )
        self.files: list[tuple[str, int]] = []
        self._listed: dict[str, Any] = {}
        for number, name in enumerate(self.classes):
            found = sorted(_images(os.path.join(self.folder, name)))
            if not found:
                raise ValueError(
                    f"folder: expected images ({', '.join(SUFFIXES)}) in {os.path.join(self.folder, name)}, got none; "
                    "remove the folder or fill it"
                )
            digest = hashlib.blake2b(
                "\0".join(found).encode(errors="surrogateescape"), digest_size=4
            ).hexdigest()
            self._listed[f"list of images of class {name}"] = f"{len(found)} files ({digest})"
            self.files += [(os.path.join(self.folder, name, file), number) for file in found]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        path, number = self.files[index]
        image_module = _pillow()
        try:
            with image_module.open(path) as file:
                image = file.convert(_MODES[self.channels])
        except OSError as error:
            raise ValueError(
                f"image: expected one that Pillow reads, got {path} ({error}); remove it"
            ) from error
        if self.size is not None and image.size != self.size[::-1]:
            image = image.resize(self.size[::-1], image_module.Resampling.BILINEAR)
        pixels = np.asarray(image, dtype=np.uint8).reshape(image.height, image.width, self.channels)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32) / np.float32(255), number

    def describe(self) -> dict[str, Any]:
        """Return what ranks compare. **Local.**"""
        return {"classes": self.classes, **self._listed}


def _images(folder: str) -> list[str]:
    """Return the paths of images below a folder, relative to it."""
    found = []
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            os.path.relpath(os.path.join(path, name), folder)
            for name in files
            if name.lower().endswith(SUFFIXES) and not name.startswith(".")
        ]
    return found


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError(
            "Pillow: expected it for images, got none; install it with: pip install mpdp[images]"
        ) from error
    return Image
