"""Arrivals: the weights that the owners of slices have begun to give away, until they are read.

With ``placement="sharded"`` an update ends with an all-gather of each chunk. Where the transport carries by itself what
was started, the next forward pass may begin meanwhile: whoever reads a parameter waits for the chunks that hold it, and
for no other. The last chunk is started first: it holds the first layers. Only ``fit`` lets an update end so, since a
program may have kept an array of the weights; read ``training/loop.py`` for that, and ``replica`` for who begins them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..comm.base import Request


class Arrivals:
    """What is under way to this rank.

    **Local.** Belongs to the thread that makes it, which is the one that computes. Another one may read weights, and
    waits for itself alone: what its stream of a GPU has waited for, forward's has not.

    Args:
        requests: one a chunk, in the order of chunks.
        chunks_of: parameter to the half-open range of chunks that hold it; one that is not there is not under way.
        over: called once all chunks are here.

    Attributes:
        waited_seconds: time that its thread has waited here.
        followed: the next graph waits for the requests itself.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        chunks_of: Mapping[Any, tuple[int, int]],
        over: Callable[[Arrivals], None],
    ) -> None:
        self.waited_seconds = 0.0
        self.followed = False
        self._requests: list[Request | None] = list(requests)
        self._chunks_of, self._over = chunks_of, over
        self._owner = threading.get_ident()

    @property
    def left(self) -> int:
        """Chunks that its thread has not waited for."""
        return sum(request is not None for request in self._requests)

    def need(self, parameter: Any) -> None:
        """Wait for what a parameter lies in."""
        first, last = self._chunks_of.get(parameter, (0, 0))
        self._wait(first, last)

    def all(self) -> None:
        """Wait for everything."""
        self._wait(0, len(self._requests))

    def _wait(self, first: int, last: int) -> None:
        start, own = None, threading.get_ident() == self._owner
        for chunk in range(last - 1, first - 1, -1):  # as they were started
            request = self._requests[chunk]
            if request is not None:
                start = time.perf_counter() if start is None else start
                request.wait()
                if own:
                    self._requests[chunk] = None
        if own and start is not None:
            self.waited_seconds += time.perf_counter() - start
            if not self.left:
                self._over(self)
