"""Groups of parameters by name pattern, and the checks of arguments that all rules share.

Read next: ``plan``, which turns groups into ranges.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np

_F = TypeVar("_F", bound=Callable[..., None])


@dataclass(frozen=True)
class Group:
    """Give parameters whose name fits a pattern their own learning rate or decay.

    **Local.** The first group that fits a name decides; parameters that fit none take the
    optimizer's values.

    Args:
        pattern: as in a shell: ``*`` any text, ``?`` one character, ``[ab]`` one of these; upper
            and lower case differ.
        lr_factor: factor on the optimizer's learning rate, so that schedules reach every group.
        weight_decay: in place of the optimizer's; None keeps that.

    Example:
        >>> Group("*.bias", weight_decay=0.0)
        Group(pattern='*.bias', lr_factor=1.0, weight_decay=0.0)
    """

    pattern: str
    lr_factor: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise TypeError(
                f"pattern: expected a string such as '*.bias', got {self.pattern!r}; put names in patterns"
            )
        non_negative("lr_factor", self.lr_factor)
        if self.weight_decay is not None:
            non_negative("weight_decay", self.weight_decay)


def takes_no_parameters(constructor: _F) -> _F:
    """Have a rule's constructor say how it is written here where it is called as in PyTorch. **Local.**"""

    @functools.wraps(constructor)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        given = args[0] if args else kwargs.get("params")
        many = (
            isinstance(given, Iterable)
            and not isinstance(given, (str, bytes))
            and not hasattr(given, "dtype")
        )
        if many or hasattr(given, "parameters") or hasattr(given, "requires_grad"):
            name = type(self).__name__
            rate = kwargs.get("lr", args[1] if len(args) > 1 else None)
            raise TypeError(
                f"{name}: expected no parameters (the trainer gives it those of the model), got "
                f"{type(given).__name__}; write {name}(lr={rate if isinstance(rate, float) else 0.001}) and pass it to "
                "mpdp.Trainer(model, loss, optimizer)"
            )
        constructor(self, *args, **kwargs)

    return cast(_F, checked)


def non_negative(name: str, value: Any) -> float:
    """Return a hyper-parameter as a float of 0 or more. **Local.**"""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise TypeError(f"{name}: expected a number of 0 or more, got {value!r}; pass a float")
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{name}: expected a finite number of 0 or more, got {value}; correct it")
    return float(value)


def decays_in(name: str, betas: Any) -> tuple[float, float]:
    """Return the decays of two moments as floats in [0, 1). **Local.**"""
    if len(betas) != 2:
        raise ValueError(f"{name}: expected two numbers, got {betas}; as in (0.9, 0.999)")
    found = non_negative(name, betas[0]), non_negative(name, betas[1])
    if max(found) >= 1.0:
        raise ValueError(f"{name}: expected two numbers in [0, 1), got {betas}; as in (0.9, 0.999)")
    return found
