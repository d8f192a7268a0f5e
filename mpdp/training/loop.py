"""The loop of ``fit``: update after update, epoch after epoch, until the plan is done or somebody asks to stop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ..comm.agreement import together
from ..data import MicroBatch
from ..nn.metrics import finished, metric_name
from ..optim import Schedule
from ..report.progress import Progress
from ..report.step_times import StepTimes, stragglers
from .calling import call_back
from .evaluation import Tally
from .plan import FitPlan
from .sources import PlannedUpdates, StreamedUpdates

if TYPE_CHECKING:
    from ..parallel import DataParallel
    from .trainer import Trainer


@contextmanager
def _late(parallel: DataParallel) -> Iterator[None]:
    """Let updates end while their weights are under way: between two of them no program's code reads weights."""
    parallel.gives_late = True
    try:
        yield
    except BaseException as error:
        if getattr(error, "agreed", False):  # the program may go on; else the job is about to end
            parallel.arrive()
        raise
    finally:
        parallel.gives_late = False


class FitLoop:
    """Run one call of ``fit``.

    Args:
        trainer: does the updates, and holds position, files and callbacks.
        plan: what was asked for.
        progress: shows how far it is.
    """

    def __init__(self, trainer: Trainer, plan: FitPlan, progress: Progress) -> None:
        self.trainer = trainer
        self.plan = plan
        self.progress = progress
        self._checked_first = False
        self.times = StepTimes()
        self._waited = 0.0  # seconds for the data of the update under way

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do; an epoch whose last update is done is still to be closed."""
        trainer, plan = self.trainer, self.plan
        if trainer.position.batch == plan.per_epoch:
            return False
        return trainer.should_stop or plan.updates_left(trainer.position, trainer.step_count) == 0

    def run(self) -> None:
        """Run the updates that are left, and close each epoch whose last update is done. **Collective.**"""
        trainer, plan, position = self.trainer, self.plan, self.trainer.position
        if self.finished:
            self.progress.say(f"fit: nothing to do, the run already has {trainer.step_count} updates")
            return
        modules = [module for _, module in trainer.model.named_modules()]
        kind = StreamedUpdates if plan.streamed else PlannedUpdates
        with closing(kind(trainer, plan, self.progress.say)) as updates, _late(trainer.parallel):
            while not self.finished:
                if position.batch == plan.per_epoch:
                    self._close_epoch()
                    continue
                for module in modules:  # to find them again would take longer than a step that is a graph
                    if not module.training:
                        module.training = True
                start, waited = time.perf_counter(), trainer.parallel.reducer.waited_seconds
                found = self._next(updates)
                if found is None:
                    self._close_epoch()
                    continue
                parts, samples = found
                self._train_one(parts, {"samples": samples, "data_seconds": round(self._waited, 6)})
                seconds = time.perf_counter() - start
                self.times.add(seconds, self._waited, trainer.parallel.reducer.waited_seconds - waited)
                self.progress.step(trainer.late_loss, samples)
                trainer.after_step(ends_epoch=position.batch == plan.per_epoch)
        trainer.settle()

    def report(self) -> None:
        """Log where the time of each rank's steps went, who is slow, and the memory of this rank. **Collective.**"""
        trainer = self.trainer
        rows = self.times.gather(trainer.world.axis("data"))
        if self.times.steps >= 0:
            trainer.folder.row(kind="ranks", step=trainer.step_count, ranks=rows)
            for line in stragglers(rows):
                trainer.world.log("warning", line)
        trainer.folder.row(kind="memory", step=trainer.step_count, **trainer.memory())
        trainer.folder.flush()

    def _next(self, updates: PlannedUpdates | StreamedUpdates) -> tuple[Sequence[MicroBatch], int] | None:
        """Return the next update; note how long its data were waited for. **Collective.**"""
        start = time.perf_counter()
        if self._checked_first:
            parts = updates.pull()
        else:
            parts = together(self.trainer.world.axis("data"), updates.pull)
        self._waited = time.perf_counter() - start
        return updates.agreed(parts)

    def _train_one(self, parts: Sequence[MicroBatch], row: dict[str, Any]) -> None:
        """Do one update, of which the log holds ``row`` too."""
        trainer, plan = self.trainer, self.plan
        comm = trainer.world.axis("data")
        tally = Tally(plan.metrics if plan.validation is None else ())
        if self._checked_first:
            trainer.update(parts, tally=tally, row=row)
        else:
            # The first batch meets the model here: what does not fit is an error on all ranks, before time is spent.
            if (
                trainer.parallel.communicates
            ):  # a rank that raises is not in the agreement while others wait for it
                loss = trainer.eager.loss(parts[0], tally, plan.dataset)
            else:
                loss = together(comm, lambda: trainer.eager.loss(parts[0], tally, plan.dataset))
            self._checked_first = True
            trainer.update(parts, tally=tally, first_loss=loss, row=row)
        metrics = tally.values[1:]
        if len(metrics):
            flat = metrics.reshape(-1).copy()
            comm.all_reduce(flat, lane="urgent")
            metrics = flat.reshape(-1, 2)
        trainer.position.add_update(metrics.tolist())

    def _close_epoch(self) -> None:
        """Validate, add the epoch's row to the history, call back, and save. **Collective.**

        A checkpoint of ``save_every`` that is due with the epoch's last update is taken here and not before: who takes
        up one that holds the closed epoch does not validate again, and logs and shows its row once.
        """
        trainer, plan, position = self.trainer, self.plan, self.trainer.position
        trainer.settle()
        row: dict[str, Any] = {
            "epoch": position.epoch + 1,
            "step": trainer.step_count,
            "loss": position.mean_loss(),
        }
        if plan.validation is None:
            for metric, (total, count) in zip(plan.metrics, position.metrics):
                row[metric_name(metric)] = together(
                    trainer.world.axis("data"), partial(finished, metric, total, count)
                )
        else:
            results = trainer.evaluate(
                plan.validation, plan.metrics, global_batch_size=plan.global_batch_size, ema=plan.ema
            )
            row["validation_loss"] = results["loss"]
            row.update({name: value for name, value in results.items() if name != "loss"})
            call_back(trainer, "on_validation", results)
        position.close_epoch(row)
        if isinstance(trainer.schedule, Schedule):
            trainer.schedule.observe(row)
        trainer.folder.row(kind="epoch", **row)
        self.progress.epoch(row)
        call_back(trainer, "on_epoch")
        due = trainer.save_due and position.saved_step != trainer.step_count
        if trainer.keep_best is not None:
            due = due or position.is_best(trainer.keep_best, trainer.best_mode)
        if due:
            trainer.save(wait=not trainer.async_save)
        trainer.agree_to_stop()
