"""Trainer: the public training loop over one model replica a rank.

It owns the run: position, schedule, files, callbacks. One update is in ``step``; the arithmetic over ranks is in
``parallel.data_parallel``. Follow ``Trainer.step`` to read one step from here to the wire.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..comm.agreement import agree, compare, together
from ..data import MicroBatch
from ..nn import Module
from ..optim import LossScale, Optimizer, constant
from ..parallel import averaging
from ..parallel.data_parallel import DataParallel
from ..parallel.forms import leading_length
from ..parallel.late_loss import LateLoss
from ..parallel.record import Kind, exchange
from ..report.progress import Progress
from ..world import World, joined
from . import arguments, evaluation
from .callbacks import Callback, check_names
from .calling import agree_to_stop, call_back
from .evaluation import Metric
from .failing import ends_the_job
from .loop import FitLoop
from .plan import FitPlan
from .position import Position
from .preemption import ends_in_order, obey
from .run_files import RunFiles
from .run_folder import Resumed, RunFolder
from .saving import Saves
from .step import EagerStep, cut_batch, take_apart
from .updates import Updates

History = list[dict[str, Any]]
_CHECK_AFTER = (1, 2, 10)
_CHECK_EVERY = 500  # updates; one pass over weights and moments, about 1 ms for a million parameters


class Trainer(RunFiles):
    """Train a model on all ranks of a world, exactly as one rank would on the whole global batch.

    **Collective** to construct: all ranks compare their arguments, then take rank 0's parameters.

    Args:
        model: an ``nn.Module``; the same on every rank.
        loss: ``loss(output, target)``: a loss of ``nn``, a scalar Tensor that is the mean over samples, or a pair
            ``(sum, count)``.
        optimizer: an optimizer of ``optim``.
        world: the ranks (default: ``mpdp.init()``).
        schedule: factor on the optimizer's learning rate as a function of the update's index.
        precision: ``"float32"``, ``"tf32"``, ``"bfloat16"``, ``"float16"`` or ``"float64"`` (a float32 model is
            widened). Under 16 bits, weights, moments, gradients, norms and losses stay float32; forward and
            backward run in 16 bits.
        reduce_dtype: dtype of the gradient buffer (default: that of the weights, so float32 under 16 bits).
        loss_scale: an ``optim.LossScale`` with other numbers than the default ones, for ``"float16"`` only.
        placement: where optimizer state lives: ``"replicated"`` (N identical optimizers), ``"root"`` (one, on rank 0)
            or ``"sharded"`` (each rank updates 1/N); see ``docs/placements.md``.
        accumulate: global micro-batches per update.
        clip_norm: scale the averaged global gradient by ``min(1, clip_norm / (norm + 1e-6))``.
        seed: order of samples and dropout. Initial weights follow ``mpdp.seed``.
        graph: whether steps on a GPU run as captured graphs: ``"auto"`` does so where it is possible and says once
            why it is not, ``True`` makes that an error, ``False`` runs every step eagerly.
        plans: ``"suggested"`` or ``"timed"``: on a GPU, rank 0 times the libraries' plans for the products of the first
            update, and all ranks compute by the fastest ones from the second on; checkpoints hold them.
        chunk_bytes: size of a middle chunk of the reduction in bytes (default: the transport's).
        run_dir: folder for log and checkpoints; None writes nothing.
        save_every: updates between checkpoints; None saves only on :meth:`save`.
        keep: newest checkpoints to keep.
        keep_best: a name in the rows of the history, as ``"validation_loss"``: an epoch that brings the best
            value so far is saved, and that checkpoint kept beside the newest.
        best_mode: whether ``"min"`` or ``"max"`` of it is best; known for losses and perplexity.
        async_save: checkpoints of ``save_every`` and ``keep_best`` are copied to host memory and written by a thread.
        callbacks: objects with the methods of :class:`mpdp.Callback`.
        clip_value: cut each element of the averaged global gradient, after ``clip_norm``, to [-clip_value, clip_value].
        ema: keep an average of the weights with this decay, see ``optim.WeightAverage`` and :meth:`averaged`.
        on_divergence: of replicas whose bits differ: ``"stop"`` raises, ``"repair"`` takes what most hold.

    Attributes:
        step_count: finished updates. ``epoch``: epochs finished. ``loss``: global mean loss of the last update, which
            is waited for; ``late_loss``: the same, waited for when it is looked at.
        should_stop: set it on any rank, and all ranks stop after the same step: the one under way in a callback, the
            next one elsewhere. It reads True once all have agreed.
        lr: learning rate of the next update; ``last_lr``: of the last one.

    Raises:
        ValueError, TypeError: a bad argument, on all ranks.
        DisagreementError: ranks differ, on all ranks; the message names the first difference.

    Example:
        >>> import mpdp, numpy as np
        >>> from mpdp import data, nn, optim
        >>> x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
        >>> trainer = mpdp.Trainer(nn.Linear(3, 2), nn.cross_entropy, optim.SGD(lr=0.5))
        >>> history = trainer.fit(data.ArrayDataset(x, (x[:, 0] > 0).astype("int64")), epochs=2, global_batch_size=16)
        >>> [row["epoch"] for row in history]
        [1, 2]
    """

    def __init__(
        self,
        model: Module,
        loss: Callable[[Any, Any], Any],
        optimizer: Optimizer,
        *,
        world: World | None = None,
        schedule: Callable[[int], float] | None = None,
        precision: str = "float32",
        reduce_dtype: str | None = None,
        loss_scale: LossScale | None = None,
        placement: str = "replicated",
        accumulate: int = 1,
        clip_norm: float | None = None,
        seed: int = 0,
        graph: str | bool = "auto",
        plans: str = "suggested",
        chunk_bytes: int | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        save_every: int | None = None,
        keep: int = 3,
        keep_best: str | None = None,
        best_mode: str | None = None,
        async_save: bool = False,
        callbacks: Sequence[Callback] = (),
        clip_value: float | None = None,
        ema: float | None = None,
        on_divergence: str = "stop",
    ) -> None:
        self.world = joined(world)
        comm = self.world.axis("data")
        self.depth = 0  # of public calls inside one another
        self.schedule = schedule if schedule is not None else constant()
        exchange(comm, Kind.CONSTRUCT, 0)
        error: Exception | None = None
        try:
            arguments.check(
                model=model, loss=loss, optimizer=optimizer, schedule=self.schedule, precision=precision,
                placement=placement, accumulate=accumulate, clip_norm=clip_norm, seed=seed, graph=graph, plans=plans,
                save_every=save_every, keep=keep, keep_best=keep_best, best_mode=best_mode, run_dir=run_dir,
                callbacks=callbacks, clip_value=clip_value, ema=ema,
            )  # fmt: skip
            arguments.check_graph(graph, self.world)
            arguments.check_policy(on_divergence)
            arguments.cast(model, precision, self.world)
        except Exception as caught:
            error = caught
        agree(comm, error)
        self.model, self.loss_function, self.optimizer = model, loss, optimizer
        self.precision, self.placement = precision, placement
        self.accumulate = int(accumulate)
        self.clip_norm, self.clip_value = arguments.plain(clip_norm), arguments.plain(clip_value)
        self.ema = arguments.plain(ema)
        self.seed, self.plans = int(seed), plans
        self.save_every = arguments.plain(save_every)
        self.keep, self.keep_best = keep, keep_best
        self.best_mode = "min" if keep_best is None else arguments.mode_of("best_mode", keep_best, best_mode)
        self.async_save = bool(async_save)
        self.callbacks, self.on_divergence = tuple(callbacks), on_divergence
        self._stop_asked = self._stop_agreed = self.fitting = False
        self.last_lr = float("nan")
        self.late_loss: float | LateLoss = float("nan")
        self.parallel = DataParallel(
            model, self.world, precision=precision, reduce_dtype=reduce_dtype, loss_scale=loss_scale,
            placement=placement, chunk_bytes=chunk_bytes, seed=self.seed,
        )  # fmt: skip
        given = {"run_dir": "none" if run_dir is None else "a folder", "graph": graph}
        compare(comm, "trainer", self.describe() | given | {"on_divergence": on_divergence})
        together(comm, lambda: self.parallel.bind_optimizer(optimizer))
        if ema is not None:
            self.parallel.keep_average(ema)
        self.eager = EagerStep(self.parallel, loss, optimizer, self.clip_norm, self.clip_value)
        self.updates = Updates(self, graph, timed=plans == "timed")
        self.position = Position()
        self.folder = RunFolder(run_dir, writes=self.world.rank == 0)
        self.saves = Saves(self)
        self._resumed = Resumed()
        self._opened = False
        self._nominal_fixed = False

    def describe(self) -> dict[str, Any]:
        """Return what must be equal on all ranks beside the model. **Local.**"""
        return arguments.settings(self)

    # -- where the run stands

    @property
    def step_count(self) -> int:
        """Finished updates."""
        return self.parallel.step_count

    @property
    def epoch(self) -> int:
        """Finished epochs."""
        return self.position.epoch

    @property
    def history(self) -> History:
        """One row an epoch since the start of the run."""
        return self.position.history

    @property
    def should_stop(self) -> bool:
        """Whether all ranks have agreed to stop. Set it to True on any rank to ask for that."""
        return self._stop_agreed

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self._stop_asked = bool(value)
        if self.world.size == 1:
            self._stop_agreed = self._stop_asked

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return arguments.learning_rate(self.optimizer, self.schedule, self.step_count)

    @property
    def loss(self) -> float:
        """Global mean loss of the last update. Where that is still under way it is waited for."""
        return float(self.late_loss)

    # -- training

    @ends_the_job
    @ends_in_order
    def fit(
        self,
        dataset: Any,
        epochs: int | None = None,
        updates: int | None = None,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        validation: Any = None,
        metrics: Sequence[Metric] = (),
        progress: bool = True,
        ema: bool = False,
    ) -> History:
        """Train until ``epochs`` passes or ``updates`` updates are done since the start of the run.

        **Collective.** After :meth:`resume` it goes on where the checkpoint was written and ends where the run that
        was stopped would have ended.

        Args:
            dataset: any object with ``__len__`` and ``__getitem__``, the same on all ranks; or a ``data.Stream``, or
                what can be iterated over anew each epoch.
            epochs: passes over the data, counted from the start of the run.
            updates: stop after so many updates, counted from the start of the run.
            global_batch_size: samples per update over all ranks and micro-batches.
            shuffle: a new keyed order each epoch.
            drop_last: leave out a last global batch that is not full.
            validation: data set evaluated after each epoch.
            metrics: ``metric(output, target) -> (sum, count)``; of the validation data, or of the training
                batches where there is none.
            progress: show on stderr how far the run is; False is quiet.
            ema: validate the averaged weights, as ``evaluate(ema=True)``; what follows the history follows them.

        Returns:
            one row an epoch: ``epoch, step, loss``, each metric's name, and ``validation_loss`` where there is
            validation data.

        Raises:
            ValueError, TypeError: a bad argument, sample or label, on all ranks. Preempted: a signal came; it is saved.
            DisagreementError: ranks differ in arguments, length of the data or steps, on all ranks.
        """
        self._refuse_inside_fit("fit")
        comm = self.world.axis("data")
        plan = FitPlan(
            dataset, epochs, updates, global_batch_size, shuffle, drop_last, validation, metrics, ema
        )  # fmt: skip
        exchange(comm, Kind.FIT, self.step_count)
        self.saves.check()
        together(comm, lambda: plan.check(self.accumulate))
        compare(comm, "fit", plan.describe())
        together(comm, lambda: check_names(self, plan.row))
        if plan.ema:
            together(comm, lambda: averaging.require(self.parallel._replica))
        agree(
            comm,
            self.position.begin(
                plan.order(self.world.size), 0 if validation is not None else len(plan.metrics)
            ),
        )
        self._stop_asked = self._stop_agreed = False
        shown = Progress(
            self.world.rank == 0 and bool(progress), plan.total, self.step_count, self.world.size
        )
        loop = FitLoop(self, plan, shown)
        if self._resumed.rows and not self._opened and loop.finished:  # its log stays as the run has left it
            loop.run()
            shown.close()
            return self.history
        self._open_folder({"fit": plan.describe()})
        self._fix_nominal(plan.global_batch_size)
        self.fitting, done = True, self.step_count
        try:
            loop.run()
            if self.step_count > done:
                self.check_replicas()  # what fit hands back is the same on every rank
            if self.save_every is not None and self.position.saved_step != self.step_count:
                self.save(wait=not self.async_save)
            self.saves.finish()
            loop.report()
        finally:
            self.fitting = False
            shown.close()
        return self.history

    def _refuse_inside_fit(self, call: str) -> None:
        """Refuse a call that would move the place in the data while a loop of ``fit`` runs. **Local.**"""
        if self.fitting:
            raise ValueError(
                f"{call}: expected a call outside fit, got one in a callback of it; set should_stop and call it later"
            )
        averaging.refuse(self.parallel._replica, call)

    def update(self, parts: Sequence[MicroBatch], **options: Any) -> None:
        """Do one update from this rank's micro-batches; see ``Updates.run``. **Collective.**"""
        averaging.refuse(self.parallel._replica, "step")
        self.last_lr = self.parallel.next_rate = self.lr
        stop = (
            self._stop_asked or self.saves.has_news
        )  # either is a flag that all ranks see after this update
        self.late_loss = self.updates.run(parts, stop=stop, **options)

    def settle(self) -> None:
        """Wait for the updates under way, and raise what has gone wrong in them. **Collective** in effect."""
        self.updates.settle()
        self.parallel.arrive()

    @property
    def save_due(self) -> bool:
        """Whether ``save_every`` names the last update."""
        return self.save_every is not None and self.step_count % self.save_every == 0

    def after_step(self, ends_epoch: bool = False) -> None:
        """Check and save what is due after an update, and call back.

        **Collective.**

        Args:
            ends_epoch: an epoch ends with the update: what is due then is saved when the epoch is closed.
        """
        step, stop = self.step_count, self.parallel.stop_agreed
        if stop and self.saves.under_way:
            stop = self.saves.look(self._stop_asked)
        self._stop_agreed = self._stop_agreed or stop
        if step in _CHECK_AFTER or step % _CHECK_EVERY == 0:
            self.check_replicas()
        if self.callbacks:
            self.parallel.arrive()  # they may have kept an array of weights
        call_back(self, "on_step")
        if self.save_due and not ends_epoch:
            self.save(wait=not self.async_save)
        self.saves.collect()
        self.agree_to_stop()
        if self._stop_agreed:
            obey(self)

    def agree_to_stop(self) -> None:
        """Carry to all ranks what a callback has asked for on one, before another update. **Collective.**"""
        self._stop_agreed = agree_to_stop(self, self._stop_asked) or self._stop_agreed

    @ends_the_job
    def step(self, batch: Any) -> float | LateLoss:
        """Do one update from this rank's own batch, for programs with a loop of their own.

        **Collective.**

        Args:
            batch: ``(x, y)``, ``(inputs..., target)`` or a dict with ``"target"``; its length may differ between
                ranks and may be 0. It is cut into ``accumulate`` micro-batches.

        Returns:
            the global mean loss over all ranks' samples. A step that runs as a graph returns before it is done: its
            loss waits when ``float()`` or a comparison asks for it, and what is not finite is an error of one of the
            next two steps, with the weights as they were before it.
        """
        comm = self.world.axis("data")
        self.world.activity.step = self.step_count
        inputs, kwargs, target = take_apart(batch, self.world.device)
        count = leading_length(inputs, kwargs)
        start = None
        if not (self._opened and self._nominal_fixed) or self.parallel.draws_samples:
            total = exchange(comm, Kind.STEP_BEGIN, self.step_count, sums=(count,)).sums[0]
            self._open_folder()
            self._fix_nominal(total)
            start = comm.exclusive_sum(count)
        whole = MicroBatch(inputs, kwargs, target, start, count, None, None, self.epoch, self.step_count)
        parts = [whole] if self.accumulate == 1 else cut_batch(whole, self.accumulate)
        self.update(parts)
        self.after_step()
        return self.late_loss

    @ends_the_job
    def evaluate(
        self,
        dataset: Any,
        metrics: Sequence[Metric] = (),
        global_batch_size: int | None = None,
        ema: bool = False,
    ) -> dict[str, float]:
        """Return the mean loss and metrics over a data set, every sample counted once.

        **Collective.** The same numbers on every rank, for any number of ranks.

        Args:
            dataset: the same on all ranks, of one sample or more; it may be shorter than the number of ranks.
            metrics: ``metric(output, target) -> (sum, count)``, or ``nn.Gather``.
            global_batch_size: samples per forward pass over all ranks (default: 1024).
            ema: evaluate the averaged weights.

        Returns:
            ``{"loss": ..., name of each metric: ...}``; NaN where all targets are left out, as with ``ignore_index``.

        Raises:
            ValueError, TypeError: a bad argument, sample or label, or empty data, on all ranks.
        """
        self.settle()
        return evaluation.run(self, dataset, metrics, global_batch_size, ema)

    @ends_the_job
    def predict(
        self, dataset: Any, global_batch_size: int | None = None, everywhere: bool = True, ema: bool = False
    ) -> Any:
        """Return the model's outputs for every sample, in the order of the data set.

        **Collective.** In evaluation mode. A target in the data, if there is one, is left out: samples are of the
        forms that ``fit`` takes, or an array alone.

        Args:
            dataset: the same on all ranks.
            global_batch_size: samples per forward pass over all ranks (default: 1024).
            everywhere: return the outputs on every rank; with False on rank 0 alone, and None elsewhere.
            ema: predict by the averaged weights.

        Returns:
            NumPy arrays of one row a sample, in the structure of the model's output; None where there are no samples.
        """
        self.settle()
        return evaluation.predict(self, dataset, global_batch_size, everywhere, ema)

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights of ``ema=``; it trains and saves outside of it.

        **Collective.**
        """
        self.settle()
        return self.parallel.averaged()

    def _fix_nominal(self, count: float) -> None:
        if not self._nominal_fixed and count > 0:  # a first batch without samples says nothing
            self.parallel.set_nominal_count(count)
            self._nominal_fixed = True

    def memory(self) -> dict[str, int]:
        """Return the bytes that this rank takes at the most, by purpose; see :meth:`DataParallel.memory`. **Local.**"""
        return self.parallel.memory()

    # -- replicas

    def check_replicas(self) -> None:
        """Check that weights, moments and buffers hold the same bits on every rank, as ``on_divergence`` says.

        **Collective.** ``"stop"`` raises DivergenceError on all ranks, naming the rank and the parameter.
        """
        self.settle()
        self.parallel.check_replicas(repair=self.on_divergence == "repair")

    def freeze(self, *names: str) -> None:
        """Stop training the named parameters from the next step on. **Collective.**"""
        self.settle()
        self.parallel.freeze(*names)

    def thaw(self, *names: str) -> None:
        """Train the named parameters again, their moments starting from zero. **Collective.**"""
        self.settle()
        self.parallel.thaw(*names)
