"""Modules, layers, initialisers, losses and metrics.

``Module`` finds parameters by name; layers are thin modules around ``autodiff.ops``; losses carry sum and
count; ``seed`` fixes initial weights on all ranks. This package knows nothing of optimizers or ranks.
"""

from ..autodiff import Buffer, Parameter
from . import init, models
from .attention import MultiHeadAttention, TransformerBlock
from .convolution import AvgPool2d, Conv2d, GlobalAvgPool2d, MaxPool2d
from .layers import GELU, Dropout, Embedding, Flatten, LayerNorm, Linear, ReLU, Sequential, Tanh
from .losses import Loss, check_class_indices, cross_entropy, mse
from .metrics import Gather, accuracy, mean, perplexity, top_k
from .module import Module, checkpoint
from .normalisation import BatchNorm1d, BatchNorm2d, GroupNorm, RMSNorm
from .seeding import current_seed, seed

__all__ = [
    "GELU",
    "AvgPool2d",
    "BatchNorm1d",
    "BatchNorm2d",
    "Buffer",
    "Conv2d",
    "Dropout",
    "Embedding",
    "Flatten",
    "Gather",
    "GlobalAvgPool2d",
    "GroupNorm",
    "LayerNorm",
    "Linear",
    "Loss",
    "MaxPool2d",
    "Module",
    "MultiHeadAttention",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "Sequential",
    "Tanh",
    "TransformerBlock",
    "accuracy",
    "check_class_indices",
    "checkpoint",
    "cross_entropy",
    "current_seed",
    "init",
    "mean",
    "models",
    "mse",
    "perplexity",
    "seed",
    "top_k",
]
