"""Where ``fit`` gets the micro-batches of its updates from: a data set, whose updates are planned, or a stream.

Ranks know by arithmetic which updates a data set makes. When a stream ends is known to those that read it, so before
each update one small message tells all ranks how much there is, and that all have read the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data import Loader, MicroBatch, StreamLoader, map_arrays
from ..errors import DisagreementError, on_all_ranks
from .plan import FitPlan

if TYPE_CHECKING:
    from .trainer import Trainer

Parts = Sequence[MicroBatch]


class PlannedUpdates:
    """The updates of a data set.

    Args:
        trainer: whose position they begin at.
        plan: of the call of ``fit``.
        say: called with a line of text about the data.
    """

    def __init__(self, trainer: Trainer, plan: FitPlan, say: Any) -> None:
        loader = Loader(
            plan.dataset,
            plan.global_batch_size,
            drop_last=plan.drop_last,
            **_options(trainer, plan, say),
        )
        self._trainer, self._plan = trainer, plan
        first = trainer.position.epoch * plan.per_epoch + trainer.position.batch  # type: ignore[operator]
        left = plan.updates_left(trainer.position, trainer.step_count)
        self._stream = loader.updates(first, first + left)

    def pull(self) -> Parts:
        """Return this rank's part of the next update. **Local.**"""
        return next(self._stream)

    def agreed(self, parts: Parts) -> tuple[Parts, int] | None:
        """Return an update as all ranks do it, and its samples over all ranks. **Local** here."""
        return parts, self._plan.samples(self._trainer.position.batch)

    def close(self) -> None:
        """End the reading ahead. **Local.**"""
        self._stream.close()


class StreamedUpdates:
    """The updates of a stream; see :class:`PlannedUpdates`."""

    def __init__(self, trainer: Trainer, plan: FitPlan, say: Any) -> None:
        loader = StreamLoader(plan.dataset, plan.global_batch_size, **_options(trainer, plan, say))
        self._trainer, self._plan = trainer, plan
        self._sharded: bool = plan.dataset.sharded
        self._stream = loader.epochs(trainer.position.epoch, trainer.position.batch)
        self._ended = False  # this rank has nothing more in this epoch
        self._last: Parts = ()

    def pull(self) -> Parts:
        """Return this rank's part of the next update; nothing where its epoch has ended. **Local.**"""
        parts: Parts = () if self._ended else next(self._stream)
        self._ended = not parts
        return parts

    def agreed(self, parts: Parts) -> tuple[Parts, int] | None:
        """Return an update as all ranks do it, and its samples over all ranks; None at the end of an epoch.

        **Collective.**

        Raises:
            DisagreementError: ranks that should read one stream do not, on all ranks.
            ValueError: a stream without elements, on all ranks.
        """
        total = self._agreed_total(sum(part.total or 0 for part in parts))
        if total and not (self._plan.drop_last and total < self._plan.global_batch_size):
            self._last = parts or self._last
            parts = parts or [_nothing(part) for part in self._last] or self._empty()
            return (self._placed(parts) if self._sharded else parts), total
        while not self._ended:  # the rest of what this rank has is left out with the short batch
            self.pull()
        self._ended = False
        if self._trainer.position.batch == 0:
            raise on_all_ranks(
                ValueError(
                    "dataset: expected at least one batch in an epoch, got a stream that has ended; let it begin anew"
                )
            )
        return None

    def close(self) -> None:
        """End the reading ahead. **Local.**"""
        self._stream.close()

    def _agreed_total(self, mine: int) -> int:
        """Return the samples of the update over all ranks."""
        comm = self._trainer.world.axis("data")
        if comm.size == 1:
            return mine
        (most, least), (total,) = comm.reduce_numbers([mine, -mine], [float(mine)])
        if self._sharded:
            return int(total)
        if most != -least:
            raise on_all_ranks(
                DisagreementError(
                    f"dataset: expected the same stream on all ranks, got a batch of {-least} samples on one and of "
                    f"{most} on another; let all ranks read the same elements, or pass data.Stream(..., sharded=True)"
                )
            )
        return mine

    def _placed(self, parts: Parts) -> Parts:
        """Return parts with their place among those of all ranks, where the model draws numbers by sample."""
        if not self._trainer.parallel.draws_samples:
            return [replace(part, start=None, total=None) for part in parts]
        before = self._trainer.world.axis("data").exclusive_sum(sum(part.count for part in parts))
        return [replace(part, start=before + (part.start or 0), total=None) for part in parts]

    def _empty(self) -> Parts:
        """Return parts of a rank that has not seen a sample yet."""
        position, step = self._trainer.position, self._trainer.step_count
        nothing = MicroBatch(None, {}, None, 0, 0, 0, np.empty(0, np.int64), position.epoch, step)
        return [nothing] * self._trainer.accumulate


def _nothing(part: MicroBatch) -> MicroBatch:
    """Return a share of zero rows with the structure of an earlier one."""
    return replace(
        part,
        inputs=None if part.inputs is None else _rows(part.inputs),
        kwargs=_rows(part.kwargs),
        target=_rows(part.target),
        start=0,
        count=0,
        total=0,
        indices=np.empty(0, np.int64),
        slot=None,
    )


def _rows(tree: Any) -> Any:
    return map_arrays(lambda array, _: array[:0].copy(), tree)


def _options(trainer: Trainer, plan: FitPlan, say: Any) -> dict[str, Any]:
    return {
        "accumulate": trainer.accumulate,
        "rank": trainer.world.rank,
        "size": trainer.world.size,
        "seed": trainer.seed,
        "shuffle": plan.shuffle,
        "dtype": trainer.parallel.precision.master,
        "device": trainer.world.device,
        "say": say,
        "zero_rows": trainer.parallel.may_communicate,
    }
