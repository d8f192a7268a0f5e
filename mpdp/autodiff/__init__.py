"""Reverse-mode differentiation over NumPy and CuPy arrays.

``Tensor`` holds an array, ``ops`` what can be done with it, ``Tape`` runs backward. Parameters bound to an
arena get their gradients written straight into its views, and the tape tells when each is final. Read on in
``operation`` (a call), ``tape`` (backward), ``ops`` (the rules).

This package knows nothing of modules, optimizers or ranks.
"""

from . import ops
from .check import check
from .operation import Operation, register
from .parameter import Binding, Buffer, Parameter
from .recompute import checkpoint, recomputing
from .recording import no_grad
from .samples import SampleContext, current_samples, samples
from .tape import Tape
from .tensor import Tensor
from .wants import WANTED, Target, deliver

__all__ = [
    "WANTED",
    "Binding",
    "Buffer",
    "Operation",
    "Parameter",
    "SampleContext",
    "Tape",
    "Target",
    "Tensor",
    "check",
    "checkpoint",
    "current_samples",
    "deliver",
    "no_grad",
    "ops",
    "recomputing",
    "register",
    "samples",
]
