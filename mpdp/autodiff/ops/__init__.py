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
from .attention import attention, self_attention
from .channels import batch_norm, group_norm, scale_channels
from .elementwise import astype, dropout, exp, gelu, log, relu, sigmoid, sqrt, tanh
from .indices import embedding, token_embedding
from .losses import cross_entropy, mean_of_sum, squared_error
from .normalisation import add_layer_norm, layer_norm, log_softmax, rms_norm, softmax
from .products import linear, matmul
from .reductions import max, mean, sum
from .shapes import concatenate, getitem, reshape, stack, transpose
from .transfer import to
from .windows import avg_pool2d, conv2d, global_avg_pool2d, max_pool2d

__all__ = [
    "absolute",
    "add",
    "add_layer_norm",
    "astype",
    "attention",
    "avg_pool2d",
    "batch_norm",
    "concatenate",
    "conv2d",
    "cross_entropy",
    "divide",
    "dropout",
    "embedding",
    "exp",
    "gelu",
    "getitem",
    "global_avg_pool2d",
    "group_norm",
    "layer_norm",
    "linear",
    "log",
    "log_softmax",
    "matmul",
    "max",
    "max_pool2d",
    "maximum",
    "mean",
    "mean_of_sum",
    "minimum",
    "multiply",
    "negative",
    "power",
    "relu",
    "reshape",
    "rms_norm",
    "scale_channels",
    "self_attention",
    "sigmoid",
    "softmax",
    "sqrt",
    "squared_error",
    "stack",
    "subtract",
    "sum",
    "tanh",
    "to",
    "token_embedding",
    "transpose",
    "where",
]
