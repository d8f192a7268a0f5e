"""The data of the training that is broken: a module of its own, so that worker processes find it."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

from .moment import Fault

SAMPLES = 40


class Samples:
    """Random samples; reading the ``at``-th one that this process reads goes wrong as ``fault`` says.

    Args:
        fault: what goes wrong, of the kinds below; None for sound data.
        at: samples that are read before.
    """

    def __init__(self, fault: Fault | None = None, at: int = 0) -> None:
        random = np.random.default_rng(0)
        self.x = random.standard_normal((SAMPLES, 12)).astype("float32")
        self.y = random.integers(0, 3, SAMPLES)
        self.fault, self.at, self.read = fault, at, 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        self.read += 1
        if self.fault is not None and self.read > self.at:
            return self._break(index)
        return self.x[index], int(self.y[index])

    def _break(self, index: int) -> Any:
        assert self.fault is not None
        fault, self.fault = self.fault, None
        fault.now()
        if fault.kind == "worker_killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "read":
            read, _ = os.pipe()
            os.read(read, 1)  # as from a disk that is gone: it does not come back
        if fault.kind == "nan":
            return np.full_like(self.x[index], np.nan), int(self.y[index])
        raise ValueError(f"a bad sample {index}")


def augment(sample: Any, random: np.random.Generator) -> Any:
    """Return a sample with noise from its own random numbers."""
    return sample[0] + random.normal(scale=0.1, size=12).astype("float32"), sample[1]
