"""What kinds of work a step's time goes to.

On a GPU each kernel's time is known by its name (``cupti`` for ours, torch's profiler for torch), also inside a graph;
the rest of a step is gaps. On the CPU the calls of the kernels' interface are timed in an eager step, and the rest is
Python, plain array calls and communication.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

# The first that is found in a kernel's name decides.
_KERNELS = (
    ("communication", r"nccl|^collective|send_mail|receive_mail"),
    ("fused by torch", r"^triton_"),
    ("optimizer", r"multi_tensor|adam|sgd|span_|^total|hash_|all_finite|update"),
    ("attention", r"attention|flash|fmha|sdpa|mha|dot_do_o|convert_dq"),
    ("convolution", r"conv|fprop|dgrad|wgrad|nchwtonhwc|nhwctonchw"),
    ("normalisation", r"norm|^bn_|batch_?n|column_sums|moments|channel"),
    ("loss", r"softmax|cross_entropy|nll_loss|squared_error|classes_loss|check_and_loss"),
    ("pooling", r"pool"),
    ("embedding", r"embedding|gather|segment|piece_|token_sums|first_axis|merge_runs|index|sort|radix"),
    ("products", r"gemm|gemv|nvjet|cublas|cutlass|splitk|matmul"),
    ("copies", r"memcpy|memset|copy|catarray|fill"),
)
_CALLS = (
    ("products", r"gemm|linear|matmul"),
    ("convolution", r"conv"),
    ("attention", r"attention"),
    ("normalisation", r".*norm|channel|batch"),
    ("pooling", r".*pool"),
    ("loss", r"cross_entropy|squared_error|softmax|log_softmax|check_class"),
    ("embedding", r"embedding|scatter"),
    ("optimizer", r"sgd|adam|sum_of_squares|all_finite|column$"),
)
_NOT_TIMED = re.compile(r"_|active|is_current|begin_step|pending_error|from_host|to_numpy|xp$|device")


def class_of_kernel(name: str) -> str:
    """Return what kind of work a GPU kernel does, by its name. **Local.**

    Example:
        >>> [class_of_kernel(n) for n in ("nvjet_tst_128x256", "layer_norm_backward", "relu", "triton_poi_fused_0")]
        ['products', 'normalisation', 'elementwise', 'fused by torch']
    """
    name = name.lower()
    return next((kind for kind, pattern in _KERNELS if re.search(pattern, name)), "elementwise")


def class_of_call(name: str) -> str:
    """Return what kind of work a method of the kernels' interface does. **Local.**

    Example:
        >>> class_of_call("layer_norm_backward"), class_of_call("gelu"), class_of_call("max_pool2d")
        ('normalisation', 'elementwise', 'pooling')
    """
    return next((kind for kind, pattern in _CALLS if re.match(pattern, name)), "elementwise")


def by_class(
    seconds: Mapping[str, float], class_of: Callable[[str], str] = class_of_kernel
) -> dict[str, float]:
    """Return the sums over classes, largest first. **Local.**

    Example:
        >>> by_class({"gemm_a": 1.0, "relu": 0.5, "gemm_b": 2.0})
        {'products': 3.0, 'elementwise': 0.5}
    """
    sums: dict[str, float] = {}
    for name, value in seconds.items():
        kind = class_of(name)
        sums[kind] = sums.get(kind, 0.0) + value
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


class CallClock:
    """While entered, time the calls of an object's public methods; one inside another belongs to that. **Local.**

    Args:
        target: the kernels of the CPU.
        clock: seconds.

    Attributes:
        seconds: name of a method to the seconds spent in it.

    Example:
        >>> from mpdp.kernels.cpu import KERNELS
        >>> import numpy as np
        >>> with CallClock(KERNELS) as calls:
        ...     x = KERNELS.relu(np.ones(3))
        >>> list(calls.seconds)
        ['relu']
    """

    def __init__(self, target: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._target, self._clock = target, clock
        self._inside = False
        self._shadowed: list[str] = []

    def __enter__(self) -> CallClock:
        for name in dir(type(self._target)):
            if not _NOT_TIMED.match(name) and callable(getattr(type(self._target), name)):
                setattr(self._target, name, partial(self._timed, name, getattr(self._target, name)))
                self._shadowed.append(name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name in self._shadowed:
            delattr(self._target, name)
        self._shadowed.clear()

    def _timed(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self._inside:
            return call(*arguments, **options)
        self._inside = True
        start = self._clock()
        try:
            return call(*arguments, **options)
        finally:
            self._inside = False
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - start
