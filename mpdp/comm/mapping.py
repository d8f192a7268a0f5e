"""Mapping: memory that the ranks of one node share.

The first way is a ``memfd``: each rank makes an anonymous file of its own, and the others open it through
``/proc/PID/fd``. It needs no place in ``/dev/shm`` and no name, so nothing is left when a job is killed: the memory
goes with the last process that maps it. The second way, where the kernel or a container forbids this, is a shared
window of MPI.

A file of a megabyte or more lies in huge pages where the kernel can do that (Linux 6.1: it is asked for them by name,
since the system's default for shared memory is to give none). Sums of several buffers take a fifth less time then, and
the file is there ten times as fast. Source: madvise(2), ``MADV_COLLAPSE``.
Knows bytes and processes; what the memory is for is told by ``shared_memory``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import CommunicationError, on_all_ranks
from .mpi import MpiCommunicator

PAGE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20  # of x86-64, the only machine that shares memory here
_LEAST_HUGE = 1 << 20  # bytes; what the last huge page holds beyond the buffer is lost
_COLLAPSE = 25  # MADV_COLLAPSE, which Python does not name; neither these of mmap(2)
_NO_ACCESS, _FIXED, _NO_RESERVE = 0, 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value
_SHM = "/dev/shm"
_THP = "/sys/kernel/mm/transparent_hugepage/enabled"


class Mapped:
    """Shared memory of all ranks.

    Attributes:
        parts: each rank's memory as a uint8 array, mapped into this process, zeroed.
        way: ``"memfd"`` or ``"window"``.
        number: what rank 0 put into the exchange.
    """

    def __init__(self, parts: list[np.ndarray], way: str, number: int) -> None:
        self.parts, self.way, self.number = parts, way, number


def share(comm: MpiCommunicator, nbytes: int, number: int = 0) -> Mapped:
    """Map ``nbytes`` of every rank into every rank.

    **Collective.** Every rank asks for the same number of bytes.

    Args:
        comm: the ranks, all on one node.
        nbytes: of each rank.
        number: any number; all ranks get rank 0's.

    Raises:
        CommunicationError: on all ranks, when neither way works; the message says why.
    """
    size = max(_round_up(nbytes, PAGE), PAGE)
    reasons = []
    for way, make in (("memfd", _memfd), ("shared window", _window)):
        try:
            return make(comm, size, number)
        except _Refused as refused:
            reasons.append(f"{way}: {refused}")
    raise on_all_ranks(
        CommunicationError(
            f"shared memory: expected {size} bytes of each rank mapped into all others, got {'; '.join(reasons)}"
        )
    )


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class _Refused(Exception):
    """A way does not work; raised on all ranks."""


def _gather(comm: MpiCommunicator, call: Callable[[], Any]) -> list[Any]:
    """Return every rank's ``call()``, or refuse on all ranks if it fails on any. **Collective.**"""
    try:
        mine = [call(), None]
    except (OSError, ValueError) as error:
        mine = [None, f"{error} (on rank {comm.rank})"]
    gathered = [json.loads(text) for text in comm.all_gather_bytes(json.dumps(mine).encode())]
    reason = next((reason for _, reason in gathered if reason), None)
    if reason is not None:
        raise _Refused(reason)
    return [value for value, _ in gathered]


def _memfd(comm: MpiCommunicator, size: int, number: int) -> Mapped:
    if size >= _LEAST_HUGE:
        size = _round_up(size, HUGE_PAGE)
    fds: list[int] = []
    try:

        def make() -> tuple[int, int, int, int, int]:
            fd = os.memfd_create("mpdp", os.MFD_CLOEXEC)
            fds.append(fd)
            os.ftruncate(fd, size)
            if size % HUGE_PAGE == 0:
                _take_huge_pages(fd, size)
            os.posix_fallocate(fd, 0, size)  # the error is here, not a signal at the first touch
            status = os.fstat(fd)
            return os.getpid(), fd, status.st_dev, status.st_ino, number

        places = _gather(comm, make)
        parts: list[np.ndarray] = []

        def open_all() -> None:
            for rank, (pid, fd, device, inode, _) in enumerate(places):
                if rank == comm.rank:
                    parts.append(_map(fd, size, mmap.MAP_POPULATE))
                else:
                    parts.append(_open(pid, fd, device, inode, size))

        _gather(comm, open_all)
    finally:
        for fd in fds:
            os.close(fd)
    return Mapped(parts, "memfd", places[0][4])


def _take_huge_pages(fd: int, size: int) -> None:
    """Give an empty file huge pages as far as the kernel has them; what it refuses, ordinary pages fill later."""
    with contextlib.suppress(OSError):
        with open(_THP, encoding="ascii") as file:
            if "[never]" in file.read():
                return
        for start in range(0, size, HUGE_PAGE):
            os.posix_fallocate(fd, start, PAGE)  # the kernel collapses what is there, and fills the holes
        memory = _map(fd, size)
        _library().madvise(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(size), _COLLAPSE)


def _map(fd: int, size: int, flags: int = 0) -> np.ndarray:
    """Map a file until the last view of the result is gone, whole huge pages where one may begin.

    Python's own ``mmap`` would keep a descriptor open for each mapping: ranks x buffers of them in every rank.
    """
    if size % HUGE_PAGE:
        address = _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | flags, fd)
    else:
        address = _take_addresses(size)
        try:
            _mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED | flags, fd)
        except OSError:
            _unmap(address, size)
            raise
    memory = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(memory, _unmap, address, size).atexit = False
    return np.frombuffer(memoryview(memory), dtype=np.uint8)


def _take_addresses(size: int) -> int:
    """Reserve addresses that begin where a huge page may, without memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    start = _mmap(None, size + HUGE_PAGE, _NO_ACCESS, flags, -1)
    address = _round_up(start, HUGE_PAGE)
    if address > start:
        _unmap(start, address - start)
    _unmap(address + size, start + HUGE_PAGE - address)
    return address


def _mmap(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    got = _library().mmap(
        ctypes.c_void_p(address), ctypes.c_size_t(size), protection, flags, fd, ctypes.c_long(0)
    )
    if got is None or got == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap of {size} bytes: {os.strerror(number)}")
    return int(got)


def _unmap(address: int, size: int) -> None:
    _library().munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    return library


def _open(pid: int, fd: int, device: int, inode: int, size: int) -> np.ndarray:
    """Map another process's file; by its number it could be a file of another name space."""
    other = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(other)
        if (status.st_dev, status.st_ino, status.st_size) != (device, inode, size):
            raise OSError(f"/proc/{pid}/fd/{fd} is another file than the rank made")
        return _map(other, size)
    finally:
        os.close(other)


def _window(comm: MpiCommunicator, size: int, number: int) -> Mapped:
    needed = comm.size * size + (1 << 20)

    def look() -> int:
        free = _free_bytes(size)
        if free < needed:  # an MPI would give the window all the same, and the first touch would be a SIGBUS
            raise OSError(f"{_SHM} has {free} bytes left, and {needed} are needed")
        return number

    numbers = _gather(comm, look)
    return Mapped(comm.shared_window(size), "window", numbers[0])


def _free_bytes(size: int) -> int:
    status = os.statvfs(_SHM)
    return status.f_bavail * status.f_frsize
