"""mpdp: multi-process data parallelism for NumPy and CuPy.

One process owns one device and one replica of the model; gradients are all-reduced while backward still
runs. Start with ``mpdp.init`` and ``mpdp.Trainer``. Importing this package starts neither MPI nor CUDA; under a
launcher it installs the hooks that end the job when a rank fails. Public names are loaded when they are first used,
so that a command line is parsed before NumPy is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

from . import guard as _guard

_guard.install()  # before anything that may fail: from here on, a rank that fails ends its job

if TYPE_CHECKING:
    from . import autodiff, data, errors, nn, optim, random
    from .autodiff import no_grad
    from .device import Device
    from .device_memory import DeviceInfo, devices, place
    from .nn import seed
    from .parallel import DataParallel, GradientArena, Layout, Reducer
    from .training import (
        Callback,
        CsvWriter,
        EarlyStopping,
        TensorBoardWriter,
        Trainer,
        best_checkpoint,
        load_model,
        new_run_dir,
    )
    from .world import World, current_world, init

_HOMES = {
    "Callback": "training",
    "CsvWriter": "training",
    "DataParallel": "parallel",
    "Device": "device",
    "DeviceInfo": "device_memory",
    "EarlyStopping": "training",
    "GradientArena": "parallel",
    "Layout": "parallel",
    "Reducer": "parallel",
    "TensorBoardWriter": "training",
    "Trainer": "training",
    "World": "world",
    "best_checkpoint": "training",
    "current_world": "world",
    "devices": "device_memory",
    "init": "world",
    "load_model": "training",
    "new_run_dir": "training",
    "no_grad": "autodiff",
    "place": "device_memory",
    "seed": "nn",
}
_MODULES = ("autodiff", "data", "errors", "nn", "optim", "random")

__all__ = [
    "Callback",
    "CsvWriter",
    "DataParallel",
    "Device",
    "DeviceInfo",
    "EarlyStopping",
    "GradientArena",
    "Layout",
    "Reducer",
    "TensorBoardWriter",
    "Trainer",
    "World",
    "__version__",
    "autodiff",
    "best_checkpoint",
    "current_world",
    "data",
    "devices",
    "errors",
    "init",
    "load_model",
    "new_run_dir",
    "nn",
    "no_grad",
    "optim",
    "place",
    "random",
    "seed",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
