"""DataParallel: one replica of a model, its arenas, and the reduction of its gradients.

It owns the arenas and the reducer and knows nothing of data sets, schedules or files; ``training.trainer`` does.
Sums and counts are what it carries: backward starts from the loss *sum*, ranks add gradients and counts, and the
optimizer divides by the global count. So shares of any size, also empty ones, are exact.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from .. import kernels
from ..autodiff import Buffer, Parameter, SampleContext, Tape, samples
from ..comm.agreement import compare, together
from ..errors import on_all_ranks
from ..nn import Module
from ..optim import LossScale, Optimizer, WeightAverage
from ..world import World, joined
from . import averaging, non_finite
from .arena import GradientArena
from .collectives import AxisPeers, average_trained
from .forms import check_clip, check_rate, leading_length, split_loss
from .layout import Layout
from .memory import MemoryUse
from .plans import Plan, Plans
from .precision import Precision, loss_scale_of
from .record import Kind, agree_used, exchange, raise_changed, raise_unused
from .reducer import Reducer
from .replica import Replica
from .replica_check import state_of
from .update import squared_norm, sums_of, to_be_applied, update


class DataParallel:
    """Hold one replica of a model and reduce its gradients over the world's data axis.

    **Collective** to construct: models are compared, then rank 0's parameters and buffers are broadcast.

    Args:
        model: an ``nn.Module`` whose trainable parameters share one dtype; the same on every rank.
        world: the ranks (default: ``mpdp.init()``).
        precision: ``"float32"``, ``"float64"``, ``"tf32"``, ``"bfloat16"`` or ``"float16"``; the default is the
            parameters' dtype. Under 16 bits the weights stay float32, and forward and backward read 16-bit copies.
        reduce_dtype: dtype of the gradient buffer (default: the parameters', float32 for float16).
        loss_scale: how the scale of float16 gradients is found (default: ``optim.LossScale()``).
        placement: where optimizer state lives: ``"replicated"`` (every rank updates all weights), ``"root"`` (rank 0
            does, and broadcasts them) or ``"sharded"`` (each rank updates its share).
        chunk_bytes: size of a middle chunk in bytes (default: the transport's).
        seed: seed of dropout masks.
        nominal_count: samples one expects in a global batch; gradients are scaled by the power of two nearest
            to its inverse while they are summed, which costs no rounding and lets float16 survive.

    Attributes:
        model, world: as given.
        arena: the gradient arena; ``weights``: the flat weights, both over ``layout``.
        step_count: finished updates.
        next_rate: learning rate of the next update, which ranks then compare before they reduce; None does not.
        last_count, last_loss_sum: global count and loss sum of the last update.
        precision: what is kept in which dtype.
        loss_scale: the scale of float16 gradients, or None under another precision.
        exponent: gradients are summed times 2^-exponent.
        draws_samples: some module draws random numbers keyed by sample.
        gives_late: let :meth:`step` end while weights are under way, until :meth:`arrive` or who reads them waits.

    A module that communicates (``nn.BatchNorm2d``) takes part in every rank's forward and backward pass: call the model
    and ``backward`` on every rank, also on zero rows.

    Example:
        >>> import mpdp, numpy as np
        >>> from mpdp import nn, optim
        >>> model = nn.Linear(4, 3)
        >>> parallel = mpdp.DataParallel(model)
        >>> x, y = np.ones((8, 4), "float32"), np.zeros(8, "int64")
        >>> parallel.backward(nn.cross_entropy(parallel(x), y))
        >>> loss = parallel.step(optim.SGD(lr=0.1))
        >>> loss > 0
        True
    """

    def __init__(
        self,
        model: Module,
        world: World | None = None,
        *,
        precision: str | None = None,
        reduce_dtype: str | None = None,
        loss_scale: LossScale | None = None,
        placement: str = "replicated",
        chunk_bytes: int | None = None,
        seed: int = 0,
        nominal_count: float = 1.0,
    ) -> None:
        self.world = joined(world)
        self.comm = self.world.axis("data")
        self.model = model
        self.seed = seed
        self.step_count = 0
        self.next_rate: float | None = None
        self.last_count, self.last_loss_sum, self.gives_late = 0.0, 0.0, False
        self.set_nominal_count(nominal_count)
        exchange(self.comm, Kind.CONSTRUCT, 0)
        compare(self.comm, "model", {"dropout seed": seed, "nominal_count": nominal_count})
        self._replica = Replica(
            model, self.world.device, self.comm, precision, reduce_dtype, chunk_bytes, placement
        )
        self.precision: Precision = self._replica.precision
        self.loss_scale = together(self.comm, lambda: loss_scale_of(self.precision, loss_scale))
        settings = {} if self.loss_scale is None else self.loss_scale.describe() | self.loss_scale.state()
        compare(self.comm, "loss_scale", {name: repr(value) for name, value in settings.items()})
        self._memory = MemoryUse()
        modules = [module for _, module in model.named_modules()]
        self.draws_samples = any(module.draws_samples for module in modules)
        self._communicating = [m for m in modules if m.communicates] if self.comm.size > 1 else []
        for module in self._communicating:
            module.peers = AxisPeers(self.comm)
        self._averaging = [m for m in modules if m.averaged_buffers] if self.comm.size > 1 else []
        self._kernels = kernels.for_device(self.world.device)
        self._plans = Plans(self._replica)
        self._reset()

    def _reset(self) -> None:
        """Forget what an update gathered so far."""
        self._signatures: tuple[int, ...] = ()
        self._count = 0.0
        self._loss_sum = 0.0
        self._agreed: tuple[float, float] | None = None
        self._used: np.ndarray | None = None
        self._forward_count: int | None = None
        self._own = 0  # samples of the update that this rank has run so far
        self._forwarded = 0  # samples of the update that all ranks have run so far
        self.stop_agreed = False

    @property
    def layout(self) -> Layout:
        """The map from names to ranges; freezing and thawing make a new one."""
        return self._replica.layout

    @property
    def arena(self) -> GradientArena:
        """The gradients over ``layout``."""
        return self._replica.arena

    @property
    def reducer(self) -> Reducer:
        """What reduces them."""
        return self._replica.reducer

    @property
    def weights(self) -> Any:
        """The flat weights over ``layout``; under ``"sharded"`` and 16 bits a HeldArray, of this rank's ranges."""
        return self._replica.weights

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Name to parameter, in registration order; a tied one stands once."""
        return self._replica.parameters

    @property
    def communicates(self) -> bool:
        """Whether a forward pass now, and its backward, exchange numbers with other ranks: all have to run them."""
        return any(module.training for module in self._communicating)

    @property
    def may_communicate(self) -> bool:
        """Whether the model :attr:`communicates` when it trains."""
        return bool(self._communicating)

    @property
    def buffers(self) -> dict[str, Buffer]:
        """Name to buffer."""
        return self._replica.buffers

    def set_nominal_count(self, count: float) -> None:
        """Fix the power of two by which gradient sums are scaled. **Local**, with the same count on every rank."""
        self.exponent = max(0, round(math.log2(count))) if count >= 1 else 0

    def broadcast(self, *, root: int = 0) -> None:
        """Give every rank the parameters and buffers of ``root``. **Collective.**"""
        exchange(self.comm, Kind.BROADCAST, self.step_count)
        self._replica.broadcast(root=root)

    def bind_optimizer(self, optimizer: Optimizer) -> None:
        """Give the optimizer its place over the layout; the first call allocates its state. **Local.**"""
        self._replica.bind_optimizer(optimizer)

    def keep_average(self, decay: float) -> None:
        """Keep a moving average of the weights, of :class:`optim.WeightAverage`, from the next update on. **Local.**"""
        averaging.keep(self._replica, WeightAverage(decay))

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights, without updates inside. **Collective.**"""
        if self._replica.masters is not None:  # else nobody waits for a rank that does so alone
            exchange(self.comm, Kind.AVERAGED, self.step_count)
        return averaging.averaged(self._replica)

    def freeze(self, *names: str) -> None:
        """Stop training the named parameters from the next step on.

        **Collective.** Builds a new generation of the layout; weights and moments keep their values.

        Raises:
            ValueError: no such parameter, on all ranks.
        """
        self._train_only(dict.fromkeys(names, False))

    def thaw(self, *names: str) -> None:
        """Train the named parameters again, their moments starting from zero. **Collective.**"""
        self._train_only(dict.fromkeys(names, True))

    def _train_only(self, flags: dict[str, bool]) -> None:
        averaging.refuse(self._replica, "freeze or thaw")
        exchange(self.comm, Kind.FREEZE, self.step_count)
        self._replica.train_only(flags)
        self._plans.forget()
        self._reset()

    # -- one update

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's share.

        **Collective** while a model with dropout trains: the position of the share in the global batch, which
        keys its masks, follows from the other ranks' lengths, and from earlier calls of the same update. So it is
        while one with batch norm trains. **Local** otherwise.
        """
        count = leading_length(inputs, kwargs)
        if not self.model.training:
            return self.forward(inputs, kwargs)
        if not self.draws_samples:
            return self.forward(inputs, kwargs, start=None, count=count)
        agreed = exchange(self.comm, Kind.STEP_BEGIN, self.step_count, sums=(count,))
        start = self._forwarded + self.comm.exclusive_sum(count)
        self._forwarded += int(agreed.sums[0])
        return self.forward(inputs, kwargs, start=start, count=count)

    def forward(
        self,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        start: int | None = 0,
        count: int | None = None,
    ) -> Any:
        """Run the model on samples ``start`` to ``start + count`` of the global batch.

        **Local**, but **Collective** while a model trains that :attr:`communicates`. ``start`` may be None for a model
        that draws no random numbers.
        """
        if count is None:
            count = leading_length(inputs, kwargs)
        self._forward_count = count
        self._own += count
        if self._replica.binding.stale:
            self._replica.refresh()
        with samples(SampleContext(self.seed, self.step_count, start, count)):
            return self.precision.forward(inputs, kwargs, self.model)

    def backward(
        self, loss: Any, *, count: float | None = None, final: bool = True, stop: bool = False
    ) -> None:
        """Add the gradients of one micro-batch, and reduce them over ranks with the last one.

        **Collective** if ``final`` or if the model :attr:`communicates`, else **Local.** Chunks are reduced as soon as
        backward has finished them.

        Args:
            loss: a loss of ``nn`` (its sum and count are used), a scalar Tensor that is the mean over the leading
                dimension of the last forward, a pair ``(sum, count)``, or None for a rank without samples (unless
                the model communicates: then it is the loss of zero rows).
            count: samples behind a plain scalar, where the model was not called through this object.
            final: False for all but the last micro-batch of an update.
            stop: ask all ranks to stop after this update; see ``stop_agreed``.

        Raises:
            TypeError: a loss of another form.
            ValueError: no loss from a model that communicates.
            DisagreementError: on all ranks, when they are not in the same step.
            NonFiniteError: on all ranks, when the global loss sum is NaN or infinite.
        """
        try:
            if self.precision.plain:
                self._backward(loss, count, final, stop)
            else:
                with self.precision.products():
                    self._backward(loss, count, final, stop)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Forget the micro-batches of an update that was broken off. **Local**, and on every rank.

        ``backward`` does so itself when it raises; call it where the forward pass of a later micro-batch did.
        """
        self._replica.binding.update += 1
        self._replica.reducer.abandon()
        self._reset()

    def _backward(self, loss: Any, count: float | None, final: bool, stop: bool) -> None:
        if not self.layout.trainable:
            raise on_all_ranks(
                ValueError(
                    "model: expected at least one trainable parameter, got none; there is nothing to train"
                )
            )
        tape: Tape | None = None
        seed = 0.0
        communicates = self.communicates
        if loss is None and communicates:
            raise ValueError(
                "loss: expected one on every rank, got None: the other ranks' backward waits for this one's in "
                f"{self._communicating[0].path}; run the model and the loss on zero rows"
            )
        if loss is not None:
            total, factor, local_count = split_loss(loss, count if count is not None else self._forward_count)
            self.precision.check_loss(total)
            self._count += local_count
            if local_count:  # nothing to count may be NaN, as a mean of no numbers is
                self._loss_sum += float(total.data) * factor  # waits for the forward pass on a GPU
            error = self._kernels.pending_error()
            if error is not None:
                raise error
            if local_count or communicates:
                tape = Tape(total)
                seed = factor * 2.0**-self.exponent
                if self.loss_scale is not None:
                    seed *= self.loss_scale.value
                signature = tape.signature
                self._signatures += (signature,)
                self._memory.look(tape, signature, self._forward_count)
        if not final:
            if tape is not None:
                self._plans.know(tape, signature)
                tape.backward(seed)
            return
        plan = self._plans.of(self._signatures, tape)
        for view in plan.unused_views:
            view.fill(0)
        # The record goes out right before the first chunk: ranks then wait for one another once, not twice.
        self._replica.reducer.opening = partial(self._exchange_record, plan, stop)
        if not math.isfinite(self._loss_sum) or communicates:
            # Raises on all ranks where the loss is not finite; no use in running backward. Where backward itself
            # communicates, the record goes out before its messages on every rank.
            self._replica.reducer.open()
        if -1 in plan.after:
            plan.after[-1]()
        if tape is not None:
            tape.backward(seed, plan.after)
        self._replica.reducer.wait()
        average_trained(self.comm, self._averaging, float(self._own))

    def _exchange_record(self, plan: Plan, stop: bool) -> None:
        """Agree with all ranks on what is about to be reduced. **Collective.**"""
        agreed = exchange(
            self.comm,
            Kind.STEP,
            self.step_count,
            sums=(self._count, self._loss_sum),
            used=plan.used_hash if self._signatures else None,
            layout=self.layout.digest,
            rate=self.next_rate,
            stop=stop,
            changed=self._replica.binding.dirty,
        )
        if agreed.changed:
            raise_changed()
        count, loss_sum = agreed.sums
        if not math.isfinite(loss_sum):
            non_finite.raise_loss(self.comm, self._loss_sum, loss_sum, self.step_count, self.precision.name)
        used = plan.used if agreed.used_equal else agree_used(self.comm, plan.used)
        if count > 0 and not used.any():
            raise_unused(self.step_count)
        self._used = None if used.all() else used
        self._agreed = (count, loss_sum)
        self.stop_agreed = agreed.stop

    def step(
        self,
        optimizer: Optimizer,
        *,
        lr: float | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
    ) -> float:
        """Update the weights from the reduced gradients.

        **Local** where every replica computes the same bits, and **Collective** with another placement than
        ``"replicated"``; with the same arguments on every rank.

        Args:
            optimizer: an optimizer of ``optim``; always the same one.
            lr: the learning rate of this update (default: the optimizer's).
            clip_norm: scale the averaged gradient by ``min(1, clip_norm / (norm + 1e-6))``.
            clip_value: then cut its elements to [-clip_value, clip_value].

        Under float16 an update whose reduced gradient is not finite is skipped, on every rank alike, and the loss scale
        falls; the step counts as finished (``loss_scale.skipped`` counts them).

        Returns:
            the global mean loss of the update; 0.0 where no rank had anything to count, in which case weights
            stay as they are.

        Raises:
            NonFiniteError: on all ranks, when the reduced gradient is NaN or infinite, and no loss scale can fall;
                nothing is updated.
            ValueError: no ``backward`` before it, another optimizer than before, or a rate or norm out of range.
        """
        if self._agreed is None:
            raise ValueError(
                "step: expected a backward() with final=True before it, got none since the last step; call it on this "
                "object (loss.backward() reduces nothing) and every rank, with None where there is no sample"
            )
        self.bind_optimizer(optimizer)
        lr = optimizer.lr if lr is None else lr
        check_rate(lr, self.step_count)
        check_clip(clip_norm=clip_norm, clip_value=clip_value)
        (count, loss_sum), replica, gradient = self._agreed, self._replica, self.arena.array
        averaging.start(replica)
        try:
            loss_scale = 1.0 if self.loss_scale is None else self.loss_scale.value
            if count > 0 and to_be_applied(replica, self.loss_scale, self.step_count):
                scale = 2.0**self.exponent / count / loss_scale
                if clip_norm is not None:
                    norm = math.sqrt(squared_norm(replica)) * scale
                    scale *= min(1.0, clip_norm / (norm + 1e-6))
                given: dict[str, Any] = {"scale": scale, "used": self._used, "clip_value": clip_value}
                sums = sums_of(replica, optimizer, partial(optimizer.prepare, gradient, **given))
                given |= {"lr": lr, "sums": sums}
                update(replica, partial(optimizer.apply, gradient, **given), late=self.gives_late)
                optimizer.finish_update(self._used)
                averaging.move(replica)
        finally:
            self._replica.binding.update += 1
            stop = self.stop_agreed
            self._reset()
            self.stop_agreed = stop
        self.step_count += 1
        self.world.activity.step = self.step_count  # what a report names: the update that comes next
        self.last_count, self.last_loss_sum = count, loss_sum
        return loss_sum / count if count else 0.0

    def arrive(self) -> None:
        """Wait for weights that are under way since the last update. **Local.**"""
        self._replica.arrive()

    # -- the state

    def state_dict(self) -> dict[str, np.ndarray] | None:
        """Return name -> NumPy copy of every weight (in the optimizer's dtype) and buffer on rank 0, None elsewhere.

        **Collective.** As ``model.state_dict()``, which is enough unless ranks hold slices of the weights: under
        ``placement="sharded"`` and 16 bits.
        """
        exchange(self.comm, Kind.STATE, self.step_count)
        flat = self._replica.collect_weights()
        if flat is None:
            return None
        weights = {name: np.array(self.layout.view(flat, name)) for name in self.parameters}
        return weights | {name: np.array(buffer.numpy()) for name, buffer in self.buffers.items()}

    def collect(self) -> tuple[np.ndarray | None, dict[str, np.ndarray | None]]:
        """Return flat weights and slots of the optimizer in host memory, None on other ranks than 0. **Collective.**"""
        return self._replica.collect_weights(), self._replica.collect_state()

    def load(self, weights: np.ndarray | None, state: dict[str, np.ndarray | None]) -> None:
        """Take over what :meth:`collect` returned, and rank 0's buffers. **Collective.**"""
        exchange(self.comm, Kind.BROADCAST, self.step_count)
        self._replica.load(weights, state)

    def memory(self) -> dict[str, int]:
        """Return the bytes that this rank takes at the most, by what they are for. **Local.**

        Returns:
            ``parameters`` (with working copies and buffers), ``gradients``, ``optimizer`` (its state, once there was
            a step), ``activations`` (the most that a graph held when its backward began, and what parts that run
            again add), ``workspace``, and ``peak``. On a GPU ``peak`` is what CuPy's pool and the transport have taken,
            and ``workspace`` the rest of it. On the CPU ``workspace`` is the optimizer's scratch memory, and ``peak``
            the most that the whole process had, Python and data included.
        """
        return self._memory.report(self._replica)

    def check_replicas(self, repair: bool = False) -> None:
        """Check that weights, moments, buffers and the loss scale hold the same bits on every rank.

        **Collective.** With ``repair`` all ranks take over the state that most of them share (of two, rank 0's), and
        the log says so; else it raises DivergenceError on all, naming the rank and the parameter. What one rank
        holds alone (moments, with another placement than ``"replicated"``) is left out.
        """
        exchange(self.comm, Kind.CHECK_REPLICAS, self.step_count)
        state = {} if self.loss_scale is None else self.loss_scale.state()
        beside = {f"loss scale ({k})": np.float64(v) for k, v in state.items()}
        if (found := self._replica.check(self.step_count, beside, repair)) is not None:
            if self.loss_scale is not None:
                self.loss_scale.load_state(state_of(self.comm, state, found.root))
            self.world.log("warning", found.repaired)
