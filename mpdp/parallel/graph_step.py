"""GraphStep: an update as one graph launch for each micro-batch, captured once for each form of its inputs.

Forward, backward, the reduction of chunks and the optimizer are the same calls as in an eager step, so both have the
same bits. What differs between steps is in the board (``kernels/board.py``). The host writes a slot, launches, and
goes on; it looks at the report of an update when it is about to launch the second one after it. Read ``data_parallel``
for the eager step, and ``recorder`` for capture itself.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from .. import kernels
from ..comm.agreement import agree
from ..errors import CommunicationError, on_all_ranks
from ..kernels.board import Report, Status
from ..nn.module import Changes
from ..optim import Optimizer
from . import non_finite
from .capture import MOST_ARRAYS, Capture, form_of, nothing
from .collectives import average_trained
from .data_parallel import DataParallel
from .forms import check_rate
from .late_loss import LateLoss
from .record import Kind, exchange

_WARM = 2  # eager updates before a capture: kernels are compiled, plans are built
_MOST_GRAPHS = 32  # a program with more forms of inputs runs the rest eagerly
_SPIN_SECONDS = 2e-4  # how long to look for a report before the host sleeps between looks
_SLEEP_SECONDS = 5e-5


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
        clip_norm, clip_value: see :class:`mpdp.Trainer`.
        accumulate: micro-batches of an update.
        recorder: turns launches into graphs.
        required: an obstacle is an error, not a reason to run eagerly.

    Attributes:
        capture: the graphs, and what they work on.
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
        clip_value: float | None = None,
    ) -> None:
        self.parallel, self.optimizer, self.clip_norm = parallel, optimizer, clip_norm
        self._required = required
        self._comm = parallel.comm
        self._kernels = kernels.for_device(parallel.world.device)
        self._pending: deque[_Pending] = deque()
        parallel._memory.beside = lambda: int(recorder.held_bytes)
        self._changes = Changes()
        for _, module in parallel.model.named_modules():
            module.report_to(self._changes)
        self._kernels.plan_book.on_change.append(self._changes.anything)
        self._inside = self._comm.size == 1 or self._comm.capturable
        self.capture = Capture(
            parallel, loss_function, optimizer, accumulate, recorder, self._inside, clip_value
        )
        self._off = False  # all ranks have agreed to run eagerly from now on
        self._said: set[str] = set()
        self._keys: Any = None  # of the update that was agreed to, with the arrays it reads
        self._sources: Any = None
        self._stop_agreed = False
        self._numbers: tuple[float, bytes] = -1.0, b""  # of the last update, and its learning rate
        self._latest: tuple[Any, list[Any]] = (), []  # keys of the last update, and their graphs
        self._last_seen: Any = None
        self._found: tuple[int, Exception] | None = None  # by a check, in an update up to the one named
        self._updates = self._applied = 0  # launched, and applied as far as reports say, with this board
        self._begin()

    @property
    def captures(self) -> int:
        """Graphs that were captured so far."""
        return self.capture.count

    @property
    def under_way(self) -> int:
        """Updates that were launched and not looked at."""
        return len(self._pending)

    def _begin(self) -> None:
        """Start from the model as it is now, without graphs."""
        self.capture.forget()
        self._latest = (), []
        self._warmed: dict[Any, int] = {}
        self._version, self._modes_version = self._changes.version, -1
        self._modes: Any = ()
        self._layout = self.parallel.layout
        self._broken: str | None = self._obstacle()

    # -- whether to capture

    def _obstacle(self) -> str | None:
        """Return why this model cannot be captured, whatever its inputs are; None if it can."""
        for name, module in self.parallel.model.named_modules():
            if not module.static:
                kind = type(module).__name__
                return f"{name or 'the model'} ({kind}) does not declare that it is static; set static = True on it"
        if self.parallel.reducer.placement.held is not None and not self._inside:
            return (
                f"optimizer state is divided between ranks, and {self._comm.transport} needs the host for it"
            )
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
        keys = self._look(parts, looks)
        ready = may and keys is not None
        missing = any(key not in self.capture.graphs for key in keys or ())
        if self._comm.size > 1:
            ready, missing = self._agree(ready, missing, stop)
        if not ready:
            self.settle()
            return False
        self._stop_agreed = stop if self._comm.size == 1 else self._stop_agreed
        if keys == self._latest[0] and not missing:
            return True
        self._keys = keys
        if missing and not self._capture_all(parts, looks):
            return False
        self._latest = keys, [self.capture.graphs[key] for key in keys or ()]
        return True

    def _agree(self, ready: bool, missing: bool, stop: bool) -> tuple[bool, bool]:
        """Return whether all ranks are ready, and whether one of them has a graph to capture. **Collective.**"""
        parallel = self.parallel
        agreed = exchange(
            self._comm,
            Kind.STEP_BEGIN,
            parallel.step_count,
            sums=(ready, self._broken is not None, missing),
            layout=parallel.layout.digest,
            rate=parallel.next_rate,
            stop=stop,
            changed=parallel._replica.binding.dirty,
        )
        self._stop_agreed = agreed.stop
        if agreed.sums[1]:  # a reason that stays
            self._give_up(self._broken or "another rank cannot capture its step")
            return False, False
        return agreed.sums[0] == self._comm.size and not agreed.changed, agreed.sums[2] > 0

    def _give_up(self, why: str) -> None:
        """Run eagerly from now on. **Local**, on all ranks at the same step."""
        self._off = True
        self.capture.forget()
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
            self._begin()
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
        last, late = len(parts) - 1, self.capture.can_give_late
        own = sum(part.count for part in parts) if parallel._averaging else 0
        for i, part in enumerate(parts):
            if not part.count:
                return None
            arrays: list[Any] = []
            form = form_of((part.inputs, part.kwargs, part.target), arrays, self._kernels)
            if len(arrays) > MOST_ARRAYS:
                return None
            place = (i == 0, i == last, own if i == last else 0)
            keys.append((form, part.count, place, self._modes, parallel.exponent, looks, late))
            sources.append(arrays)
        self._sources = sources
        found = tuple(keys)
        if found == self._latest[0]:
            return found
        if all(key in self.capture.graphs for key in keys):
            return found
        if self._warmed.get(found, 0) < _WARM:
            self._last_seen = found
            return None
        return found if len(self.capture.graphs) + len(keys) <= _MOST_GRAPHS else None

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
        self.settle()
        self.parallel.arrive()
        error: Exception | None = None
        try:
            self.capture.update(parts, self._keys, looks, self._keys[-1][-1])
        except Exception as caught:
            error = caught
        failed = error is not None
        if self._comm.size > 1:
            failed = bool(self._comm.reduce_numbers([int(failed)], [])[0][0])
        if failed:
            if self._required and error is not None:
                raise error
            found = (
                "another rank could not capture it" if error is None else f"{type(error).__name__}: {error}"
            )
            self._give_up(found)
            return False
        return True

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
        parallel, board, optimizer = self.parallel, self.capture.board, self.optimizer
        assert board is not None
        check_rate(lr, parallel.step_count)
        late = self._latest[0][-1][-1]
        self.capture.launches(late)
        binding = parallel._replica.binding
        if binding.stale:
            parallel._replica.refresh()
        scale = parallel.loss_scale
        value = 1.0 if scale is None else scale.value
        power = 2.0**parallel.exponent
        if optimizer.counted or lr != self._numbers[0]:
            self._numbers = lr, optimizer.numbers(lr, 0).tobytes() + optimizer.numbers(lr, 1).tobytes()
        numbers = self._numbers[1]
        if parallel._averaging:
            parallel._own = sum(part.count for part in parts)
        for part, captured, sources in zip(parts, self._latest[1], self._sources):
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
            captured.graph.launch()
            if late and part is parts[-1]:
                self.capture.give_late()  # before a metric reads weights, of which the graph wrote this rank's alone
            if look is not None:
                look(captured.output, captured.target)
            part.release()
        if not self._inside:
            self._reduce()
        binding.update += 1
        parallel._own = 0
        loss = LateLoss(self._settle_upto, self._updates)
        self._pending.append(_Pending(self._updates, parallel.step_count, loss, settled))
        self._updates += 1
        parallel.step_count += 1
        parallel.world.activity.step = parallel.step_count
        parallel.stop_agreed = self._stop_agreed
        parallel.reducer.step += 1
        return loss

    def _reduce(self) -> None:
        """Reduce chunks while the graph says that they are final, and launch what applies them. **Collective.**"""
        parallel, board = self.parallel, self.capture.board
        assert board is not None
        reducer = parallel.reducer
        reducer.opening = nothing
        with self.capture.recorder.beside():  # what is started must not wait for the rest of the graph
            for count in self.capture.signals:
                self._until(partial(board.signalled, count))
                reducer.flush(count)
        self._comm.all_reduce(board.record, lane="urgent")
        reducer.wait()
        reducer.step -= 1
        average_trained(self._comm, parallel._averaging, float(parallel._own))
        self.capture.finish.launch()

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
            self._look_for_errors()
            if report.halted:
                self._halt(report)
            self._take(pending, report)

    def _take(self, pending: _Pending, report: Report) -> None:
        """Take over what the oldest update under way has reported."""
        self._pending.popleft()
        parallel, applied = self.parallel, report.status == Status.APPLIED
        if applied:
            self.optimizer.finish_update(self.capture.used)
            self._applied += 1
        if parallel.loss_scale is not None and report.status != Status.NOTHING:
            parallel.loss_scale.update(applied)
        parallel.last_count, parallel.last_loss_sum = report.counted, report.loss_sum
        pending.loss.settle(report.mean_loss)
        if pending.settled is not None:
            pending.settled(report.loss_sum, report.counted)
        if self._found is not None and pending.update >= self._found[0]:
            error, self._found = self._found[1], None
            raise error

    def _look_for_errors(self) -> None:
        """Note what checks on the device have found, in one of the updates that were launched so far.

        Most often the loss of that update is NaN. The error is raised in its place, or else when all are done.
        """
        if self._found is None:
            error = self._kernels.pending_error()
            if error is not None:
                self._found = self._updates - 1, error

    def take_finished(self, seconds: float) -> None:
        """Take over the reports of the updates under way that come in time, for the log; raises nothing. **Local.**"""
        deadline = time.monotonic() + seconds
        board = self.capture.board
        with contextlib.suppress(Exception):
            while self._pending and board is not None:
                report = board.report(self._pending[0].update)
                if report is not None and not report.halted:
                    self._take(self._pending[0], report)
                elif report is not None or time.monotonic() > deadline:
                    return
                else:
                    time.sleep(_SLEEP_SECONDS)

    def _settle_upto(self, update: int) -> None:
        """Settle all updates up to one, for somebody who wants its loss. **Local.**

        Where ranks could be in different places an update that has failed gives its loss and no error: that comes at
        the next call that all ranks make. One that was broken off has no loss, and the job is ending.

        Raises:
            CommunicationError: a sum over ranks was broken off.
            NonFiniteError: with one rank; see :meth:`choose`.
        """
        while self._pending and self._pending[0].update <= update:
            pending = self._pending[0]
            report = self._wait(pending.update)
            self._look_for_errors()
            if report.halted and self._comm.size > 1:
                if report.status == Status.BROKEN:
                    self._broken_off()
                for late in self._pending:
                    if late.update <= update:
                        late.loss.settle(self._wait(late.update).mean_loss)
                return
            if report.halted:
                self._halt(report)
            self._take(pending, report)

    def _wait(self, update: int) -> Report:
        board = self.capture.board
        assert board is not None
        report: Report = self._until(partial(board.report, update))
        return report

    def _until(self, look: Callable[[], Any]) -> Any:
        """Return what a look at the device's words finds, once it finds something."""
        found = look()
        if not found:
            start = time.monotonic()
            while not found:
                time.sleep(0.0 if time.monotonic() - start < _SPIN_SECONDS else _SLEEP_SECONDS)
                found = look()
                if not found:
                    self._comm.activity.check("a step on the GPU")
        return found

    def _halt(self, report: Report) -> None:
        """Raise what has halted the board. **Collective.**"""
        parallel = self.parallel
        self._pending.clear()
        self.capture.forget()
        self._latest = (), []
        self.capture.board = None  # one that has halted applies nothing any more
        self._updates = self._applied = 0
        parallel.step_count = report.step
        parallel.world.activity.step = report.step
        found, self._found = self._found, None
        agree(self._comm, None if found is None else found[1])
        if report.status == Status.LOSS_LOST:
            non_finite.raise_loss(
                self._comm, report.own_sum, report.loss_sum, report.step, parallel.precision.name
            )
        if report.status == Status.BROKEN:
            self._broken_off()
        scale = parallel.loss_scale
        smallest = None if scale is None else scale.smallest
        non_finite.raise_gradient(parallel.layout, report.bad, report.step, smallest)

    def _broken_off(self) -> NoReturn:
        """Raise what has broken off a sum, the failure of a rank. **Local.**"""
        self._comm.activity.check("a step on the GPU")
        raise CommunicationError("step: expected a sum over all ranks, got one that was broken off")
