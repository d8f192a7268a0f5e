"""mpdp: multi-process data parallelism for NumPy and CuPy.

One process owns one device and one replica of the model; gradients are all-reduced while backward still
runs. Start with ``mpdp.init`` and ``mpdp.Trainer``. Importing this package starts neither MPI nor CUDA; under a
launcher it installs the hooks that end the job when a rank fails.
"""

from __future__ import annotations

__version__ = "0.1.0"

from . import guard as _guard

_guard.install()  # before anything that may fail: from here on, a rank that fails ends its job

from . import autodiff, data, errors, nn, optim, random  # noqa: E402
from .autodiff import no_grad  # noqa: E402
from .device import Device  # noqa: E402
from .device_memory import DeviceInfo, devices, place  # noqa: E402
from .nn import seed  # noqa: E402
from .parallel import DataParallel, GradientArena, Layout, Reducer  # noqa: E402
from .training import Callback, Trainer, new_run_dir  # noqa: E402
from .world import World, current_world, init  # noqa: E402

__all__ = [
    "Callback",
    "DataParallel",
    "Device",
    "DeviceInfo",
    "GradientArena",
    "Layout",
    "Reducer",
    "Trainer",
    "World",
    "__version__",
    "autodiff",
    "current_world",
    "data",
    "devices",
    "errors",
    "init",
    "new_run_dir",
    "nn",
    "no_grad",
    "optim",
    "place",
    "random",
    "seed",
]
