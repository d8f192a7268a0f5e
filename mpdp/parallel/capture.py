"""Capture: an update's micro-batches recorded as graphs, over a board that holds what changes from step to step.

What is recorded are the calls of the eager step: forward, backward with the chunks that it finishes, and the optimizer.
Read ``graph_step`` for when that is done and for how graphs are launched, ``kernels/board.py`` for the board.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .. import kernels
from ..autodiff import SampleContext, Tape, Tensor, samples
from ..kernels.board import Board
from ..optim import Optimizer
from . import averaging
from .collectives import average_trained
from .data_parallel import DataParallel
from .forms import split_captured
from .recorder import Follow
from .update import sums_of, update, update_own

MOST_ARRAYS = 16  # of a micro-batch
_REPORTS = 4
LATE_BYTES = 16 << 20  # of weights: with less, more launches would cost more than the gather does


@dataclass
class Captured:
    """One captured micro-batch and the arrays that it reads."""

    targets: list[Any]
    inputs: Any
    kwargs: Any
    target: Any
    count: int
    graph: Any = None
    output: Any = None  # of the model, while somebody wants metrics of it


class Capture:
    """Record the updates of one wrapped model.

    Args:
        parallel: the wrapped model.
        loss_function: ``loss(output, target)``.
        optimizer: bound to the model.
        accumulate: micro-batches of an update.
        recorder: turns launches into graphs.
        inside: chunks are reduced inside of the graph, not by the host behind it.
        clip_value: see :class:`mpdp.Trainer`.

    Attributes:
        board: what the graphs read; None before the first capture, and after it has halted.
        graphs: by the key that ``graph_step`` gives them. ``finish``: the decision and the optimizer, where the host
            reduces in between.
        used: which parameters an update changes; None for all.
        signals: what the last micro-batch's graph gives the host to reduce, step by step: how many chunks are final.
        count: graphs that were recorded so far.
    """

    def __init__(
        self,
        parallel: DataParallel,
        loss_function: Callable[[Any, Any], Any],
        optimizer: Optimizer,
        accumulate: int,
        recorder: Any,
        inside: bool,
        clip_value: float | None = None,
    ) -> None:
        self.parallel, self.loss_function, self.optimizer = parallel, loss_function, optimizer
        self.accumulate, self.recorder, self.inside = accumulate, recorder, inside
        self.clip_value = clip_value
        self.board: Board | None = None
        self.graphs: dict[Any, Captured] = {}
        self.finish: Any = None
        self.used: Any = None
        self.signals: tuple[int, ...] = ()
        self.count = 0
        self._loss: Any = None
        self._shared: Any = None  # the layout that the board knows the owners of
        self._seeds: dict[int, dict[Any, Any]] = {}  # by exponent and dtype
        self._comm = parallel.comm
        self._kernels = kernels.for_device(parallel.world.device)

    def forget(self) -> None:
        """Drop all graphs, once what was launched is done: it reads memory that may be given away then."""
        if self.graphs:
            self.recorder.wait()
        self.graphs.clear()
        self.finish = self.used = None

    @property
    def can_give_late(self) -> bool:
        """Whether updates leave their weights under way, so that the next graph waits for them chunk by chunk.

        Not so where forward exchanges numbers: inside of a graph nothing orders their messages behind those of the
        weights, and NCCL may deadlock then.
        """
        replica = self.parallel._replica
        return (
            self.parallel.gives_late
            and self.inside
            and not self.parallel.may_communicate
            and replica.can_give_late
            and sum(view.nbytes for view in replica.given) >= LATE_BYTES
        )

    def launches(self, late: bool) -> None:
        """Wait for weights that are under way, unless the next graph does so itself. **Local.**"""
        binding = self.parallel._replica.binding
        if late and binding.arriving is not None and binding.arriving.followed:
            binding.arriving = None
        else:
            self.parallel.arrive()

    def give_late(self) -> None:
        """Start to give all ranks what the launched update writes, for the next graph to wait for. **Collective.**"""
        replica = self.parallel._replica
        for chunk, request in enumerate(replica.give_late()):
            self.recorder.mark(chunk, request)
        assert replica.binding.arriving is not None
        replica.binding.arriving.followed = True

    def update(self, parts: Sequence[Any], keys: Sequence[Any], looks: bool, late: bool = False) -> None:
        """Record what is missing for an update; nothing runs. **Collective.**

        Ranks meet their forms of inputs at different updates. Where one has a graph to record all record theirs, also
        those that they have: a library may agree on buffers when its calls are recorded, as NCCL does.

        Args:
            parts: the micro-batches.
            keys: of their graphs.
            looks: keep the model's outputs.
            late: leave the weights under way; :meth:`give_late` comes behind each launch.

        Raises:
            Exception: what cannot be recorded.
        """
        parallel, binding, reducer = self.parallel, self.parallel._replica.binding, self.parallel.reducer
        reduced = reducer.step
        if parallel.world.device.kind == "cuda":
            parallel._memory.note_peak(parallel._replica)
        self.recorder.make_room()
        try:
            if self.board is None:
                self._shared = None
                self.board = self._new_board()
            self._share(self.board)
            self.optimizer.prepare_captured()
            averaging.start(parallel._replica)
            if (
                parallel.exponent not in self._seeds
            ):  # a constant in memory saves the launch that would write it
                value, xp = 2.0**-parallel.exponent, self._kernels.xp
                self._seeds[parallel.exponent] = {
                    np.dtype(name): xp.full((), value, name) for name in ("float32", "float64")
                }
            binding.update += 1
            parallel._own = sum(part.count for part in parts)
            known = set(self.graphs) if self._comm.size == 1 else set()
            if not known.issuperset(keys) and not self.graphs.keys().isdisjoint(keys):
                self.recorder.wait()  # what is replaced may be running
            for i, (part, key) in enumerate(zip(parts, keys)):
                if key not in known:
                    known.add(key)
                    before = -1 if i == 0 else binding.update  # as if the micro-batches before had run
                    for parameter in parallel.parameters.values():
                        parameter._written = before
                    self.graphs[key] = self._record(part, i == 0, i == len(parts) - 1, looks, late)
            if not self.inside and self.finish is None:
                self.finish = self.recorder.record(self._apply)
        finally:
            binding.arriving = None
            parallel.abandon()
            reducer.step = reduced
            self._kernels.begin_step(
                parallel.step_count
            )  # what follows a capture may be eager, and outlive the board

    def _new_board(self) -> Board:
        """Make the board, and call once what a capture may not call for the first time. **Collective.**"""
        parallel = self.parallel
        numbers = self.optimizer.numbers(0.0)
        board = self._kernels.board(4 * self.accumulate, numbers.size, MOST_ARRAYS, _REPORTS)
        self._share(board)
        board.prime(parallel.arena.array, parallel.layout.SPAN)
        if board.parts is not None:
            self._comm.all_reduce(board.parts, lane="urgent")
        if self._comm.size > 1:
            self._comm.all_reduce(board.record, lane="urgent")
            board.record.fill(0)
        return board

    def _share(self, board: Board) -> None:
        """Tell the board which spans of the gradient this rank has, once a layout. **Local.**"""
        layout, held = self.parallel.layout, self.parallel.reducer.placement.held
        if held is not None and layout is not self._shared:
            self._shared = layout
            own = np.zeros(layout.trainable_size // layout.SPAN, np.bool_)
            for start, stop in held:
                own[start // layout.SPAN : stop // layout.SPAN] = True
            board.share(own, self._comm.rank, self._comm.size)

    def _record(self, part: Any, first: bool, last: bool, looks: bool, late: bool) -> Captured:
        """Capture one micro-batch."""
        targets: list[Any] = []
        inputs, kwargs, target = _like((part.inputs, part.kwargs, part.target), targets, self._kernels)
        captured = Captured(targets, inputs, kwargs, target, part.count)
        captured.graph = self.recorder.record(lambda: self._micro_batch(captured, first, last, looks, late))
        self.count += 1
        return captured

    def _micro_batch(self, captured: Captured, first: bool, last: bool, looks: bool, late: bool) -> None:
        """Launch everything that one micro-batch takes; **Collective** for the last."""
        parallel, board, precision = self.parallel, self.board, self.parallel.precision
        assert board is not None
        board.begin(captured.targets, captured.count)
        self._kernels.begin_step(board.step)
        replica = parallel._replica
        if late and first:
            replica.expect([Follow(self.recorder, chunk) for chunk in range(len(replica.given))])
        with samples(SampleContext(parallel.seed, board.step, board.start, captured.count)):
            output = precision.forward(captured.inputs or (), captured.kwargs, parallel.model)
        captured.output = _detached(output) if looks else None  # nothing else may hold what the graph writes
        loss = self.loss_function(output, captured.target)
        replica.arrive()  # before a chunk of the gradient is reduced on the lane that the weights have come on
        total, factor, count = split_captured(loss, captured.count)
        del output, loss  # backward writes over logits that nobody refers to
        precision.check_loss(total)
        self._loss = None
        if self._comm.size > 1 or not (first and last):
            board.take(total.data, factor, count, first)
        else:
            self._loss = total.data, factor, count  # taken with the decision: one launch less
        tape = Tape(total)
        parallel._memory.look(tape, tape.signature, captured.count)
        seed: Any = factor * 2.0**-parallel.exponent
        if factor == 1.0:
            seed = self._seeds[parallel.exponent].get(total.dtype, seed)
        if parallel.loss_scale is not None:
            seed = board.seed if factor == 1.0 else board.seed * factor
        if not precision.plain:
            with precision.products():
                self._backward(tape, seed, last, late)
        else:
            self._backward(tape, seed, last, late)

    def _backward(self, tape: Tape, seed: Any, last: bool, late: bool) -> None:
        parallel, board = self.parallel, self.board
        plans, signature = parallel._plans, tape.signature
        if not last:
            plans.know(tape, signature)
            tape.backward(seed)
            return
        plan = plans.of((signature,) * self.accumulate, tape)
        self._know_used(plan)
        for view in plan.unused_views:
            view.fill(0)
        if not self.inside:
            assert board is not None
            after = {at: partial(board.signal, count) for at, count in plan.chunks_after.items()}
            self.signals = tuple(plan.chunks_after.values())
            if -1 in after:
                after[-1]()
            tape.backward(seed, after)
            return
        reducer = parallel.reducer
        if self._comm.size > 1:
            assert board is not None
            self._comm.all_reduce(board.record, lane="urgent")
        reducer.opening = nothing
        reducer.open()
        if -1 in plan.after:
            plan.after[-1]()
        tape.backward(seed, plan.after)
        reducer.wait()
        average_trained(self._comm, parallel._averaging, float(parallel._own))
        self._apply(late)

    def _know_used(self, plan: Any) -> None:
        """Take over which parameters are used; on all ranks they must be the same."""
        used = None if plan.used.all() else plan.used
        if used is not None and self._comm.size > 1:
            raise ValueError(
                "a parameter is used by no operation on this rank, and ranks may differ in which"
            )
        self.used = used

    def _apply(self, late: bool = False) -> None:
        """Launch the decision and the optimizer."""
        parallel, board = self.parallel, self.board
        assert board is not None
        replica, gradient, span = parallel._replica, parallel.arena.array, parallel.layout.SPAN
        if board.parts is not None:
            board.look(gradient, span)
            self._comm.all_reduce(board.parts, lane="urgent")
        board.decide(gradient, span, getattr(self._comm, "halt", 0), self._loss)
        given: dict[str, Any] = {
            "scale": board.scale, "numbers": board.numbers, "when": board.apply, "used": self.used,
            "clip_value": self.clip_value,
        }  # fmt: skip
        optimizer = self.optimizer
        sums = sums_of(replica, optimizer, partial(optimizer.prepare_range_captured, gradient, **given))
        apply = partial(optimizer.apply_captured, gradient, sums=sums, **given)
        if late:
            update_own(replica, apply)
        else:
            update(replica, apply)
        averaging.move(replica, board.apply)


def nothing() -> None:
    """Stand in for the step record: it went out before the launch."""


def _detached(output: Any) -> Any:
    """Return a model's output without its graph."""
    if isinstance(output, Tensor):
        return Tensor(output.data)
    if isinstance(output, tuple | list):
        return type(output)([_detached(item) for item in output])
    if isinstance(output, dict):
        return {name: _detached(item) for name, item in output.items()}
    return output


def form_of(tree: Any, arrays: list[Any], k: Any) -> Any:
    """Return what two micro-batches must share for one graph, and gather the arrays of a tree, C-contiguous."""
    if tree is None:
        return None
    if isinstance(tree, tuple):
        return tuple([form_of(item, arrays, k) for item in tree])
    if isinstance(tree, dict):
        return tuple([(name, form_of(item, arrays, k)) for name, item in tree.items()])
    arrays.append(tree if tree.flags.c_contiguous else k.xp.ascontiguousarray(tree))
    return tree.shape, tree.dtype


def _like(tree: Any, targets: list[Any], k: Any) -> Any:
    """Return a tree of new arrays of the same form, gathered in the same order."""
    if tree is None:
        return None
    if isinstance(tree, tuple):
        return tuple([_like(item, targets, k) for item in tree])
    if isinstance(tree, dict):
        return {name: _like(item, targets, k) for name, item in tree.items()}
    targets.append(k.xp.zeros(tree.shape, tree.dtype))
    return targets[-1]
