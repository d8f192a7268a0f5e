"""Exact evaluation: every sample once, whatever the number of ranks, and one reduction at the end.

Metrics are sums and counts in float64. Nothing is padded and nothing is repeated, so ranks may see different numbers
of batches; no collective happens until all have seen theirs.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import kernels
from ..autodiff import Tensor, no_grad
from ..comm.agreement import agree, compare, together
from ..comm.base import Communicator
from ..data import Loader, MicroBatch, check_dataset
from ..nn import Module
from ..parallel.forms import split_loss
from ..parallel.record import Kind, exchange

if TYPE_CHECKING:
    from .trainer import Trainer

Metric = Callable[[Any, Any], tuple[Any, Any]]
_BATCH = 1024  # samples of a forward pass over all ranks, where the caller does not say
_TAKEN = ("kind", "epoch", "step", "loss", "validation_loss")  # by the rows of the history and the log


class Tally:
    """Sums and counts of a loss and of metrics over the micro-batches that this rank has seen.

    Args:
        metrics: functions ``metric(output, target) -> (sum, count)``, named by their ``__name__``.
    """

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics = tuple(metrics)
        self.values = np.zeros((1 + len(self.metrics), 2), dtype=np.float64)

    def add_loss(self, loss: Any, count: int) -> None:
        """Add one micro-batch's loss. **Local.**"""
        total, factor, seen = split_loss(loss, count)
        if seen:
            self.values[0] += (float(total.data) * factor, seen)

    def add_metrics(self, output: Any, target: Any) -> None:
        """Add one micro-batch's metrics. **Local.**"""
        for i, metric in enumerate(self.metrics):
            pair = metric(output, target)
            try:
                total, count = pair
                self.values[1 + i] += (_number(total), _number(count))
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"metrics: expected a pair (sum, count) of numbers from {metric_name(metric)}, "
                    f"got {type(pair).__name__} {reprlib.repr(pair)}; return a sum and how many things it is over"
                ) from error

    def reduced(self, comm: Communicator) -> dict[str, float]:
        """Return the global means by name; NaN where nothing was counted. **Collective.**"""
        flat = self.values.reshape(-1).copy()
        comm.all_reduce(flat, lane="urgent")
        names = ["loss", *(metric_name(metric) for metric in self.metrics)]
        return {
            name: float(total / count) if count else float("nan")
            for name, (total, count) in zip(names, flat.reshape(-1, 2))
        }


def evaluate(
    forward: Callable[[MicroBatch], Any],
    loss: Callable[[Any, Any], Any],
    batches: Iterable[Sequence[MicroBatch]],
    metrics: Sequence[Metric],
) -> Tally:
    """Run the model over this rank's shares and tally them. **Local.**"""
    tally = Tally(metrics)
    with no_grad():
        for parts in batches:
            for part in parts:
                if part.count:
                    output = forward(part)
                    tally.add_loss(loss(output, part.target), part.count)
                    tally.add_metrics(output, part.target)
                    part.release()
    return tally


def run(
    trainer: Trainer, dataset: Any, metrics: Sequence[Metric], global_batch_size: int | None
) -> dict[str, float]:
    """Evaluate a trainer's model on all ranks; see ``Trainer.evaluate``. **Collective.**"""
    comm, world = trainer.world.axis("data"), trainer.world
    exchange(comm, Kind.EVALUATE, trainer.step_count)
    together(comm, lambda: check_evaluation(dataset, metrics))
    size = global_batch_size if global_batch_size is not None else _BATCH
    compare(
        comm,
        "evaluate",
        {
            "length of the data set": len(dataset),
            "global_batch_size": size,
            "metrics": [metric_name(metric) for metric in metrics],
        },
    )
    loader = together(
        comm,
        lambda: Loader(
            dataset,
            size,
            rank=world.rank,
            size=world.size,
            shuffle=False,
            dtype=trainer.parallel.precision.master,
            device=world.device,
            say=lambda line: None,
            purpose="batch of an evaluation",
        ),
    )
    with evaluation_mode(trainer.model), loader.updates(stop=len(loader)) as stream:
        tally = evaluate(trainer.eager.forward, trainer.loss_function, stream, metrics)
    agree(comm, kernels.for_device(world.device).pending_error())
    return tally.reduced(comm)


@contextmanager
def evaluation_mode(model: Module) -> Iterator[None]:
    """Run a block with the model in evaluation mode; every module then gets its own mode back. **Local.**"""
    modes = [(module, module.training) for _, module in model.named_modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def metric_name(metric: Metric) -> str:
    """Return a metric's name: its ``__name__``, or its class's. **Local.**"""
    return getattr(metric, "__name__", type(metric).__name__)


def check_evaluation(dataset: Any, metrics: Sequence[Metric]) -> None:
    """Refuse what is no data set or no metric. **Local.**"""
    check_dataset(dataset)
    check_metrics(metrics)


def check_metrics(metrics: Sequence[Metric]) -> None:
    """Refuse what is no metric. **Local.**"""
    names = []
    if not isinstance(metrics, Sequence):
        raise TypeError(
            f"metrics: expected a list of functions metric(output, target), got {type(metrics).__name__}; "
            "pass [metric]"
        )
    for metric in metrics:
        if not callable(metric):
            raise TypeError(
                f"metrics: expected functions metric(output, target), got {type(metric).__name__}; as nn.accuracy"
            )
        names.append(metric_name(metric))
    for name in names:
        if names.count(name) > 1 or name in _TAKEN:
            raise ValueError(
                f"metrics: expected distinct names other than {', '.join(_TAKEN)}, got {name!r}; rename it"
            )


def _number(value: Any) -> float:
    return float(value.data) if isinstance(value, Tensor) else float(value)
