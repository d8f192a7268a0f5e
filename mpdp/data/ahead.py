"""Read ahead: run an iterator in a background thread, a bounded number of items ahead.

Knows nothing of data. The thread holds the source and the mailbox, never the :class:`ReadAhead` that
the caller holds: when the caller drops that, the mailbox is closed and the thread ends.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
_JOIN_SECONDS = 5.0  # a source that blocks longer is left behind: its thread is a daemon


class ReadAhead(Generic[Item]):
    """Iterate over ``source``, whose items a thread makes ahead of time.

    **Local.** An exception of the source, of any kind, is raised by the ``next`` that would have returned
    the item; after it the iterator is at its end. ``close()`` (also by ``with``, and when the last
    reference goes) lets the thread end after the item it works on.

    Args:
        source: made in this thread, run in the other.
        depth: items kept ahead; 0 runs the source in the caller's thread.
        name: of the thread.
    """

    def __init__(self, source: Iterator[Item], depth: int, name: str) -> None:
        self._source: Iterator[Item] | None = source if depth == 0 else None
        self._mailbox: _Mailbox | None = None
        if depth > 0:
            self._mailbox = _Mailbox(depth)
            self._thread = threading.Thread(
                target=_fill, args=(source, self._mailbox), name=name, daemon=True
            )
            self._thread.start()

    def __iter__(self) -> ReadAhead[Item]:
        return self

    def __next__(self) -> Item:
        if self._mailbox is None:
            if self._source is None:
                raise StopIteration
            return next(self._source)
        item, error = self._mailbox.get()
        if error is not None:
            self.close()
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: a cycle would keep the iterator alive
        return item

    def close(self) -> None:
        """Let the thread end, and wait for it (up to 5 s where the source blocks). **Local.**"""
        if self._mailbox is None:
            self._source = None
            return
        self._mailbox.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def __enter__(self) -> ReadAhead[Item]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        mailbox = getattr(self, "_mailbox", None)
        if mailbox is not None:
            # at the interpreter's end threading may be half gone; the thread is a daemon anyway
            with contextlib.suppress(Exception):
                mailbox.close()


class _Mailbox:
    """A bounded queue whose both ends return at once after ``close``."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[Any] = deque()
        self._closed = False
        # re-entrant: the collector may run __del__, and so close(), inside any of these methods
        self._changed = threading.Condition(threading.RLock())

    def put(self, item: Any, error: BaseException | None = None) -> bool:
        """Store an item once there is room (an error at once); return False if closed."""
        with self._changed:
            while len(self._items) >= self._depth and not self._closed and error is None:
                self._changed.wait()
            if not self._closed:
                self._items.append((item, error))
                self._changed.notify_all()
            return not self._closed

    def get(self) -> tuple[Any, BaseException | None]:
        """Return the next item, or the error that ended the source; StopIteration once closed."""
        with self._changed:
            while not self._items and not self._closed:
                self._changed.wait()
            if not self._items:
                return None, StopIteration()
            self._changed.notify_all()
            return self._items.popleft()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


def _fill(source: Iterator[Any], mailbox: _Mailbox) -> None:
    try:
        for item in source:
            if not mailbox.put(item):
                return
            del item  # while waiting for the next one, the thread keeps none alive
    except BaseException as error:
        mailbox.put(None, error)
    else:
        mailbox.put(None, StopIteration())
