"""Links: short messages between two processes that may end at any moment.

Owns sockets (abstract Unix sockets inside a Linux node, TCP elsewhere), the framing of messages and the
printed form of an address. What the messages mean is known by :mod:`mpdp.comm.meeting` and
:mod:`mpdp.comm.liveness`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from typing import Any

from ..errors import CommunicationError
from ..processes import node_name

ADDRESS_BYTES = 1024
HOST_LOST_MS = 30_000  # a host that acknowledges nothing for so long is lost: it closes no connection
_MOST = 1 << 16


class Link:
    """Carry messages (JSON objects, one a line) over a connected socket without ever blocking.

    **Local.** Any thread may send. One thread receives.

    Attributes:
        closed: the peer has closed the connection, or it broke.
        heard: ``time.monotonic()`` of the last bytes from the peer, in seconds.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != getattr(socket, "AF_UNIX", None):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, HOST_LOST_MS)
        self.sock = sock
        self.closed = False
        self.heard = time.monotonic()
        self._in = b""
        self._out = b""
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message; what the peer does not take now is kept and sent with the next one. **Local.**"""
        line = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        with self._lock:
            if kind != "beat" or not self._out:  # one more says nothing new to a peer that reads nothing
                self._out += line
            try:
                while self._out:
                    self._out = self._out[self.sock.send(self._out) :]
            except BlockingIOError:
                pass
            except OSError:
                self._out = b""  # the end of the peer shows when it is read from

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived; sets ``closed`` at the end of the connection. **Local.**"""
        try:
            while data := self.sock.recv(_MOST):
                self._in += data
                self.heard = time.monotonic()
                if len(self._in) > 16 * _MOST:
                    raise OSError("line too long")
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        *lines, self._in = self._in.split(b"\n")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict) or "kind" not in message:
                self.closed = True  # not one of us
                break
            messages.append(message)
        return messages

    def wait(self, kind: str, deadline: float) -> dict[str, Any] | None:
        """Wait for the first message of the connection; None at its end or the deadline. **Local.**"""
        while not self.closed and time.monotonic() < deadline:
            for message in self.receive():
                return message if message["kind"] == kind else None
            time.sleep(0.001)
        return None

    def close(self) -> None:
        """Close, also for a forked child that still holds a copy of the socket. **Local.**"""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def same_user(sock: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket belongs to this user. **Local.**"""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid == os.getuid()


class Listener:
    """Wait for connections, and name the address that leads here.

    **Local.** A connection has to show the key of the address, so a stranger's is dropped.

    Args:
        across_nodes: whether processes of other hosts are to reach it; otherwise no port is opened on Linux.
    """

    def __init__(self, across_nodes: bool) -> None:
        self._key = secrets.token_hex(16)
        self._sockets: list[socket.socket] = []
        self._address: dict[str, Any] = {"key": self._key, "node": node_name()}
        if sys.platform == "linux":
            name = f"mpdp-{os.getuid()}-{secrets.token_hex(8)}"
            self._open(socket.AF_UNIX, "\0" + name)
            self._address["unix"] = name
        if across_nodes or sys.platform != "linux":
            sock = self._open(socket.AF_INET, ("" if across_nodes else "127.0.0.1", 0))
            hosts = _own_hosts() if across_nodes else ["127.0.0.1"]
            self._address["tcp"] = [[host, sock.getsockname()[1]] for host in hosts]

    def _open(self, family: int, address: Any) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.bind(address)
        sock.listen(8)
        sock.setblocking(False)
        self._sockets.append(sock)
        return sock

    @property
    def address(self) -> bytes:
        """The address, padded with spaces to ADDRESS_BYTES, so that MPI carries it as a fixed buffer."""
        return json.dumps(self._address).encode().ljust(ADDRESS_BYTES)

    def accept(self, deadline: float) -> tuple[Link, dict[str, Any]] | None:
        """Return the first connection that shows the key, and its hello; None at the deadline. **Local.**"""
        while time.monotonic() < deadline:
            for listening in self._sockets:
                try:
                    sock, _ = listening.accept()
                except OSError:
                    continue
                link = Link(sock)
                hello = link.wait("hello", min(deadline, time.monotonic() + 5))
                if hello is not None and secrets.compare_digest(str(hello.get("key")), self._key):
                    return link, hello
                link.close()
            time.sleep(0.001)
        return None

    def close(self) -> None:
        """Stop listening. **Local.**"""
        for sock in self._sockets:
            sock.close()
        self._sockets = []


def connect(address: bytes, deadline: float, **hello: Any) -> Link:
    """Connect to a :class:`Listener`'s address and introduce this process. **Local.**

    Raises:
        CommunicationError: nobody answers there before ``deadline`` (``time.monotonic()``, in seconds).
    """
    where = json.loads(address)
    ways: list[tuple[int, Any]] = []
    if "unix" in where and where["node"] == node_name():
        ways.append((socket.AF_UNIX, "\0" + where["unix"]))
    ways += [(socket.AF_INET, tuple(way)) for way in where.get("tcp", ())]
    problem: OSError | None = None
    for family, way in ways:
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(max(0.1, min(5.0, deadline - time.monotonic())))
        try:
            sock.connect(way)
        except OSError as error:
            problem = error
            sock.close()
            continue
        link = Link(sock)
        link.send("hello", key=where["key"], **hello)
        return link
    raise CommunicationError(
        f"ring: expected to reach a rank on one of {[way for _, way in ways]}, got {problem}; "
        "open TCP between the nodes, or check their host names"
    ) from problem


def _own_hosts() -> list[str]:
    """Return this host's addresses, the one of its outward route first."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing: it asks the routing table
            found.append(probe.getsockname()[0])
        except OSError:
            pass
    with contextlib.suppress(OSError):
        found += [
            str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        ]
    outward = [host for host in dict.fromkeys(found) if not host.startswith("127.")]
    return (outward or ["127.0.0.1"])[:8]
