"""The verdict of the last run on this machine, kept for ``mpdp doctor``."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...comm.tuned import folder, processor

_KEPT = ("verdict", "training", "extent", "device", "gpus", "processor", "gpu", "driver", "system")


def path() -> Path:
    """Return where it lies. **Local.**"""
    return folder() / "contention.json"


def keep(result: Mapping[str, Any]) -> None:
    """Keep the verdict of a run; a cache that cannot be written is no reason to fail. **Local.**"""
    content = {name: result[name] for name in _KEPT if name in result} | {"day": time.strftime("%Y-%m-%d")}
    with contextlib.suppress(OSError, RuntimeError):
        path().parent.mkdir(parents=True, exist_ok=True)
        part = path().with_name(f"{path().name}.{os.getpid()}.part")
        part.write_text(json.dumps(content) + "\n", encoding="utf-8")
        part.replace(path())


def line() -> str:
    """Return what the last run on this processor said, in a line. **Local.**"""
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
        if found["processor"] == processor():
            told = f"mpdp bench contention, {found['extent']}, {found['day']}"
            return f"threads or processes: {found['verdict']} ({told})"
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        pass
    return "threads or processes: not measured here; mpdp bench contention does"
