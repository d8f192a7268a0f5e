"""Optimizers: update rules over ranges of flat buffers, schedules of the learning rate, and the loss scale of float16.

An optimizer sees weights and gradients as flat arrays over a layout and never asks where its state
lives or who reduced the gradient. Read next: ``optimizer`` (the interface and the groups), ``sgd``
and ``adam`` (the rules), ``plan`` (which range takes which values), ``schedules``, ``loss_scale``.
"""

from .adam import Adam, AdamW
from .loss_scale import LossScale
from .optimizer import Group, Optimizer
from .schedules import Schedule, StepLR, WarmupCosine, WarmupLinear, constant
from .sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Group",
    "LossScale",
    "Optimizer",
    "Schedule",
    "StepLR",
    "WarmupCosine",
    "WarmupLinear",
    "constant",
]
