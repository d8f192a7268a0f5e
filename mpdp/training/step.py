"""One update, run eagerly: forward, backward and reduction of each micro-batch, then the optimizer.

It knows a model wrapped for its ranks and a loss, and nothing of epochs, files or callbacks. Eager mode is what
debugging uses, and the oracle of every faster way to run a step.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import kernels
from ..data import MicroBatch, map_arrays, share, split_batch
from ..device import Device, device_of
from ..errors import NonFiniteError
from ..optim import Optimizer
from ..parallel.data_parallel import DataParallel
from ..parallel.forms import split_loss
from . import arguments
from .blame import with_ranks
from .evaluation import Tally


class EagerStep:
    """Run updates of one model.

    Args:
        parallel: the wrapped model.
        loss_function: ``loss(output, target)``.
        optimizer: updates the weights.
        clip_norm, clip_value: see :class:`mpdp.Trainer`.
    """

    def __init__(
        self,
        parallel: DataParallel,
        loss_function: Callable[[Any, Any], Any],
        optimizer: Optimizer,
        clip_norm: float | None,
        clip_value: float | None = None,
    ) -> None:
        self.parallel = parallel
        self.loss_function = loss_function
        self.optimizer = optimizer
        self.clip_norm, self.clip_value = clip_norm, clip_value

    def forward(self, part: MicroBatch) -> Any:
        """Return the model's output for a share. **Collective** where the model communicates, else **Local.**"""
        part.acquire()
        return self.parallel.forward(part.inputs or (), part.kwargs, start=part.start, count=part.count)

    def loss(self, part: MicroBatch, tally: Tally | None = None, unchecked: Any = None) -> Any:
        """Return the loss of one share; None where this rank has no sample of the micro-batch.

        **Local.** Where the model communicates it is **Collective**, and a share without samples has a loss too, that
        of zero rows: the other ranks' statistics and gradients wait for this rank's.

        Args:
            part: the share.
            tally: takes the metrics of the output.
            unchecked: a data set whose labels are still to be checked against the output.
        """
        if not part.count:
            return self._loss_of_nothing(part) if self.parallel.communicates else None
        output = self.forward(part)
        if output is None:
            raise TypeError("model: expected an output, got None; return it from forward")
        if unchecked is not None:
            arguments.check_labels(self.loss_function, unchecked, output)
        loss = self.loss_function(output, part.target)
        if loss is None or unchecked is not None:
            split_loss(loss, part.count)  # None would pass for a share without samples
        if tally is not None:
            tally.add_metrics(output, part.target)
        return loss

    def _loss_of_nothing(self, part: MicroBatch) -> Any:
        """Return the loss of zero rows, which a rank without samples runs for the others' sake. **Collective.**"""

        def place(value: Any, path: str) -> Any:
            return kernels.move(value, self.parallel.world.device)

        try:
            if part.inputs is None:
                raise ValueError(
                    "expected inputs of zero rows, got none; give the data set one sample or more"
                )
            part = replace(
                part,
                inputs=map_arrays(place, part.inputs),
                kwargs=map_arrays(place, part.kwargs),
                target=map_arrays(place, part.target),
            )
            return self.loss_function(self.forward(part), part.target)
        except Exception as error:
            error.add_note(
                f"rank {self.parallel.world.rank} has no sample of this micro-batch and ran model and loss on zero "
                "rows, since other ranks wait for its part of the statistics; make both work on zero rows, use larger "
                "batches, or global_stats=False"
            )
            raise

    def run(
        self,
        parts: Sequence[MicroBatch],
        *,
        lr: float,
        stop: bool = False,
        tally: Tally | None = None,
        first_loss: Any = None,
    ) -> float:
        """Do one update and return its global mean loss.

        **Collective.** Ranks reduce with the last micro-batch; every rank brings equally many.

        Args:
            parts: this rank's shares of the update's micro-batches, in order.
            lr: the learning rate.
            stop: ask all ranks to stop after this update.
            tally: takes the metrics.
            first_loss: the loss of ``parts[0]``, where it was computed already.
        """
        try:
            for i, part in enumerate(parts):
                loss = first_loss if i == 0 and first_loss is not None else self.loss(part, tally)
                self.parallel.backward(loss, count=part.count, final=i + 1 == len(parts), stop=stop)
                part.release()
            return self.parallel.step(
                self.optimizer, lr=lr, clip_norm=self.clip_norm, clip_value=self.clip_value
            )
        except NonFiniteError as error:
            self.parallel.abandon()
            told = with_ranks(self, parts, error)
            if told is error:
                raise
            raise told from error
        except BaseException:
            self.parallel.abandon()
            raise


def take_apart(batch: Any, device: Device) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return what a model is called with, and the target, as arrays on ``device``.

    **Local.** A target may be a list of numbers. Inputs may not: a list of them in the first place is several inputs.

    Raises:
        TypeError: inputs that are lists of numbers.
        ValueError: a batch of another form.
    """

    def place_input(value: Any, path: str) -> Any:
        if isinstance(value, list):
            raise TypeError(
                f"{path}: expected arrays as a model's inputs, got the list {reprlib.repr(value)}; "
                'pass (np.asarray(x, "float32"), y), and several inputs as a tuple of arrays'
            )
        return place(value, path)

    def place(value: Any, path: str) -> Any:
        return kernels.move(value if hasattr(value, "dtype") else np.asarray(value), device)

    if type(batch) is tuple and len(batch) == 2:  # what most programs give, many times a second
        array, (x, target) = device.xp.ndarray, batch
        if type(x) is type(target) is array and device_of(x) == device_of(target) == device:
            return (x,), {}, target
    inputs, kwargs, target = split_batch(batch)  # first: a list of two is inputs and target, not one array
    return (
        map_arrays(place_input, inputs, "inputs"),
        map_arrays(place_input, kwargs, "inputs"),
        map_arrays(place, target),
    )


def cut_batch(whole: MicroBatch, accumulate: int) -> list[MicroBatch]:
    """Cut a rank's own batch into ``accumulate`` micro-batches of nearly equal length. **Local.**"""
    parts = []
    for i in range(accumulate):
        a, b = share(whole.count, accumulate, i)
        part = replace(
            whole,
            inputs=_cut(whole.inputs, a, b),
            kwargs=_cut(whole.kwargs, a, b),
            target=_cut(whole.target, a, b),
            start=None if whole.start is None else whole.start + a,
            count=b - a,
        )
        parts.append(part)
    return parts


def _cut(value: Any, start: int, stop: int) -> Any:
    """Return samples start to stop of an array, or of each array of a tuple or dict; None stays None."""
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple(_cut(v, start, stop) for v in value)
    if isinstance(value, dict):
        return {key: _cut(v, start, stop) for key, v in value.items()}
    return value[start:stop]
