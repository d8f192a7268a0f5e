"""Optimizers: update rules over ranges of flat buffers, schedules of the learning rate, and the loss scale of float16.

An optimizer sees weights and gradients as flat arrays over a layout and never asks where its state
lives or who reduced the gradient. Read next: ``optimizer`` (the interface), ``groups``, ``sgd``, ``adam``,
``lion`` and ``lamb`` (the rules), ``plan`` (which range takes which values), ``segments`` (whose norms are
summed where), ``average``, ``schedules``, ``compositions``, ``plateau``, ``loss_scale``.
"""

from .adam import Adam, AdamW
from .average import WeightAverage
from .compositions import Product, Sequential, Warmup
from .groups import Group
from .lamb import LAMB
from .lion import Lion
from .loss_scale import LossScale
from .optimizer import Optimizer
from .plateau import ReduceOnPlateau
from .schedules import Schedule, StepLR, WarmupCosine, WarmupLinear, constant
from .sgd import SGD

__all__ = [
    "LAMB",
    "SGD",
    "Adam",
    "AdamW",
    "Group",
    "Lion",
    "LossScale",
    "Optimizer",
    "Product",
    "ReduceOnPlateau",
    "Schedule",
    "Sequential",
    "StepLR",
    "Warmup",
    "WarmupCosine",
    "WarmupLinear",
    "WeightAverage",
    "constant",
]
