"""Files that a command is asked to write: looked at before it works for minutes, not behind that."""

from __future__ import annotations

import argparse
import os


def path(text: str) -> str:
    """Return the path of a file to write, or ``-`` for stdout: the ``type`` of an argument. **Local.**

    Raises:
        argparse.ArgumentTypeError: it cannot be the path of a new file.
    """
    if text == "-":
        return text
    folder = os.path.dirname(text) or "."
    if text == "" or os.path.isdir(text) or not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"expected the path of a file in a folder that exists, got {text!r}")
    if not os.access(text if os.path.exists(text) else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a path that can be written, got {text!r}; choose another")
    return text
