"""GraphStep: an update as one graph launch for each micro-batch, captured once for each form of its inputs.

Forward, backward, the reduction of chunks and the optimizer are the same calls as in an eager step, so both have the
same bits. What differs between steps is in the board (``kernels/board.py``). The host writes a slot, launches, and
goes on; it looks at the report of an update when it is about to launch the second one after it. Read ``data_parallel``
for the eager step, and ``recorder`` for capture itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import kernels
from ..autodiff import SampleContext, Tape, Tensor, samples
from ..comm.agreement import agree
from ..errors import CommunicationError, on_all_ranks
from ..kernels.board import Board, Report, Status
from ..nn.module import Changes
from ..optim import Optimizer
from . import non_finite
from .data_parallel import DataParallel
from .forms import check_rate, split_captured
from .late_loss import LateLoss
from .record import Kind, exchange

_WARM = 2  # eager updates before a capture: kernels are compiled, plans are built
_MOST_GRAPHS = 32  # a program with more forms of inputs runs the rest eagerly
_SOURCES = 16  # arrays of a micro-batch at the most
_REPORTS = 4
_SPIN_SECONDS = 2e-4  # how long to look for a report before the host sleeps between looks
_SLEEP_SECONDS = 5e-5


@dataclass
class _Capture:
    """One captured micro-batch and the arrays that it reads."""

    targets: list[Any]
    inputs: Any
    kwargs: Any
    target: Any
    count: int
    graph: Any = None
    output: Any = None  # of the model, while somebody wants metrics of it


@dataclass
class _Pending:
    """An update that was launched and has not been looked at."""

    update: int
    step: int
    loss: LateLoss
    settled: Callable[[float, float], None] | None


class GraphStep:
    """Run updates of one wrapped model as graphs, where that is possible.

    Args:
        parallel: the wrapped model.
        loss_function: ``loss(output, target)``.
        optimizer: bound to the model.
        clip_norm: see :class:`mpdp.Trainer`.
        accumulate: micro-batches of an update.
        recorder: turns launches into graphs.
        required: an obstacle is an error, not a reason to run eagerly.

    Attributes:
        captures: graphs that were captured so far.
    """

    def __init__(
        self,
        parallel: DataParallel,
        loss_function: Callable[[Any, Any], Any],
        optimizer: Optimizer,
        clip_norm: float | None,
        accumulate: int,
        recorder: Any,
        required: bool,
    ) -> None:
        self.parallel, self.loss_function, self.optimizer = parallel, loss_function, optimizer
        self.clip_norm, self.accumulate = clip_norm, accumulate
        self.recorder = recorder
        self.captures = 0
        self._required = required
        self._comm = parallel.comm
        self._kernels = kernels.for_device(parallel.world.device)
        self._pending: deque[_Pending] = deque()
        self._board: Board | None = None
        parallel._memory.beside = lambda: int(recorder.held_bytes)
        self._changes = Changes()
        for _, module in parallel.model.named_modules():
            module.report_to(self._changes)
        self._inside = self._comm.size == 1 or self._comm.capturable  # chunks are reduced inside of the graph
        self._off = False  # all ranks have agreed to run eagerly from now on
        self._said: set[str] = set()
        self._keys: Any = None  # of the update that was agreed to, with the arrays it reads
        self._sources: Any = None
        self._stop_agreed = False
        self._last_seen: Any = None
        self._updates = self._applied = 0  # of the board
        self._forget()

    def _forget(self) -> None:
        """Drop all graphs."""
        self._graphs: dict[Any, _Capture] = {}
        self._finish: Any = None  # the graph behind a reduction by the host
        self._warmed: dict[Any, int] = {}
        self._version, self._modes_version = self._changes.version, -1
        self._modes: Any = ()
        self._layout = self.parallel.layout
        self._used: Any = None
        self._plan: Any = None
        self._broken: str | None = self._obstacle()

    # -- whether to capture

    def _obstacle(self) -> str | None:
        """Return why this model cannot be captured, whatever its inputs are; None if it can."""
        for name, module in self.parallel.model.named_modules():
            if not module.static:
                kind = type(module).__name__
                return f"{name or 'the model'} ({kind}) does not declare that it is static; set static = True on it"
        if self.parallel.may_communicate and not self._inside:
            return (
                f"the model exchanges statistics inside a step, and {self._comm.transport} needs the host for it; "
                "use global_stats=False"
            )
        return None

    def choose(self, parts: Sequence[Any], *, stop: bool, may: bool = True, looks: bool = False) -> bool:
        """Return whether the next update runs as graphs, and make everything ready for how it runs.

        **Collective** for more than one rank: all run graphs, or none does.

        Args:
            parts: this rank's micro-batches.
            stop: ask all ranks to stop after this update.
            may: False for an update whose forward pass has begun already.
            looks: :meth:`run` is given ``look``.

        Raises:
            NonFiniteError: on all ranks, from an update at most two back; nothing was changed by it or since.
            ValueError: an obstacle, where a graph is required.
        """
        scaled = self.parallel.loss_scale is not None  # the next scale follows from the last report
        self.settle(0 if scaled else 1)
        if self._off:
            return False
        keys = self._look(parts, looks) if may else None
        ready = keys is not None
        if self._comm.size > 1:
            ready = self._agree(ready, stop)
        if not ready:
            self.settle()
            return False
        self._stop_agreed = stop if self._comm.size == 1 else self._stop_agreed
        self._keys = keys
        if any(key not in self._graphs for key in keys or ()):
            return self._capture_all(parts, looks)
        return True

    def _agree(self, ready: bool, stop: bool) -> bool:
        """Return whether all ranks are ready. **Collective.**"""
        parallel = self.parallel
        agreed = exchange(
            self._comm,
            Kind.STEP_BEGIN,
            parallel.step_count,
            sums=(ready, self._broken is not None),
            layout=parallel.layout.digest,
            stop=stop,
            changed=parallel._replica.binding.dirty,
        )
        self._stop_agreed = agreed.stop
        if agreed.sums[1]:  # a reason that stays
            self._give_up(self._broken or "another rank cannot capture its step")
            return False
        return agreed.sums[0] == self._comm.size and not agreed.changed

    def _give_up(self, why: str) -> None:
        """Run eagerly from now on. **Local**, on all ranks at the same step."""
        self._off = True
        self._graphs.clear()
        if self._required:
            raise on_all_ranks(
                ValueError(f"graph: expected a step that can be captured, got one that cannot: {why}")
            )
        self._say(f"graph: steps run eagerly: {why}")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            if self._comm.rank == 0:
                self.parallel.world.log("info", text)

    def _look(self, parts: Sequence[Any], looks: bool) -> tuple[Any, ...] | None:
        """Return the key of each micro-batch's graph; None where this rank cannot run graphs now."""
        parallel, changes = self.parallel, self._changes
        if changes.version != self._version or parallel.layout is not self._layout:
            self.settle()
            self._forget()
        if self._broken is not None:
            if self._comm.size == 1:
                self._give_up(self._broken)
            return None
        if "forward" in vars(parallel) or parallel._replica.binding.dirty or not self.optimizer.in_step:
            return None  # a timeline is taken; or what eager steps see to
        if changes.modes != self._modes_version:
            self._modes_version = changes.modes
            self._modes = tuple(module.training for _, module in parallel.model.named_modules())
        keys, sources = [], []
        last = len(parts) - 1
        own = sum(part.count for part in parts) if parallel._averaging else 0
        for i, part in enumerate(parts):
            if not part.count:
                return None
            arrays: list[Any] = []
            form = _form((part.inputs, part.kwargs, part.target), arrays, self._kernels)
            if len(arrays) > _SOURCES:
                return None
            place = (i == 0, i == last, own if i == last else 0)
            keys.append((form, part.count, place, self._modes, parallel.exponent, looks))
            sources.append(arrays)
        self._sources = sources
        found = tuple(keys)
        if all(key in self._graphs for key in keys):
            return found
        if self._warmed.get(found, 0) < _WARM:
            self._last_seen = found
            return None
        return found if len(self._graphs) + len(keys) <= _MOST_GRAPHS else None

    def ran_eagerly(self) -> None:
        """Note that the update went eagerly, after :meth:`choose`. **Local.**"""
        if self._last_seen is not None:
            if len(self._warmed) > 4 * _MOST_GRAPHS:
                self._warmed.clear()
            self._warmed[self._last_seen] = self._warmed.get(self._last_seen, 0) + 1
            self._last_seen = None

    # -- capture

    def _capture_all(self, parts: Sequence[Any], looks: bool) -> bool:
        """Capture the graphs of this update that are missing; return whether all ranks could. **Collective.**"""
        parallel, binding = self.parallel, self.parallel._replica.binding
        self.settle()
        self.recorder.make_room()
        error: Exception | None = None
        reduced = parallel.reducer.step
        try:
            if self._board is None:
                self._board = self._new_board()
            binding.update += 1
            parallel._own = sum(part.count for part in parts)
            for i, (part, key) in enumerate(zip(parts, self._keys)):
                if key not in self._graphs:
                    before = -1 if i == 0 else binding.update  # as if the micro-batches before had run
                    for parameter in parallel.parameters.values():
                        parameter._written = before
                    self._graphs[key] = self._capture(part, i == 0, i == len(parts) - 1, looks)
            if not self._inside and self._finish is None:
                self._finish = self.recorder.record(self._apply)
        except Exception as caught:
            error = caught
        finally:
            parallel.abandon()
            parallel.reducer.step = reduced
        failed = error is not None
        if self._comm.size > 1:
            failed = bool(self._comm.reduce_numbers([int(failed)], [])[0][0])
        if failed:
            why = (
                f"{type(error).__name__}: {error}"
                if error is not None
                else "another rank could not capture it"
            )
            if self._required and error is not None:
                raise error
            self._give_up(why)
            return False
        return True

    def _new_board(self) -> Board:
        """Make the board, and call once what a capture may not call for the first time. **Collective.**"""
        parallel = self.parallel
        numbers = self.optimizer.numbers(0.0)
        board = self._kernels.board(4 * self.accumulate, numbers.size, _SOURCES, _REPORTS)
        self._applied = self._updates = 0
        board.prime(parallel.arena.array, parallel.layout.SPAN)
        if self._comm.size > 1:
            self._comm.all_reduce(board.record, lane="urgent")
            board.record.fill(0)
        return board

    def _capture(self, part: Any, first: bool, last: bool, looks: bool) -> _Capture:
        """Capture one micro-batch."""
        targets: list[Any] = []
        inputs, kwargs, target = _like((part.inputs, part.kwargs, part.target), targets, self._kernels)
        capture = _Capture(targets, inputs, kwargs, target, part.count)
        capture.graph = self.recorder.record(lambda: self._micro_batch(capture, first, last, looks))
        self.captures += 1
        return capture

    def _micro_batch(self, capture: _Capture, first: bool, last: bool, looks: bool) -> None:
        """Launch everything that one micro-batch takes; **Collective** for the last."""
        parallel, board, precision = self.parallel, self._board, self.parallel.precision
        assert board is not None
        board.begin(capture.targets, capture.count)
        self._kernels.begin_step(board.step)
        with samples(SampleContext(parallel.seed, board.step, board.start, capture.count)):
            output = precision.forward(capture.inputs or (), capture.kwargs, parallel.model)
        capture.output = _detached(output) if looks else None  # nothing else may hold what the graph writes
        total, factor, count = split_captured(self.loss_function(output, capture.target), capture.count)
        precision.check_loss(total)
        board.take(total.data, factor, count, first)
        tape = Tape(total)
        parallel._memory.look(tape, tape.signature, capture.count)
        seed: Any = factor * 2.0**-parallel.exponent
        if parallel.loss_scale is not None:
            seed = board.seed if factor == 1.0 else board.seed * factor
        if not precision.plain:
            with precision.products():
                self._backward(tape, seed, last)
        else:
            self._backward(tape, seed, last)

    def _backward(self, tape: Tape, seed: Any, last: bool) -> None:
        parallel, board = self.parallel, self._board
        plans, signature = parallel._plans, tape.signature
        if not last:
            plans.know(tape, signature)
            tape.backward(seed)
            return
        plan = plans.of((signature,) * self.accumulate, tape)
        self._know_used(plan)
        for view in plan.unused_views:
            view.fill(0)
        if not self._inside:
            tape.backward(seed)
            return
        reducer = parallel.reducer
        if self._comm.size > 1:
            assert board is not None
            self._comm.all_reduce(board.record, lane="urgent")
        reducer.opening = _nothing
        reducer.open()
        if -1 in plan.after:
            plan.after[-1]()
        tape.backward(seed, plan.after)
        reducer.wait()
        parallel._average()
        self._apply()

    def _know_used(self, plan: Any) -> None:
        """Take over which parameters are used; on all ranks they must be the same."""
        used = None if plan.used.all() else plan.used
        if used is not None and self._comm.size > 1:
            raise ValueError(
                "a parameter is used by no operation on this rank, and ranks may differ in which"
            )
        self._used, self._plan = used, plan
        self.optimizer.prepare_captured(used)

    def _apply(self) -> None:
        """Launch the decision and the optimizer."""
        parallel, board = self.parallel, self._board
        assert board is not None
        gradient = parallel.arena.array
        board.decide(gradient, parallel.layout.SPAN, getattr(self._comm, "halt", 0))
        self.optimizer.apply_captured(
            gradient, scale=board.scale, numbers=board.numbers, when=board.apply, used=self._used
        )

    # -- one update

    def run(
        self,
        parts: Sequence[Any],
        *,
        lr: float,
        look: Callable[[Any, Any], None] | None = None,
        settled: Callable[[float, float], None] | None = None,
    ) -> LateLoss:
        """Do the update that :meth:`choose` has agreed to. **Collective.**

        Args:
            parts: as given to :meth:`choose`.
            lr: learning rate of the update.
            look: called with output and target of each micro-batch, which are overwritten by the next launch.
            settled: called with global loss sum and count, once they are known.

        Returns:
            the global mean loss, which waits when it is asked for.
        """
        parallel, board, optimizer = self.parallel, self._board, self.optimizer
        assert board is not None
        check_rate(lr, parallel.step_count)
        binding = parallel._replica.binding
        if binding.stale:
            parallel._replica.refresh()
        scale = parallel.loss_scale
        value = 1.0 if scale is None else scale.value
        power = 2.0**parallel.exponent
        numbers = np.stack((optimizer.numbers(lr, 0), optimizer.numbers(lr, 1)))
        for part, key, sources in zip(parts, self._keys, self._sources):
            capture = self._graphs[key]
            part.acquire()
            board.write(
                step=parallel.step_count,
                start=part.start or 0,
                rows=part.count,
                applied=self._applied,
                power=power,
                loss_scale=value,
                clip_norm=self.clip_norm,
                seed=value / power,
                skips=scale is not None and not scale.at_bottom,
                numbers=numbers,
                sources=sources,
            )
            capture.graph.launch()
            if look is not None:
                look(capture.output, capture.target)
            part.release()
        if not self._inside:
            self._reduce()
        binding.update += 1
        loss = LateLoss(self.settle_upto, self._updates)
        self._pending.append(_Pending(self._updates, parallel.step_count, loss, settled))
        self._updates += 1
        parallel.step_count += 1
        parallel.world.activity.step = parallel.step_count
        parallel.stop_agreed = self._stop_agreed
        parallel.reducer.step += 1
        return loss

    def _reduce(self) -> None:
        """Reduce what the graphs have left, by calls of the host, and apply it. **Collective.**"""
        parallel, board = self.parallel, self._board
        assert board is not None
        self._comm.all_reduce(board.record, lane="urgent")
        reducer = parallel.reducer
        reducer.opening = _nothing
        reducer.wait()
        reducer.step -= 1
        parallel._average()
        self._finish.launch()

    # -- what became of it

    def settle(self, behind: int = 0) -> None:
        """Wait for the reports of all updates but the last ``behind``, and take over what they say.

        **Local**, and **Collective** where one of them has failed, which all ranks see at the same update.

        Raises:
            NonFiniteError: on all ranks; see :meth:`choose`.
        """
        while len(self._pending) > behind:
            pending = self._pending[0]
            report = self._wait(pending.update)
            if report.halted:
                self._halt(report)
            error = self._kernels.pending_error()
            if error is not None:
                raise error
            self._pending.popleft()
            scale = self.parallel.loss_scale
            if report.status == Status.APPLIED:
                self.optimizer.finish_update(self._used)
                self._applied += 1
            if scale is not None and report.status != Status.NOTHING:
                scale.update(report.status == Status.APPLIED)
            self.parallel.last_count, self.parallel.last_loss_sum = report.counted, report.loss_sum
            pending.loss.settle(report.loss_sum / report.counted if report.counted else 0.0)
            if pending.settled is not None:
                pending.settled(report.loss_sum, report.counted)

    def settle_upto(self, update: int) -> None:
        """Settle all updates up to one, counted as this object has launched them. **Local.**"""
        self.settle(max(self._updates - update - 1, 0))

    def _wait(self, update: int) -> Report:
        board = self._board
        assert board is not None
        report = board.report(update)
        if report is not None:
            return report
        start = time.monotonic()
        while True:
            time.sleep(0.0 if time.monotonic() - start < _SPIN_SECONDS else _SLEEP_SECONDS)
            report = board.report(update)
            if report is not None:
                return report
            self._comm.activity.check("a step on the GPU")

    def _halt(self, report: Report) -> None:
        """Raise what has halted the board. **Collective.**"""
        parallel = self.parallel
        self._pending.clear()
        self._graphs.clear()
        self._finish = self._board = None  # a board that has halted applies nothing any more
        parallel.step_count = report.step
        parallel.world.activity.step = report.step
        agree(self._comm, self._kernels.pending_error())
        if report.status == Status.LOSS_LOST:
            non_finite.raise_loss(
                self._comm, report.own_sum, report.loss_sum, report.step, parallel.precision.name
            )
        if report.status == Status.BROKEN:
            self._comm.activity.check("a step on the GPU")
            raise CommunicationError("step: expected a sum over all ranks, got one that was broken off")
        scale = parallel.loss_scale
        smallest = None if scale is None else scale.smallest
        non_finite.raise_gradient_at(parallel.layout, report.bad, report.step, smallest)


def _nothing() -> None:
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


def _form(tree: Any, arrays: list[Any], k: Any) -> Any:
    """Return what two micro-batches must share for one graph, and gather the arrays of a tree, C-contiguous."""
    if tree is None:
        return None
    if isinstance(tree, tuple):
        return tuple([_form(item, arrays, k) for item in tree])
    if isinstance(tree, dict):
        return tuple([(name, _form(item, arrays, k)) for name, item in tree.items()])
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
