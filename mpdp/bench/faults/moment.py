"""What one job breaks, and when: told by the driver in the environment, read by the ranks."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

VARIABLE = "MPDP_FAULT"
MARK = "fault"  # a file in the job's folder: when it happened


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: its name in ``kinds``; ``"none"`` is an undisturbed run.
        rank: which rank it happens to.
        step: update during which it happens; 0 is before ``init``.
        delay: seconds after the start of that update, for what needs no certain place in the program.
        loop: ``"fit"``, or ``"own"`` for a program with a loop of its own around ``step``.
        folder: of the job: the run, and the mark of the moment.
        timeout: of ``mpdp.init``, in seconds.
        device: of the ranks.
    """

    kind: str
    rank: int
    step: int
    delay: float
    loop: str
    folder: str
    timeout: float
    device: str = "cpu"

    def environ(self) -> dict[str, str]:
        """Return the variables that tell a job of it. **Local.**"""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def told(cls, environ: Mapping[str, str] = os.environ) -> Fault:
        """Return what this job was told: nothing is to break where nobody said so. **Local.**"""
        text = environ.get(VARIABLE)
        return cls("none", 0, 0, 0.0, "fit", ".", 300.0) if text is None else cls(**json.loads(text))

    def now(self) -> None:
        """Note that it happens now; the first word counts. **Local.**"""
        path = os.path.join(self.folder, MARK)
        with contextlib.suppress(FileExistsError), open(path, "x", encoding="ascii") as file:
            file.write(repr(time.time()))
