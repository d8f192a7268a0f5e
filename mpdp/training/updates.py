"""Updates: each update of a trainer, run as graphs where that can be and eagerly elsewhere, and noted once it is known.

Both ways give the same bits. Read ``step`` for the eager one and ``parallel.graph_step`` for graphs.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import guard, kernels
from ..data import MicroBatch
from ..errors import on_all_ranks
from ..parallel.graph_step import GraphStep
from ..parallel.late_loss import LateLoss
from ..parallel.recorder import recorder_of
from ..parallel.shared_plans import share_plans
from . import preemption
from .evaluation import Tally

if TYPE_CHECKING:
    from .trainer import Trainer


_PATIENCE_SECONDS = 5.0


_unread: list[GraphStep] = []  # with updates that have failed, or are not done, of trainers that are gone


def _close(updates: weakref.ref[Updates]) -> None:
    """Look at the updates that are under way at the end of the program: one that has failed ends it with its error.

    **Collective** where one has failed, which all ranks see.
    """
    left = updates()
    graphs = _unread.pop() if left is None and _unread else None
    try:
        if left is not None:
            left.finish()
        elif graphs is not None:
            graphs.settle()
    except BaseException as error:  # atexit would print it, and the program would have succeeded
        guard.current.fail_at_exit(error)


class Updates:
    """Run the updates of one trainer.

    Args:
        trainer: holds the model, the optimizer and the run's position.
        graph: see :class:`mpdp.Trainer`.
        timed: the plans of the first update's products are timed after it.

    Attributes:
        graphs: runs updates as graphs; None where every step is eager.
    """

    def __init__(self, trainer: Trainer, graph: str | bool, timed: bool = False) -> None:
        self.trainer = trainer
        self.graphs: GraphStep | None = None
        self._listener: int | None = None  # of signals, in a loop of the program's own
        self._noted_first = False
        self._process = os.getpid()
        self._kernels = kernels.for_device(trainer.world.device)
        self.time_plans(timed)
        recorder = None if graph is False else recorder_of(trainer.world.device)
        if recorder is not None and trainer.world.in_threads and trainer.world.size > 1:
            # What one thread calls while another captures would end the capture.
            if graph is True:
                why = "ranks that are processes, got threads, whose steps run eagerly"
                raise on_all_ranks(ValueError(f"graph: expected {why}; leave it out"))
            recorder = None
        if recorder is not None:
            self.record_with(recorder, required=graph is True)

    def record_with(self, recorder: Any, required: bool) -> None:
        """Run updates as graphs that ``recorder`` makes. **Local.**"""
        trainer = self.trainer
        atexit.register(_close, weakref.ref(self))
        self.graphs = GraphStep(
            trainer.parallel,
            trainer.loss_function,
            trainer.optimizer,
            trainer.clip_norm,
            trainer.accumulate,
            recorder,
            required,
            trainer.clip_value,
        )

    def time_plans(self, wanted: bool) -> None:
        """Say whether the plans of the next update's products are to be timed after it. **Local.**"""
        self._plans_missing = self._kernels.plan_book.timed = wanted

    def run(
        self,
        parts: Sequence[MicroBatch],
        stop: bool,
        tally: Tally | None = None,
        first_loss: Any = None,
        row: dict[str, Any] | None = None,
    ) -> float | LateLoss:
        """Do one update at the trainer's ``last_lr`` from this rank's micro-batches, return its loss. **Collective.**

        Args:
            parts: the micro-batches.
            stop: ask all ranks to stop after this update; a signal does so too.
            tally: takes the metrics of the outputs.
            first_loss: the loss of ``parts[0]``, where it was computed already.
            row: what the log holds of the update beside what is noted here.
        """
        trainer, graphs = self.trainer, self.graphs
        trainer.world.activity.step = trainer.step_count
        if self._listener is None and not trainer.fitting and (trainer.run_dir or trainer.world.size > 1):
            self._listener = preemption.listen(
                trainer
            )  # until the trainer is gone: the loop's end is not known
        if preemption.asked():
            trainer._stop_asked = stop = True
        lr = trainer.last_lr
        looks = tally is not None and bool(tally.metrics)
        if graphs is not None and graphs.choose(parts, stop=stop, may=first_loss is None, looks=looks):
            look = tally.add_metrics if looks and tally is not None else None
            return graphs.run(parts, lr=lr, look=look, settled=self._note(lr, row))
        beside = {} if row is None else dict(row)
        note = self._note(lr, beside)
        waited = trainer.parallel.reducer.waited_seconds
        self._kernels.begin_step(trainer.step_count)
        loss = trainer.eager.run(parts, lr=lr, stop=stop, tally=tally, first_loss=first_loss)
        if graphs is not None:
            graphs.ran_eagerly()
        if row is not None:
            beside["message_seconds"] = round(trainer.parallel.reducer.waited_seconds - waited, 6)
        note(trainer.parallel.last_loss_sum, trainer.parallel.last_count)
        if not self._noted_first:
            self._noted_first = True
            preemption.note_update(trainer)
        if self._plans_missing:
            self._plans_missing = False
            share_plans(self._kernels.plan_book, trainer.world.axis("data"))
            trainer.folder.note_plans(self._kernels.plan_book.plans())
        return loss

    def __del__(self) -> None:
        """Log the last updates of a program with a loop of its own, which has no end of training that would."""
        self.close()

    def close(self) -> None:
        """Take over what the updates under way have reported, and write the log. **Local.**"""
        listener, self._listener = getattr(self, "_listener", None), None
        if listener is not None and os.getpid() == self._process:
            preemption.silence(listener)
        graphs = getattr(self, "graphs", None)
        if (
            graphs is not None and graphs.under_way and os.getpid() == self._process
        ):  # not a forked child's copy
            self.write_log()
            if graphs.under_way:
                _unread.append(graphs)

    def write_log(self, ends: bool = True) -> None:
        """Take over what the updates under way have reported, and write the log; raises nothing. **Local.**

        Args:
            ends: they come to their end and are waited for; they do not where one waits for ranks that are gone.
        """
        if self.graphs is not None and os.getpid() == self._process:  # not a forked child's copy
            self.graphs.take_finished(_PATIENCE_SECONDS if ends else 0.0)
        with contextlib.suppress(OSError):  # a full disk must not hide an error
            self.trainer.folder.flush()

    def finish(self) -> None:
        """Settle the updates under way at the end of a program, unless an error ends it. **Collective**; see settle.

        Raises:
            NonFiniteError: on all ranks, like all that :meth:`settle` raises.
            ValueError: a check on the device has found something in the last update.
        """
        if guard.current.error is not None or getattr(sys, "last_value", None) is not None:
            self.close()
            return
        if os.getpid() != self._process:
            return
        try:
            self.settle()
            error = self._kernels.pending_error()
            if error is not None:
                raise error
        finally:
            with contextlib.suppress(OSError):
                self.trainer.folder.flush()

    def settle(self) -> None:
        """Wait for the updates under way; see :meth:`Trainer.settle`. **Collective** in effect."""
        if self.graphs is not None:
            self.graphs.settle()

    def _note(self, lr: float, beside: dict[str, Any] | None) -> Callable[[float, float], None]:
        """Return what notes the update that comes next, once its loss sum and count are known."""
        trainer = self.trainer
        step, epoch, scale = trainer.step_count + 1, trainer.position.epoch + 1, trainer.parallel.loss_scale
        row = {"lr": lr} if scale is None else {"lr": lr, "loss_scale": scale.value}
        return partial(self._noted, step, epoch, row, beside or {})

    def _noted(
        self,
        step: int,
        epoch: int,
        row: dict[str, Any],
        beside: dict[str, Any],
        loss_sum: float,
        count: float,
    ) -> None:
        """Take over what an update has summed up; where it ran as a graph, some updates later. **Local.**"""
        trainer = self.trainer
        scale = trainer.parallel.loss_scale
        if scale is not None:
            row["skipped"] = scale.skipped
        if trainer.fitting:
            trainer.position.add_loss(loss_sum, count)
        trainer.folder.step_row(step, epoch, loss_sum / count if count else 0.0, **row, **beside)
