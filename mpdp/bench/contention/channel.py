"""A channel to a process that this one starts: Python's own objects over a socket of this host."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from ...errors import CommunicationError

VARIABLE = "MPDP_CONTENTION"
_PATIENCE = 10.0  # seconds for a process to end


class Channel:
    """A process that connects back, by the address in its environment.

    **Local.**

    Args:
        words: program and arguments; it may start others, of which one connects.
        environ: its environment.
        name: by which errors call it.
        seconds: in which it has to connect, and to answer.

    Raises:
        CommunicationError: it cannot be started.
    """

    def __init__(
        self, words: Sequence[str], environ: Mapping[str, str], name: str, seconds: float = 60.0
    ) -> None:
        self.name, self._seconds = name, seconds
        self._folder = tempfile.mkdtemp(prefix="mpdp-contention-")
        self._connection: Connection | None = None
        self._server = socket.socket(socket.AF_UNIX)
        address, self._key = os.path.join(self._folder, "socket"), secrets.token_hex(16)
        self._server.bind(address)
        self._server.listen(1)
        self._log = open(os.path.join(self._folder, "output"), "w+b")  # noqa: SIM115  closed in close()
        try:
            self.process = subprocess.Popen(
                words,
                env={**environ, VARIABLE: f"{address} {self._key}"},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            raise CommunicationError(f"{name}: expected {words[0]} to start, got {error}") from error

    def connect(self) -> Any:
        """Wait for the process, and return the first thing it says."""
        self._server.settimeout(0.2)
        for _ in range(int(self._seconds / 0.2)):
            try:
                accepted, _ = self._server.accept()
            except TimeoutError:
                if self.process.poll() is not None:
                    raise self._error(f"its end with status {self.process.returncode}") from None
                continue
            accepted.setblocking(True)
            self._connection = Connection(accepted.detach())
            if self._receive() != self._key:
                raise self._error("another process")
            return self._receive()
        raise self._error(f"none within {self._seconds:g} s")

    def send(self, thing: Any) -> None:
        """Tell the process something."""
        assert self._connection is not None
        try:
            self._connection.send(thing)
        except OSError as error:
            raise self._error(str(error)) from error

    def receive(self) -> Any:
        """Return the next thing it says.

        Raises:
            CommunicationError: it has ended, is silent, or says that it failed.
        """
        thing = self._receive()
        if isinstance(thing, dict) and "error" in thing:
            raise self._error(thing["error"])
        return thing

    def _receive(self) -> Any:
        assert self._connection is not None
        try:
            if not self._connection.poll(self._seconds):
                raise self._error(f"none within {self._seconds:g} s")
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._error("its end") from error

    def _error(self, got: str) -> CommunicationError:
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip()[-2000:]
        return CommunicationError(
            f"{self.name}: expected an answer, got {got}" + (f"; it printed:\n{said}" if said else "")
        )

    def close(self) -> None:
        """End the process. **Local.**"""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(None)
            self._connection.close()
        self._server.close()
        try:
            self.process.wait(_PATIENCE if self._connection is not None else 0.1)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            try:
                self.process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def answer() -> Connection:
    """Return the connection to the process that has started this one. **Local.**"""
    address, key = os.environ.pop(VARIABLE).split()
    mine = socket.socket(socket.AF_UNIX)
    mine.connect(address)
    connection = Connection(mine.detach())
    connection.send(key)
    return connection
