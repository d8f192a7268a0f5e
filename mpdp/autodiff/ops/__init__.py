"""The operations, one file a family, each forward rule beside its backward rule.

Every function here takes tensors, arrays and numbers, and returns a tensor.
"""

from .arithmetic import (
    absolute,
    add,
    divide,
    maximum,
    minimum,
    multiply,
    negative,
    power,
    subtract,
    where,
)
from .elementwise import astype, dropout, exp, gelu, log, relu, sigmoid, sqrt, tanh
from .indices import embedding
from .losses import cross_entropy, mean_of_sum, squared_error
from .normalisation import layer_norm, log_softmax, softmax
from .products import linear, matmul
from .reductions import max, mean, sum
from .shapes import concatenate, getitem, reshape, stack, transpose
from .transfer import to

__all__ = [
    "absolute",
    "add",
    "astype",
    "concatenate",
    "cross_entropy",
    "divide",
    "dropout",
    "embedding",
    "exp",
    "gelu",
    "getitem",
    "layer_norm",
    "linear",
    "log",
    "log_softmax",
    "matmul",
    "max",
    "maximum",
    "mean",
    "mean_of_sum",
    "minimum",
    "multiply",
    "negative",
    "power",
    "relu",
    "reshape",
    "sigmoid",
    "softmax",
    "sqrt",
    "squared_error",
    "stack",
    "subtract",
    "sum",
    "tanh",
    "to",
    "transpose",
    "where",
]
