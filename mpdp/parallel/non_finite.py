"""Errors about a loss or gradient that is not finite: the same on all ranks, naming where it came from."""

from __future__ import annotations

import math
from typing import NoReturn

import numpy as np

from ..comm.base import Communicator
from ..errors import NonFiniteError, on_all_ranks
from .layout import Layout


def raise_loss(comm: Communicator, mine: float, total: float, step: int, precision: str) -> NoReturn:
    """Raise for a global loss sum that is not finite. **Collective.**"""
    flags = np.zeros(comm.size, dtype=np.uint8)
    flags[comm.rank] = not math.isfinite(mine)
    comm.all_reduce(flags, op="max", lane="urgent")
    ranks = ", ".join(str(rank) for rank in np.flatnonzero(flags)) or "no single one"
    hint = "; float16 ends at 65504, bfloat16 does not" if precision == "float16" else ""
    raise on_all_ranks(
        NonFiniteError(
            f"loss: expected a finite sum at step {step}, got {total} (from rank {ranks}); "
            f"look at the learning rate and at that rank's samples{hint}"
        )
    )


def raise_gradient(layout: Layout, element: int, step: int, scale: float | None) -> NoReturn:
    """Raise for a reduced gradient whose first element that is not finite is known, on all ranks."""
    name = next((e.name for e in layout.trainable if e.start <= element < e.stop), "(padding)")
    beside = "" if scale is None else f", and the loss scale cannot fall below {scale:g}"
    raise on_all_ranks(
        NonFiniteError(
            f"gradient: expected finite values at step {step}, got NaN or infinity first in {name}{beside}; "
            "nothing was updated; look at the learning rate and the data"
        )
    )
