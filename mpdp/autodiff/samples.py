"""Which samples of the global batch a forward pass works on, so that random masks do not depend on ranks.

Whoever cuts the batch (the trainer) opens the context; whoever draws random numbers (``nn.Dropout``) asks it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class SampleContext:
    """The share of one forward pass. **Local.**

    Args:
        seed: the run's seed.
        step: updates finished before this one.
        start: position of the share's first sample in the global batch.
        count: samples of the share; may be 0.
    """

    seed: int
    step: int
    start: int
    count: int
    _calls: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

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


@contextmanager
def samples(context: SampleContext) -> Iterator[SampleContext]:
    """Run one forward pass over the samples that ``context`` names. **Local.**

    Example:
        >>> with samples(SampleContext(seed=0, step=3, start=4, count=2)) as context:
        ...     current_samples() is context
        True
    """
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
