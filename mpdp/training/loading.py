"""Models out of checkpoints, without a trainer: for inference, for fine-tuning, in a program of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .. import kernels
from ..device import Device, as_device
from ..errors import CheckpointError
from ..nn import Module
from ..nn.models import make_again
from . import checkpoint
from .checkpoint import Checkpoint


def best_checkpoint(run_dir: str | os.PathLike[str]) -> Path:
    """Return the checkpoint with the best value of what the run was asked to keep the best of.

    **Local.**

    Args:
        run_dir: the folder of a run with ``keep_best=``.

    Raises:
        CheckpointError: there is none.
    """
    found = checkpoint.found_below(Path(run_dir) / "checkpoints")
    for one in found:
        kept = one.state.get("keep_best")
        if isinstance(kept, list) and len(kept) == 2 and all(isinstance(text, str) for text in kept):
            best = checkpoint.best(found, *kept)
            if best is not None:
                return best.path
    raise CheckpointError(
        f"checkpoint: expected one below {run_dir} that was saved as the best, got none of {len(found)}; "
        "train with keep_best=, or take the newest"
    )


def load_model(
    path: str | os.PathLike[str],
    model: Module | None = None,
    *,
    best: bool = False,
    ema: bool = False,
    device: Device | str = "cpu",
) -> Module:
    """Return the model of a checkpoint, in evaluation mode.

    **Local.** Each rank that calls it reads the files. It needs no trainer and no optimizer.

    Args:
        path: a run's folder, of which the newest complete checkpoint is taken, or the directory of a checkpoint.
        model: a model of the same form, which is filled and returned. None makes one anew, where that of the checkpoint
            was made by a function of ``nn.models`` (``mlp``, ``convnet``, ``resnet18``, ``resnet50``, ``gpt``) and not
            changed afterwards: code is never taken from a file.
        best: of a run's folder, take the best checkpoint (``keep_best=``) in place of the newest.
        ema: the averaged weights of a trainer with ``ema=``, with the bits that they have in its ``averaged()``, in the
            dtype of its weights: float32 under 16 bits. Buffers are the model's own, as there.
        device: where a model that is made anew lies; one that is passed stays where it is.

    Raises:
        CheckpointError: there is no complete checkpoint, it is torn, has no average, or does not fit ``model``; nothing
            was loaded.
        ValueError: ``model`` is missing where it is needed.
        TypeError: ``model`` is no module.

    Example:
        >>> import mpdp, numpy as np, tempfile
        >>> from mpdp import nn, optim
        >>> folder = tempfile.mkdtemp()
        >>> trainer = mpdp.Trainer(nn.models.mlp((3, 4, 2)), nn.cross_entropy, optim.SGD(lr=0.1), run_dir=folder)
        >>> path = trainer.save()
        >>> model = mpdp.load_model(folder)
        >>> bool((model[0].weight.data == trainer.model[0].weight.data).all())
        True
    """
    if model is not None and not isinstance(model, Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}; derive it from nn.Module")
    found, tensors = _read(Path(path), best, ema)
    weights = {name.partition("/")[2]: array for name, array in tensors.items()}
    if model is None:
        most = sum(array.size for array in weights.values())
        described = found.state.get("model")
        model = make_again(described if isinstance(described, dict) else {}, most)
        _widen(model, weights)
        model.to(as_device(device))
    try:
        model.load_state_dict(weights)
    except ValueError as error:
        raise CheckpointError(f"checkpoint {found.path}: {error}") from error
    return model.eval()


def _read(path: Path, best: bool, ema: bool) -> tuple[Checkpoint, dict[str, np.ndarray]]:
    """Return a checkpoint with its weights, or averaged weights, and buffers."""
    if (path / checkpoint.MANIFEST).exists() or not (path / "checkpoints").is_dir():
        found = checkpoint.read(path)
        return found, checkpoint.load(found, _wanted(found, ema))
    if best:
        found = checkpoint.read(best_checkpoint(path))
        return found, checkpoint.load(found, _wanted(found, ema))
    reasons: list[str] = []
    for found in checkpoint.found_below(path / "checkpoints", reasons):
        wanted = _wanted(found, ema)  # an older one is no answer to a newest one without an average
        try:
            return found, checkpoint.load(found, wanted)
        except CheckpointError as error:
            reasons.append(str(error))
    raise CheckpointError(
        f"checkpoint: expected a complete one below {path}, got none{''.join(f'; {text}' for text in reasons)}; "
        "check the path"
    )


def _wanted(found: Checkpoint, ema: bool) -> Callable[[str], bool]:
    """Return which tensors of a checkpoint are the model's; the average is the weights until there was an update."""
    averaged = bool(found.state.get("average"))
    if ema and not averaged and found.state.get("ema") is None:
        raise CheckpointError(
            f"checkpoint {found.path}: expected one with averaged weights, got one without; train with ema="
        )
    kinds = ("average/" if ema and averaged else "weights/", "buffers/")
    return lambda name: name.startswith(kinds)


def _widen(model: Module, weights: dict[str, Any]) -> None:
    """Give a new model the dtype in which a trainer has kept its parameters, as float64 of a float32 model."""
    for named in (model.named_parameters(), model.named_buffers()):
        for name, tensor in named:
            dtype = getattr(weights.get(name), "dtype", tensor.dtype)
            if dtype != tensor.dtype and {dtype.name, np.dtype(tensor.dtype).name} == {"float32", "float64"}:
                tensor.data = kernels.of(tensor.data).xp.asarray(tensor.data, dtype)
