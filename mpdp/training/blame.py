"""Blame: which ranks a gradient that is not finite came from, found out once it is too late to look.

What was reduced holds the sum of all ranks, so a sum that is not finite says nothing of who brought it. When the update
has failed on all ranks, each computes its own gradient once more, and looks at that. A step that succeeds pays nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .. import kernels
from ..data import MicroBatch
from ..errors import NonFiniteError, on_all_ranks

if TYPE_CHECKING:
    from .step import EagerStep

_BEFORE = "; nothing was updated"


def with_ranks(step: EagerStep, parts: Sequence[MicroBatch], error: NonFiniteError) -> NonFiniteError:
    """Return the error with the ranks that it came from.

    **Collective**, after all ranks have raised it, and abandoned the update. On a GPU, where the arrays of a share may
    hold the next one's samples by now, it is the same error.

    Args:
        step: which failed.
        parts: this rank's shares of the update's micro-batches.
        error: what all ranks have raised.
    """
    parallel = step.parallel
    if _BEFORE not in str(error) or parallel.world.device.kind != "cpu" or parallel.world.size == 1:
        return error
    flags = np.zeros(parallel.world.size, dtype=np.uint8)
    flags[parallel.world.rank] = not _own_is_finite(step, parts)
    parallel.comm.all_reduce(flags, op="max", lane="urgent")
    ranks = ", ".join(map(str, np.flatnonzero(flags))) or "no single one"
    return on_all_ranks(NonFiniteError(str(error).replace(_BEFORE, f" (from rank {ranks}){_BEFORE}", 1)))


def _own_is_finite(step: EagerStep, parts: Sequence[MicroBatch]) -> bool:
    """Compute this rank's gradient again, and look at it. **Local**, unless the model communicates."""
    parallel = step.parallel
    gradient = parallel.arena.array
    gradient[...] = 0
    try:
        for part in parts:
            loss = step.loss(part)
            if loss is not None:
                parallel.backward(loss, count=part.count, final=False)
        return bool(kernels.for_device(parallel.world.device).all_finite(gradient))
    except Exception:
        if parallel.communicates:  # others wait for this rank in the middle of theirs
            raise
        return True
    finally:
        parallel.abandon()
