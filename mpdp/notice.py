"""Notice: SIGTERM and SIGUSR1 as a request to end in order, while somebody listens.

Owns the handlers of these two signals and the watch over whether they are obeyed. What a training does about them is
``training/preemption``. Knows no ranks and imports nothing of mpdp; :mod:`mpdp.guard` holds the one of this process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_HEARD, _OBEYED = b"!", b"."  # what the watch is told


class Notice:
    """Whether a signal has asked this process to end.

    It has no lock: the collector may silence a listener inside any of these methods, in any thread, even in one that is
    being started here and waited for. Each change of what threads share is one operation, and handlers are put in and
    out by the main thread alone, one call at a time.

    Args:
        changed: told whether signals are taken from now on.
        expired: called with the signal, in a thread, when it was not obeyed in time; is to end the process.

    Attributes:
        number: the first signal that came while somebody listened, or None.
    """

    def __init__(
        self,
        changed: Callable[[bool], None] = lambda taken: None,
        expired: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.number: int | None = None
        self._changed, self._expired = changed, expired
        self._listeners: set[int] = set()
        self._numbers = itertools.count()
        self._patience = 0.0
        self._taken: dict[int, Any] = {}  # signal -> what to put back
        self._pid = 0  # of the process whose handlers these are
        self._wake = -1  # a pipe to the watch
        self._obeyed = self._anew = False  # whether they were, and whether somebody listens since
        self._syncing = 0  # the process that is in sync()

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self.number is not None

    def listen(self, patience: float) -> int:
        """Take the signals until :meth:`silence`, instead of dying of them. **Local.**

        A signal that the program has a handler for, or ignores, stays as it is. Handlers belong to the main thread:
        called in another one, this waits for :meth:`sync` there.

        Args:
            patience: seconds from a signal until the process ends although nobody has obeyed.

        Returns:
            what :meth:`silence` is to be given.
        """
        number = next(self._numbers)
        self._patience = patience
        self._listeners.add(number)
        self._anew = True
        try:
            self.sync()
        except BaseException:
            self._listeners.discard(number)  # nobody could silence it
            raise
        return number

    def silence(self, listener: int) -> None:
        """End what :meth:`listen` has begun; a signal that came too late to be obeyed comes again. **Local.**

        Waits for nothing. In another thread than the main one handlers stay until :meth:`sync` there, or a signal.
        """
        self._listeners.discard(listener)
        self.sync()

    def dismiss(self) -> None:
        """End what every :meth:`listen` has begun, at the end of the process. **Local.**

        Python resets handlers of its own before the process is gone, and MPICH's mpirun may send SIGUSR1 until then.
        """
        self._listeners.clear()
        self.number = None
        self.sync()

    def obeyed(self) -> None:
        """Say that the program is about to end as asked; signals change nothing from now on. **Local.**"""
        self._obeyed, self._anew = True, False
        self._tell(_OBEYED)
        self.number = None
        self.sync()

    def sync(self) -> None:
        """Put handlers in or out as listeners want it; does nothing outside of the main thread. **Local.**"""
        pid = os.getpid()
        if threading.get_ident() != threading.main_thread().ident or self._syncing == pid:
            return
        while True:
            self._syncing = pid
            try:
                self._put()
            finally:
                self._syncing = 0
            # What called sync() meanwhile, the collector or a handler, was turned away.
            if bool(self._listeners) == (self._pid == pid):
                return

    def _put(self) -> None:
        pid = os.getpid()
        if self._pid == pid and (not self._listeners or (self._obeyed and self._anew)):
            self._give_back()
        if self._listeners and self._pid != pid:
            self._take()
        elif self._pid == pid and self._obeyed:
            for number in self._taken:
                signal.signal(number, signal.SIG_IGN)

    def _take(self) -> None:
        ours = [number for number in self._taken if signal.getsignal(number) == signal.SIG_IGN]
        read, wake = os.pipe()
        os.set_blocking(wake, False)
        watch = threading.Thread(
            target=self._watch, args=(read, self._patience), name="mpdp-notice", daemon=True
        )
        try:
            watch.start()
        except BaseException:
            os.close(wake)
            if watch.ident is None:
                os.close(read)
            raise
        self.number = None
        self._obeyed = self._anew = False
        self._taken, self._wake, self._pid = {}, wake, os.getpid()
        try:
            for number in SIGNALS:
                if number in ours or signal.getsignal(number) == signal.SIG_DFL:
                    # MPICH's mpirun tells its ranks of a failed one by SIGUSR1, for which MPI_Init has set a handler in
                    # C. Python cannot put that back, and resets handlers of its own before the process is gone.
                    kept = number in ours or _caught_in_c(number)
                    self._taken[number] = signal.SIG_IGN if kept else signal.SIG_DFL
                    signal.signal(number, self._heard)
            self._changed(True)
        except BaseException:  # an interrupt
            self._give_back()
            raise

    def _give_back(self) -> None:
        self._changed(False)
        for number, handler in self._taken.items():
            if signal.getsignal(number) == self._heard:
                signal.signal(number, handler)
        late, self.number = self.number, None
        self._tell(_OBEYED)
        self._pid = 0  # first, so that no other thread tells what the number means next
        os.close(self._wake)
        if late is not None and not self._obeyed:
            os.kill(os.getpid(), late)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child, whose pool may be ended by this very signal
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.number is None and not self._obeyed:
            self.number = number
            self._tell(_HEARD)
        if not self._listeners:  # the last one was silenced in another thread
            self.sync()

    def _tell(self, what: bytes) -> None:
        """Tell the watch, which a child that was forked may keep from seeing the end of the pipe."""
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):
                os.write(self._wake, what)

    def _watch(self, read: int, patience: float) -> None:
        try:
            asked = os.read(read, 1) == _HEARD
            poll = select.poll()
            poll.register(read, select.POLLIN)
            late = asked and not poll.poll(1000 * patience)
        finally:
            os.close(read)
        if late:
            self._expired(self.number or signal.SIGTERM)


def _caught_in_c(number: int) -> bool:
    """Return whether the process has a handler for a signal; asked where Python has none. Linux."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
