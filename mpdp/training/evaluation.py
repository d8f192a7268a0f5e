"""Exact evaluation: every sample once, whatever the number of ranks, and one reduction at the end.

Metrics are sums and counts in float64. Nothing is padded and nothing is repeated, so ranks may see different numbers
of batches; no collective happens until all have seen theirs.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import kernels
from ..autodiff import Tensor, no_grad
from ..autodiff.tensor import unwrap
from ..comm.agreement import agree, compare, on_root, together
from ..comm.base import Communicator
from ..data import Loader, MicroBatch, Stream, StreamLoader, as_dataset, check_dataset, map_arrays
from ..data.streams import length_of
from ..data.transforms import describe_dataset
from ..errors import on_all_ranks
from ..nn import Gather, Module
from ..nn.metrics import finished, metric_name
from ..parallel.forms import split_loss
from ..parallel.record import Kind, exchange
from . import preemption
from .gathering import Rows

if TYPE_CHECKING:
    from .trainer import Trainer

Metric = Callable[[Any, Any], Any]
_BATCH = 1024  # samples of a forward pass over all ranks, where the caller does not say
_NOTHING = "dataset: expected at least one sample to evaluate, got {}"
_TAKEN = ("kind", "epoch", "step", "loss", "validation_loss")  # by the rows of the history and the log


class Tally:
    """Sums and counts of a loss and of metrics over the micro-batches that this rank has seen.

    Args:
        metrics: functions ``metric(output, target) -> (sum, count)``, named by their ``__name__``, and ``nn.Gather``.
    """

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics = tuple(metrics)
        self.values = np.zeros((1 + len(self.metrics), 2), dtype=np.float64)
        self.rows = {
            i: Rows(f"metrics: {metric_name(metric)}.rows")
            for i, metric in enumerate(self.metrics)
            if isinstance(metric, Gather)
        }

    def add_loss(self, loss: Any, count: int) -> None:
        """Add one micro-batch's loss. **Local.**"""
        total, factor, seen = split_loss(loss, count)
        if seen:
            self.values[0] += (float(total.data) * factor, seen)

    def add_metrics(self, output: Any, target: Any, place: int = 0, samples: int = 0) -> None:
        """Add one micro-batch's metrics; its first sample stands at ``place`` in the data set. **Local.**"""
        for i, metric in enumerate(self.metrics):
            if isinstance(metric, Gather):
                self.rows[i].add(place, samples, list(metric.rows(output, target)))
                continue
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
        """Return the global values by name; NaN where nothing was counted. **Collective.**"""
        flat = self.values.reshape(-1).copy()
        comm.all_reduce(flat, lane="urgent")
        (loss, seen), *pairs = flat.reshape(-1, 2).tolist()
        result = {"loss": loss / seen if seen else float("nan")}
        for i, (metric, (total, count)) in enumerate(zip(self.metrics, pairs)):
            result[metric_name(metric)] = (
                _of_all_rows(metric, self.rows[i], comm)
                if isinstance(metric, Gather)
                else together(comm, partial(finished, metric, total, count))
            )
        return result


def _of_all_rows(metric: Gather, rows: Rows, comm: Communicator) -> float:
    """Return a metric of all samples, computed on rank 0; NaN where there are none. **Collective.**"""
    found = rows.gather(comm, everywhere=False)

    def compute() -> float:
        value = metric.function(*found) if found else float("nan")
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"metrics: expected a number from {metric_name(metric)}, got {type(value).__name__} "
                f"{reprlib.repr(value)}; return one"
            ) from error

    value = on_root(comm, compute)
    result = np.array([0.0 if value is None else value], dtype=np.float64)
    comm.broadcast(result, lane="urgent")
    return float(result[0])


def evaluate(
    forward: Callable[[MicroBatch], Any],
    loss: Callable[[Any, Any], Any],
    batches: Iterable[Sequence[MicroBatch]],
    metrics: Sequence[Metric],
) -> Tally:
    """Run the model over this rank's shares and tally them; a signal breaks it off. **Local.**"""
    tally = Tally(metrics)
    with no_grad():
        for parts in batches:
            if preemption.asked():
                break
            for part in parts:
                if part.count:
                    output = forward(part)
                    tally.add_loss(loss(output, part.target), part.count)
                    tally.add_metrics(output, part.target, _place(part), part.count)
                    part.release()
    return tally


def run(
    trainer: Trainer, dataset: Any, metrics: Sequence[Metric], global_batch_size: int | None, ema: bool
) -> dict[str, float]:
    """Evaluate a trainer's model on all ranks; see ``Trainer.evaluate``. **Collective.**"""
    comm = trainer.world.axis("data")
    loader = _loader(trainer, Kind.EVALUATE, dataset, metrics, global_batch_size)
    with _evaluated(trainer, ema), closing(OnePass(loader)) as stream:
        tally = evaluate(trainer.eager.forward, trainer.loss_function, stream, metrics)
    preemption.obey(trainer)
    stream.compare(comm)
    agree(comm, kernels.for_device(trainer.world.device).pending_error())
    stream.refuse_empty(comm)
    return tally.reduced(comm)


def predict(
    trainer: Trainer, dataset: Any, global_batch_size: int | None, everywhere: bool, ema: bool
) -> Any:
    """Return the model's outputs in the order of the data set; see ``Trainer.predict``. **Collective.**"""
    comm = trainer.world.axis("data")
    loader = _loader(trainer, Kind.PREDICT, dataset, (), global_batch_size)
    rows, tree = Rows("predict"), ""
    with _evaluated(trainer, ema), no_grad(), closing(OnePass(loader)) as stream:
        for parts in stream:
            if preemption.asked():
                break
            for part in parts:
                if part.count:
                    output = trainer.eager.forward(part)
                    leaves: list[Any] = []
                    form = map_arrays(partial(_keep, leaves), output, "output")
                    tree = tree or json.dumps(form)
                    rows.add(_place(part), part.count, leaves)
                    part.release()
    preemption.obey(trainer)
    agree(comm, kernels.for_device(trainer.world.device).pending_error())
    stream.compare(comm)
    trees = [text.decode() for text in comm.all_gather_bytes(tree.encode())]
    found = rows.gather(comm, everywhere)
    if not found:
        return None
    return _rebuilt(json.loads(next(text for text in trees if text)), found)


def _keep(leaves: list[Any], output: Any, path: str) -> int:
    """Put an array of the output with the others; return its number."""
    output = unwrap(output)
    if not hasattr(output, "dtype"):
        raise TypeError(
            f"model: expected tensors, or tuples and dicts of them, got {type(output).__name__} in {path}; "
            "return tensors from forward"
        )
    leaves.append(output)
    return len(leaves) - 1


def _rebuilt(form: Any, arrays: list[np.ndarray]) -> Any:
    """Return the arrays in the structure of the output; JSON has made lists of its tuples."""
    if isinstance(form, dict):
        return {key: _rebuilt(value, arrays) for key, value in form.items()}
    if isinstance(form, list):
        return tuple(_rebuilt(value, arrays) for value in form)
    return None if form is None else arrays[form]


def _place(part: MicroBatch) -> int:
    """Return where a share's first sample stands in a data set that is read in its own order."""
    return 0 if part.indices is None else int(part.indices[0])


def _loader(
    trainer: Trainer,
    kind: Kind,
    dataset: Any,
    metrics: Sequence[Metric],
    global_batch_size: int | None,
) -> Loader:
    """Return the loader of one pass in the data set's order, once all ranks agree on it. **Collective.**"""
    comm, world = trainer.world.axis("data"), trainer.world
    exchange(comm, kind, trainer.step_count)
    trainer.saves.check()
    dataset = together(comm, lambda: check_evaluation(dataset, metrics, ordered=kind is Kind.PREDICT))
    size = global_batch_size if global_batch_size is not None else _BATCH
    compare(
        comm,
        kind.name.lower(),
        {
            "length of the data set": length_of(dataset),
            "global_batch_size": size,
            "metrics": [metric_name(metric) for metric in metrics],
            **describe_dataset(dataset),
        },
    )
    if kind is Kind.EVALUATE and length_of(dataset) == 0:
        raise on_all_ranks(ValueError(_NOTHING.format("an empty data set; check where it comes from")))
    return together(
        comm,
        lambda: (StreamLoader if isinstance(dataset, Stream) else Loader)(
            dataset,
            size,
            rank=world.rank,
            size=world.size,
            shuffle=False,
            dtype=trainer.parallel.precision.master,
            device=world.device,
            say=lambda line: None,
            purpose="batch of an evaluation" if kind is Kind.EVALUATE else "batch of a prediction",
        ),
    )


class OnePass:
    """This rank's micro-batches of one pass over data in their own order.

    Args:
        loader: of a data set or a stream.
    """

    def __init__(self, loader: Loader) -> None:
        self._stream = (
            loader.epochs(count=1) if isinstance(loader, StreamLoader) else loader.updates(stop=len(loader))
        )
        self._streamed = isinstance(loader, StreamLoader)
        self._together = isinstance(loader, StreamLoader) and not loader.dataset.sharded
        self._read = 0

    def __iter__(self) -> Iterator[Sequence[MicroBatch]]:
        for parts in self._stream:
            self._read += sum(part.total or 0 for part in parts)
            yield parts

    def compare(self, comm: Communicator) -> None:
        """Check that ranks which should read one stream have read equally much. **Collective.**"""
        if self._together:
            compare(comm, "dataset", {"number of elements of the stream": self._read})

    def refuse_empty(self, comm: Communicator) -> None:
        """Refuse a stream that has ended without an element on any rank, once all have read it. **Collective.**

        Raises:
            ValueError: on all ranks.
        """
        if self._streamed and comm.reduce_numbers([self._read], [0.0])[0] == [0]:
            raise on_all_ranks(ValueError(_NOTHING.format("a stream that has ended; let it begin anew")))

    def close(self) -> None:
        """End the reading ahead. **Local.**"""
        self._stream.close()


@contextmanager
def _evaluated(trainer: Trainer, ema: bool) -> Iterator[None]:
    """Run a block with the trainer's model in evaluation mode, with its averaged weights if asked for. **Local.**"""
    with evaluation_mode(trainer.model), trainer.averaged() if ema else nullcontext():
        yield


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


def check_evaluation(dataset: Any, metrics: Sequence[Metric], ordered: bool) -> Any:
    """Refuse what is no data or no metric; return the data as the loader takes them. **Local.**"""
    dataset = as_dataset(dataset)
    if not isinstance(dataset, Stream):
        check_dataset(dataset)
    elif ordered and dataset.sharded:
        raise ValueError(
            "dataset: expected data that have one order for all ranks, got a sharded stream; predict rank by rank"
        )
    check_metrics(metrics)
    return dataset


def check_metrics(metrics: Sequence[Metric], of_training: bool = False) -> None:
    """Refuse what is no metric, or none that batches of training have. **Local.**"""
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
        if of_training and isinstance(metric, Gather):
            raise ValueError(
                f"metrics: expected validation= beside {metric_name(metric)} (it needs all samples), got none; "
                "pass validation data, or a metric that returns (sum, count)"
            )
        names.append(metric_name(metric))
    for name in names:
        if names.count(name) > 1 or name in _TAKEN:
            raise ValueError(
                f"metrics: expected distinct names other than {', '.join(_TAKEN)}, got {name!r}; rename it"
            )


def _number(value: Any) -> float:
    return float(value.data) if isinstance(value, Tensor) else float(value)
