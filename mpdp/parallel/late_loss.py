"""LateLoss: the loss of an update that may still be under way; it is a number as soon as somebody looks at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LateLoss:
    """A number that is known later. ``float()``, comparisons and arithmetic wait for it. **Local.**

    Args:
        settle: called with ``update`` when the number is wanted; it leads to :meth:`settle` of this object.
        update: which update it belongs to.

    Example:
        >>> loss = LateLoss(lambda update: loss.settle(2.5), 0)
        >>> f"{loss:.1f}", loss > 2, loss - 1
        ('2.5', True, 1.5)
    """

    __slots__ = ("_settle", "_update", "_value")

    def __init__(self, settle: Callable[[int], None], update: int) -> None:
        self._settle, self._update = settle, update
        self._value: float | None = None

    def settle(self, value: float) -> None:
        """Say what the number is."""
        self._value = value

    def __float__(self) -> float:
        if self._value is None:
            self._settle(self._update)
        if self._value is None:
            return float("nan")  # its update was broken off
        return self._value

    def __repr__(self) -> str:
        return repr(float(self))

    def __format__(self, form: str) -> str:
        return format(float(self), form)

    def __bool__(self) -> bool:
        return bool(float(self))

    def __hash__(self) -> int:
        return hash(float(self))

    def __eq__(self, other: Any) -> Any:
        return float(self) == other

    def __lt__(self, other: Any) -> Any:
        return float(self) < other

    def __le__(self, other: Any) -> Any:
        return float(self) <= other

    def __gt__(self, other: Any) -> Any:
        return float(self) > other

    def __ge__(self, other: Any) -> Any:
        return float(self) >= other

    def __add__(self, other: Any) -> Any:
        return float(self) + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return float(self) - other

    def __rsub__(self, other: Any) -> Any:
        return other - float(self)

    def __mul__(self, other: Any) -> Any:
        return float(self) * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return float(self) / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / float(self)

    def __neg__(self) -> float:
        return -float(self)

    def __abs__(self) -> float:
        return abs(float(self))

    def __round__(self, digits: int | None = None) -> Any:
        return round(float(self), digits)
