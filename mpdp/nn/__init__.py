"""Modules, layers, initialisers, losses and metrics.

``Module`` finds parameters by name; layers are thin modules around ``autodiff.ops``; losses carry sum and
count; ``seed`` fixes initial weights on all ranks. This package knows nothing of optimizers or ranks.
"""

from ..autodiff import Buffer, Parameter
from . import init
from .layers import GELU, Dropout, Embedding, Flatten, LayerNorm, Linear, ReLU, Sequential, Tanh
from .losses import Loss, check_class_indices, cross_entropy, mse
from .metrics import accuracy
from .module import Module, checkpoint
from .seeding import current_seed, seed

__all__ = [
    "GELU",
    "Buffer",
    "Dropout",
    "Embedding",
    "Flatten",
    "LayerNorm",
    "Linear",
    "Loss",
    "Module",
    "Parameter",
    "ReLU",
    "Sequential",
    "Tanh",
    "accuracy",
    "check_class_indices",
    "checkpoint",
    "cross_entropy",
    "current_seed",
    "init",
    "mse",
    "seed",
]
