"""PlanBook: which of several ways to compute the same thing was found fastest, kept under a key.

Libraries offer several plans for one product, convolution or attention; they differ in speed and in the last bits.
What makes plans asks the book first. The book knows strings only: neither what they mean nor who holds the same book
on other ranks; ``parallel.shared_plans`` does that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping


class PlanBook:
    """Plans by key, and the measurements that would find those that are missing. **Local.**

    With ``timed`` False (the default) the book is empty unless :meth:`load` filled it, and a maker takes what its
    library suggests. With ``timed`` True a maker that finds nothing leaves a function that measures, and takes what the
    library suggests until then; :meth:`measure` runs the functions between two steps. So nothing is timed inside of a
    step, and one rank can measure for all.

    A key says all that a plan depends on: kind, library and version, GPU, shapes, strides, dtypes, options. A plan is
    whatever its maker can build it from again, as text.

    Attributes:
        timed: whether missing plans are to be measured.
        on_change: functions of no argument that makers add: called when plans have changed, to forget those they built.

    Example:
        >>> book = PlanBook(timed=True)
        >>> book.find("product 4x4", lambda: "7")  # nothing yet: take the library's suggestion
        >>> book.measure()
        1
        >>> book.find("product 4x4")
        '7'
    """

    def __init__(self, timed: bool = False) -> None:
        self.timed = timed
        self.on_change: list[Callable[[], None]] = []
        self._plans: dict[str, str] = {}
        self._missing: dict[str, Callable[[], str | None]] = {}
        self._lock = threading.Lock()  # ranks that are threads share a GPU's book

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def missing(self) -> int:
        """How many plans :meth:`measure` would look for."""
        return len(self._missing)

    def find(self, key: str, measure: Callable[[], str | None] | None = None) -> str | None:
        """Return the plan of a key, None where there is none; ``measure`` is kept for later where plans are timed.

        Args:
            key: see the class.
            measure: makes its own arrays, times each plan on the current stream and returns the fastest, or None
                where there is no choice. It may wait for the device.
        """
        plan = self._plans.get(key)
        if plan is None and measure is not None and self.timed:
            with self._lock:
                self._missing.setdefault(key, measure)
        return plan

    def measure(self) -> int:
        """Measure what is missing and return how many plans were found; waits for the device.

        Call it between two steps, and before a step is captured: a captured step keeps the plans that it has.
        """
        with self._lock:
            missing, self._missing = self._missing, {}
        found = {}
        for key, run in missing.items():
            plan = run()
            if plan is not None:
                found[key] = plan
        self.load(found)
        return len(found)

    def forget_missing(self) -> None:
        """Drop what is to be measured: another rank has done it."""
        with self._lock:
            self._missing.clear()

    def plans(self) -> dict[str, str]:
        """Return a copy of all plans, by key in sorted order."""
        return dict(sorted(self._plans.items()))

    def load(self, plans: Mapping[str, str]) -> None:
        """Add plans to the book; of a key that it has, the new one counts."""
        changed = any(self._plans.get(key) != plan for key, plan in plans.items())
        if changed:
            with self._lock:
                self._plans.update(plans)
            for forget in self.on_change:
                forget()
