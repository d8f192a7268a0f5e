"""Checks of what a program hands to the trainer; each is local, and the trainer has all ranks agree on it."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data import ArrayDataset, split_batch
from ..data.worker_process import MARK
from ..errors import WorkerError
from ..nn import Module, losses
from ..optim import Optimizer, WeightAverage
from ..parallel import placement as placements
from ..parallel.precision import NAMES
from ..world import World

if TYPE_CHECKING:
    from .trainer import Trainer


def check(
    *,
    model: Any,
    loss: Any,
    optimizer: Any,
    schedule: Any,
    precision: Any,
    placement: Any,
    accumulate: Any,
    clip_norm: Any,
    seed: Any,
    graph: Any,
    plans: Any,
    save_every: Any,
    keep: Any,
    keep_best: Any,
    best_mode: Any,
    run_dir: Any,
    callbacks: Any,
    clip_value: Any,
    ema: Any,
) -> None:
    """Refuse arguments of the constructor that cannot work. **Local.**"""
    if os.environ.get(MARK):
        raise WorkerError(
            "Trainer: expected one in a rank, got one in a worker process that has run the script again; "
            'put the script\'s own doings under if __name__ == "__main__":'
        )
    if not isinstance(model, Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}; derive it from nn.Module")
    if not callable(loss):
        raise TypeError(
            f"loss: expected a function loss(output, target), got {type(loss).__name__}; as nn.cross_entropy"
        )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer: expected one of mpdp.optim, got {type(optimizer).__name__}; as optim.SGD(lr=0.1)"
        )
    if not callable(schedule):
        raise TypeError(
            f"schedule: expected a function of the update's index, got {type(schedule).__name__}; "
            "as optim.WarmupCosine(100, 5000)"
        )
    if precision not in NAMES:
        raise ValueError(
            f"precision: expected one of {', '.join(NAMES)}, got {precision!r}; float32 is the default"
        )
    placements.check(placement)
    if not (graph == "auto" or isinstance(graph, bool)):
        raise ValueError(f'graph: expected "auto", True or False, got {graph!r}; leave it out')
    if plans not in ("suggested", "timed"):
        raise ValueError(f'plans: expected "suggested" or "timed", got {plans!r}; leave it out')
    for name, value in (("accumulate", accumulate), ("keep", keep)):
        if not _whole(value) or value < 1:
            raise ValueError(f"{name}: expected an integer of 1 or more, got {value!r}; pass an int")
    if save_every is not None and (not _whole(save_every) or save_every < 1):
        raise ValueError(
            f"save_every: expected an integer of 1 or more, or None, got {save_every!r}; it counts updates"
        )
    if save_every is not None and run_dir is None:
        raise ValueError(
            f"save_every: expected a run_dir to save in, got {save_every} without one; pass run_dir="
        )
    if keep_best is not None:
        if not isinstance(keep_best, str):
            raise TypeError(
                f"keep_best: expected a name such as 'validation_loss', got {keep_best!r}; pass a str"
            )
        if run_dir is None:
            raise ValueError(
                f"keep_best: expected a run_dir to save in, got {keep_best!r} without one; pass run_dir="
            )
        mode_of("best_mode", keep_best, best_mode)
    if not _whole(seed):
        raise ValueError(f"seed: expected an integer, got {seed!r}; pass a fixed number")
    for name, limit in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if limit is not None and not (isinstance(plain(limit), (int, float)) and limit > 0):
            raise ValueError(f"{name}: expected a number above 0, or None, got {limit!r}; None does not clip")
    if ema is not None:
        WeightAverage(ema)
    if not isinstance(callbacks, Sequence):
        raise TypeError(f"callbacks: expected a list, got {type(callbacks).__name__}; pass [callback]")
    if run_dir is not None and not isinstance(run_dir, (str, os.PathLike)):
        raise TypeError(f"run_dir: expected a path, got {type(run_dir).__name__}; pass a str or Path")
    if run_dir is not None:
        path = os.fspath(run_dir)
        if not isinstance(path, str) or not path or "\0" in path:
            raise ValueError(
                f"run_dir: expected a path, got {path!r}; pass a str that is not empty and holds no zero byte"
            )
    for callback in callbacks:
        if isinstance(callback, type):
            raise TypeError(
                f"callbacks: expected objects with the methods of mpdp.Callback, got the class {callback.__name__}; "
                "call it"
            )
        for method in ("on_step", "on_epoch", "on_validation", "on_checkpoint", "on_exception"):
            if not callable(getattr(callback, method, None)):
                raise TypeError(
                    f"callbacks: expected objects with the methods of mpdp.Callback, got {type(callback).__name__} "
                    f"without {method}; derive it from mpdp.Callback"
                )


def mode_of(argument: str, metric: str, mode: Any) -> str:
    """Return whether the lowest or the highest value of a metric is best: ``"min"`` or ``"max"``. **Local.**

    Raises:
        ValueError: not said, and the metric is neither a loss nor a perplexity.
    """
    if mode is None and (metric.endswith("loss") or metric == "perplexity"):
        return "min"
    if mode not in ("min", "max"):
        raise ValueError(
            f'{argument}: expected "min" or "max" beside metric {metric!r}, got {mode!r}; say which is better'
        )
    return str(mode)


def learning_rate(optimizer: Optimizer, schedule: Any, step: int) -> float:
    """Return the learning rate of an update. **Local.**

    Raises:
        TypeError: a schedule that returns no number.
    """
    factor = schedule(step)
    try:
        return optimizer.lr * float(factor)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"schedule: expected a number for update {step}, got {factor!r}; return a factor on the learning rate"
        ) from error


def check_graph(graph: Any, world: World) -> None:
    """Refuse to require graphs where there are none. **Local.**"""
    if graph is True and world.device.kind == "cpu":
        raise ValueError('graph: expected "auto" or False on a CPU, got True; a GPU alone has graphs')


def check_policy(on_divergence: Any) -> None:
    """Refuse what is to be done about replicas that differ, if it is unknown. **Local.**"""
    if on_divergence not in ("stop", "repair"):
        raise ValueError(
            f'on_divergence: expected "stop" or "repair", got {on_divergence!r}; leave it out to stop'
        )


def cast(model: Module, precision: str, world: World) -> None:
    """Widen a float32 model to float64 where that is asked for; refuse to narrow one. **Local.**"""
    widened = False
    master = "float64" if precision == "float64" else "float32"
    for name, parameter in model.named_parameters():
        dtype = np.dtype(parameter.dtype).name
        if dtype == master:
            continue
        if dtype == "float32":
            parameter.data = parameter.data.astype("float64")
            widened = True
        else:
            other = 'pass precision="float64" or ' if dtype == "float64" else ""
            raise TypeError(
                f"precision: expected parameters of dtype {master}, got {dtype} in {name}; "
                f'{other}build the layers with dtype="{master}"'
            )
    for _, buffer in model.named_buffers() if widened else ():
        if buffer.dtype == np.float32:
            buffer.data = buffer.data.astype("float64")
    if widened:
        world.log("info", 'precision: widened the parameters from float32 to float64 for precision="float64"')
    if precision == "tf32" and world.device.kind == "cpu":
        world.log("info", 'precision: "tf32" is float32 on a CPU, which has no TF32')


def check_labels(function: Any, dataset: Any, output: Any) -> None:
    """Check all labels of an in-memory data set, where the loss takes class indices. **Local.**

    Args:
        function: the loss function.
        dataset: what ``fit`` trains on.
        output: the model's output for the first samples; its last axis counts the classes.

    Raises:
        TypeError: labels that are not integers.
        ValueError: a label out of range, naming the sample.
    """
    keywords: dict[str, Any] = {}
    if isinstance(function, functools.partial):
        function, keywords = function.func, function.keywords
    if function is losses.cross_entropy and isinstance(dataset, ArrayDataset):
        ignore_index = keywords.get("ignore_index", -100)
        losses.check_class_indices(split_batch(dataset.arrays)[2], int(output.shape[-1]), ignore_index)


def describe(value: Any) -> Any:
    """Return a function, schedule, optimizer or argument in a form that ranks compare and JSON holds. **Local.**

    An object without ``describe`` goes by its class alone: its text may hold an address, which differs between ranks.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        digest = hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=8).hexdigest()
        return f"{value.dtype}{list(value.shape)} {digest}"
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [describe(item) for item in value]
    if isinstance(value, functools.partial):
        return [describe(value.func), *map(describe, value.args), describe(value.keywords)]
    if hasattr(value, "describe") and not isinstance(value, type):
        return describe(value.describe())
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{getattr(value, '__module__', '')}.{name}"


def settings(trainer: Trainer) -> dict[str, Any]:
    """Return what must be equal on all ranks beside the model; they compare it, and files hold it. **Local.**"""
    return {
        "optimizer": describe(trainer.optimizer),
        "schedule": describe(trainer.schedule),
        "loss": describe(trainer.loss_function),
        "precision": trainer.precision,
        "loss_scale": None if trainer.parallel.loss_scale is None else trainer.parallel.loss_scale.describe(),
        "placement": trainer.placement,
        "accumulate": trainer.accumulate,
        "clip_norm": trainer.clip_norm,
        "clip_value": trainer.clip_value,
        "ema": trainer.ema,
        "seed": trainer.seed,
        "plans": trainer.plans,
        "save_every": trainer.save_every,
        "keep_best": None if trainer.keep_best is None else f"{trainer.best_mode} of {trainer.keep_best}",
        "async_save": trainer.async_save,
        "callbacks": len(trainer.callbacks),
    }


def plain(value: Any) -> Any:
    """Return a NumPy number as Python's, which JSON can hold, and anything else as it is. **Local.**"""
    return value.item() if isinstance(value, np.generic) else value


def _whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
