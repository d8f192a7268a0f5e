"""Which samples of the global batch a forward pass works on, so that random masks do not depend on ranks.

Whoever cuts the batch (the trainer) opens the context; whoever draws random numbers (``nn.Dropout``) asks it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any


class SampleContext:
    """The share of one forward pass. **Local.**

    Args:
        seed: the run's seed.
        step: updates finished before this one.
        start: position of the share's first sample in the global batch; None where nobody found it out, and
            then reading it is an error.
        count: samples of the share; may be 0.
    """

    __slots__ = ("_calls", "_start", "count", "seed", "step")

    def __init__(self, seed: int, step: int, start: int | None, count: int) -> None:
        self.seed, self.step, self.count = seed, step, count
        self._start = start
        self._calls: dict[str, int] = {}

    @property
    def start(self) -> int:
        """Position of the share's first sample in the global batch.

        Raises:
            ValueError: no module of the model says that it draws random numbers by sample.
        """
        if self._start is None:
            raise ValueError(
                "samples: expected a module that draws random numbers to say so, got none that does; "
                "set draws_samples = True on its class"
            )
        return self._start

    def copy(self) -> SampleContext:
        """Return a context that goes on from where this one is, to run a part of forward a second time."""
        twin = SampleContext(self.seed, self.step, self._start, self.count)
        twin._calls = dict(self._calls)
        return twin

    def call(self, path: str) -> int:
        """Return how often ``call`` was asked for this module path before; one more each time."""
        calls = self._calls.get(path, 0)
        self._calls[path] = calls + 1
        return calls

    def elements(self, shape: tuple[int, ...]) -> int:
        """Return how many elements of an array of ``shape`` belong to one sample.

        The leading length is the share's count, or a multiple m of it where each sample has m rows.

        Raises:
            ValueError: a leading length that is no multiple of the count.
        """
        lead = shape[0] if shape else 0
        if not shape or (lead % self.count if self.count else lead):
            raise ValueError(
                f"samples: expected a leading length that is a multiple of the {self.count} samples of this "
                f"share, got shape {shape}; keep samples on the first axis where random numbers are drawn"
            )
        total = 1
        for length in shape:
            total *= length
        return total // self.count if self.count else 0


_current: ContextVar[SampleContext | None] = ContextVar("mpdp_samples", default=None)

current_samples = _current.get
"""Return the context of the forward pass that runs, or None outside of any."""


class samples:  # a class and no generator: it is entered in every forward pass
    """Run one forward pass over the samples that ``context`` names. **Local.**

    Example:
        >>> with samples(SampleContext(seed=0, step=3, start=4, count=2)) as context:
        ...     current_samples() is context
        True
    """

    __slots__ = ("_context", "_token")

    def __init__(self, context: SampleContext) -> None:
        self._context = context

    def __enter__(self) -> SampleContext:
        self._token = _current.set(self._context)
        return self._context

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


class Draws:
    """What a part of forward takes from elsewhere than its inputs: noted, then given again.

    So are the numbers that modules count their own calls by, outside of a sample context, and the statistics of a batch
    that several replicas share.

    **Local.** Entered while a part of forward runs for the first time, it notes them; :meth:`again` gives them back in
    order, so that the part computes the same.
    """

    __slots__ = ("_next", "_outer", "_token", "_values")

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._next: int | None = None  # the value that comes next, once they are given again
        self._outer: Draws | None = None
        self._token: Token[Draws | None] | None = None

    def again(self) -> Draws:
        """Return draws that give the same numbers from the start."""
        twin = Draws()
        twin._values, twin._next = self._values, 0
        return twin

    def take(self, count: Callable[[], Any]) -> Any:
        """Return the next value: a noted one, or a new one."""
        if self._next is not None:
            self._next += 1
            return self._values[self._next - 1]
        value = count() if self._outer is None else self._outer.take(count)
        self._values.append(value)
        return value

    def __enter__(self) -> Draws:
        self._outer = _draws.get()
        self._token = _draws.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _draws.reset(self._token)


_draws: ContextVar[Draws | None] = ContextVar("mpdp_draws", default=None)


def drawn(count: Callable[[], Any]) -> Any:
    """Return ``count()``, or what it was when this part of forward ran before. **Local.**"""
    noted = _draws.get()
    return count() if noted is None else noted.take(count)
