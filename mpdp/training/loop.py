"""The loop of ``fit``: update after update, epoch after epoch, until the plan is done or somebody asks to stop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..comm.agreement import together
from ..data import Loader, MicroBatch
from ..nn.metrics import finished, metric_name
from ..report.progress import Progress
from .calling import call_back
from .evaluation import Tally
from .plan import FitPlan

if TYPE_CHECKING:
    from .trainer import Trainer


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
        loader = Loader(
            plan.dataset,
            plan.global_batch_size,
            accumulate=trainer.accumulate,
            rank=trainer.world.rank,
            size=trainer.world.size,
            seed=trainer.seed,
            shuffle=plan.shuffle,
            drop_last=plan.drop_last,
            dtype=trainer.parallel.precision.master,
            device=trainer.world.device,
            say=self.progress.say,
            zero_rows=trainer.parallel.may_communicate,
        )
        first = position.epoch * plan.per_epoch + position.batch
        last = first + plan.updates_left(position, trainer.step_count)
        with loader.updates(first, last) as stream:
            while not self.finished:
                if position.batch == plan.per_epoch:
                    self._close_epoch()
                    continue
                trainer.model.train()
                samples = plan.samples(position.batch)
                self._train_one(stream)
                self.progress.step(trainer.late_loss, samples)
                trainer.after_step()
        trainer.settle()

    def _train_one(self, stream: Iterator[Sequence[MicroBatch]]) -> None:
        """Do one update from the loader's stream."""
        trainer, plan = self.trainer, self.plan
        comm = trainer.world.axis("data")
        tally = Tally(plan.metrics if plan.validation is None else ())
        if self._checked_first:
            trainer.update(next(stream), tally=tally)
        else:
            # The first batch meets the model here: what does not fit is an error on all ranks, before time is spent.
            parts = together(comm, lambda: next(stream))
            if (
                trainer.parallel.communicates
            ):  # a rank that raises is not in the agreement while others wait for it
                loss = trainer.eager.loss(parts[0], tally, plan.dataset)
            else:
                loss = together(comm, lambda: trainer.eager.loss(parts[0], tally, plan.dataset))
            self._checked_first = True
            trainer.update(parts, tally=tally, first_loss=loss)
        metrics = tally.values[1:]
        if len(metrics):
            flat = metrics.reshape(-1).copy()
            comm.all_reduce(flat, lane="urgent")
            metrics = flat.reshape(-1, 2)
        trainer.position.add_update(metrics.tolist())

    def _close_epoch(self) -> None:
        """Validate, add the epoch's row to the history, and call back. **Collective.**"""
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
                plan.validation, metrics=plan.metrics, global_batch_size=plan.global_batch_size
            )
            row["validation_loss"] = results["loss"]
            row.update({name: value for name, value in results.items() if name != "loss"})
            call_back(trainer, "on_validation", results)
        position.close_epoch(row)
        trainer.folder.row(kind="epoch", **row)
        self.progress.epoch(row)
        call_back(trainer, "on_epoch")
        trainer.agree_to_stop()
