"""Arrivals: the weights that the owners of slices have begun to give away, until they are read.

With ``placement="sharded"`` an update ends with an all-gather of each chunk. Where the transport carries by itself what
was started, the next forward pass may begin meanwhile: whoever reads a parameter waits for the chunks that hold it, and
for no other. The last chunk is started first: it holds the first layers. Only ``fit`` lets an update end so, since a
program may have kept an array of the weights; read ``data_parallel`` for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..comm.base import Request


class Arrivals:
    """What is under way to this rank. **Local.**

    Args:
        requests: one a chunk, in the order of chunks.
        chunks_of: parameter to the half-open range of chunks that hold it; one that is not there is not under way.
        over: called once all chunks are here.

    Attributes:
        waited_seconds: time that the calling thread has waited here.
        followed: graphs wait for the requests themselves.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        chunks_of: Mapping[Any, tuple[int, int]],
        over: Callable[[Arrivals], None],
    ) -> None:
        self.followed = False
        self._requests: list[Request | None] = list(requests)
        self._left = len(self._requests)
        self._chunks_of, self._over = chunks_of, over
        self.waited_seconds = 0.0

    @property
    def left(self) -> int:
        """Chunks that nobody has waited for."""
        return self._left

    def need(self, parameter: Any) -> None:
        """Wait for what a parameter lies in."""
        first, last = self._chunks_of.get(parameter, (0, 0))
        self._wait(first, last)

    def all(self) -> None:
        """Wait for everything."""
        self._wait(0, len(self._requests))

    def _wait(self, first: int, last: int) -> None:
        start = None
        for chunk in range(last - 1, first - 1, -1):  # as they were started
            request = self._requests[chunk]
            if request is not None:
                start = time.perf_counter() if start is None else start
                request.wait()
                self._requests[chunk] = None
                self._left -= 1
        if start is not None:
            self.waited_seconds += time.perf_counter() - start
            if self._left == 0:
                self._over(self)
