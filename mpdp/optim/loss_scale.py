"""Loss scale: the factor that keeps float16 gradients in range, found while training.

It is host state, equal on every rank: what changes it is whether the *reduced* gradient is finite, and that has the
same bits on all of them. It knows no gradients and no ranks.
"""

from __future__ import annotations

import math
from typing import Any


class LossScale:
    """Scale the loss so that float16 gradients neither vanish nor overflow.

    **Local.** After each update with scale s::

        a gradient that is not finite:            s = max(s * backoff, smallest), and the update is skipped
        ``interval`` finite updates in a row:     s = min(s * growth, largest)

    Powers of two cost no rounding.

    Args:
        initial: the first scale.
        growth: factor above 1.
        backoff: factor in (0, 1).
        interval: finite updates in a row before the scale grows.
        smallest: the scale never falls below it. A gradient that is not finite at this scale is an error: it is not
            the scale's fault.
        largest: the scale never grows above it.

    Attributes:
        value: the scale of the next update.
        skipped: updates that were skipped so far.

    Raises:
        ValueError: a number out of range.

    Example:
        >>> scale = LossScale(initial=8.0, interval=2)
        >>> [scale.update(finite) or scale.value for finite in (True, True, False, True)]
        [8.0, 16.0, 8.0, 8.0]

    Source: Micikevicius et al., "Mixed precision training" (ICLR 2018), section 3.2; the schedule and the default
    values are PyTorch's.
    """

    def __init__(
        self,
        initial: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        smallest: float = 1.0,
        largest: float = 2.0**24,
    ) -> None:
        for name, number, low, high in (
            ("smallest", smallest, 0.0, math.inf),
            ("growth", growth, 1.0, math.inf),
            ("backoff", backoff, 0.0, 1.0),
        ):
            if not low < number < high:
                raise ValueError(
                    f"{name}: expected a number between {low:g} and {high:g}, got {number}; leave it out"
                )
        if not smallest <= initial <= largest < math.inf:
            raise ValueError(
                f"initial: expected a scale in smallest..largest = {smallest:g}..{largest:g}, got {initial}; "
                "leave it out"
            )
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(
                f"interval: expected an integer of 1 or more, got {interval!r}; it counts updates"
            )
        self.value, self.interval = float(initial), interval
        self.growth, self.backoff = float(growth), float(backoff)
        self.smallest, self.largest = float(smallest), float(largest)
        self.skipped = 0
        self._finite = 0  # updates in a row

    @property
    def at_bottom(self) -> bool:
        """Whether the scale can fall no further."""
        return self.value <= self.smallest

    def update(self, finite: bool) -> None:
        """Go on to the next update's scale."""
        if not finite:
            self.skipped += 1
            self._finite = 0
            self.value = max(self.value * self.backoff, self.smallest)
            return
        self._finite += 1
        if self._finite == self.interval:
            self._finite = 0
            self.value = min(self.value * self.growth, self.largest)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds, for JSON."""
        return {"value": self.value, "finite": self._finite, "skipped": self.skipped}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what :meth:`state` returned."""
        self.value, self._finite, self.skipped = float(state["value"]), state["finite"], state["skipped"]

    def describe(self) -> dict[str, Any]:
        """Return the settings, for ranks to compare and files to hold."""
        names = ("growth", "backoff", "interval", "smallest", "largest")
        return {"class": type(self).__name__} | {name: getattr(self, name) for name in names}
