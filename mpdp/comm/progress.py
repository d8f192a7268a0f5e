"""A thread that does blocking calls in order, for a lane whose callers must not wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from .base import Request


class _Job(Request):
    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._error = error
        finally:
            self._finished.set()

    def wait(self) -> None:
        self._finished.wait()
        if self._error is not None:
            raise self._error


class ProgressThread:
    """Run submitted calls one after another in one daemon thread.

    The GIL is free while MPI waits, so backward goes on meanwhile; measured overlap is complete where the host
    is idle (GPU ranks) and negative where ranks fill the cores.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int:
        """The thread's identifier, as ``threading.get_ident`` returns inside it."""
        assert self._thread.ident is not None
        return self._thread.ident

    def submit(self, call: Callable[[], None]) -> Request:
        """Queue a call; ``wait()`` of the result raises what it raised. **Local.**"""
        job = _Job(call)
        self._queue.put(job)
        return job

    def close(self) -> None:
        """Finish what is queued and end the thread. **Local.**"""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job.run()
