"""How long each kernel of this process ran on the GPU, by CUPTI's activity records; also of kernels in a graph.

CUPTI is a library of NVIDIA that every profiler stands on: part of the CUDA toolkit, or ``nvidia-cuda-cupti`` by pip.
Only the head of its records is read, which is the same in all versions since CUDA 9: ``kind`` at byte 0, ``start`` and
``end`` in nanoseconds at 16 and 24, for kernels the ``name`` at 104.

Source: NVIDIA, CUPTI user's guide, "CUPTI activity API"; layouts of ``CUpti_ActivityKernel9``,
``CUpti_ActivityMemcpy5`` and ``CUpti_ActivityMemset4`` in ``cupti_activity.h``.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import DeviceError, MissingDependencyError

_COPY, _SET, _KERNEL = 1, 2, 10  # CUPTI_ACTIVITY_KIND_MEMCPY, _MEMSET, _CONCURRENT_KERNEL
_START, _END, _NAME = 16, 24, 104
_BUFFER_BYTES = 8 << 20

_Requested = ctypes.CFUNCTYPE(
    None,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_size_t),
)
_Completed = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
)


def candidates() -> Iterator[str]:
    """Yield where CUPTI may be: beside other libraries of NVIDIA by pip, then where the loader looks. **Local.**"""
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found else ():
        yield from (str(path) for path in sorted(Path(folder).glob("**/libcupti.so*"), reverse=True))
    yield from ("libcupti.so.13", "libcupti.so.12", "libcupti.so")
    yield "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so"


def load() -> Any:
    """Return CUPTI. **Local.**

    Raises:
        MissingDependencyError: it is not installed.
    """
    for path in candidates():
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise MissingDependencyError(
        "cupti: expected NVIDIA's CUPTI, found none; install it with: pip install nvidia-cuda-cupti"
    )


class KernelTimes:
    """While entered, note what this process runs on GPUs; synchronise before leaving. One at a time. **Local.**

    Attributes:
        seconds: name of a kernel (``memcpy`` and ``memset`` too) to the seconds of all its runs, once left.

    Raises:
        MissingDependencyError: there is no CUPTI.
        DeviceError: CUPTI does not work here.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._lib = load()
        self._buffers: dict[int, Any] = {}
        self._callbacks = _Requested(self._give), _Completed(self._take)

    def __enter__(self) -> KernelTimes:
        self._call("cuptiActivityRegisterCallbacks", *self._callbacks)
        for kind in (_KERNEL, _COPY, _SET):
            self._call("cuptiActivityEnable", kind)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._call("cuptiActivityFlushAll", 1)
        for activity in (_KERNEL, _COPY, _SET):
            self._call("cuptiActivityDisable", activity)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status:
            raise DeviceError(
                f"cupti: expected {name} to work, got status {status}; look for another profiler"
            )

    def _give(self, buffer: Any, size: Any, records: Any) -> None:
        memory = ctypes.create_string_buffer(_BUFFER_BYTES + 8)
        address = -(-ctypes.addressof(memory) // 8) * 8
        self._buffers[address] = memory
        buffer[0], size[0], records[0] = address, _BUFFER_BYTES, 0

    def _take(self, context: Any, stream: int, buffer: int, size: int, valid: int) -> None:
        record = ctypes.c_void_p()
        while valid:
            status = self._lib.cuptiActivityGetNextRecord(
                ctypes.c_void_p(buffer), ctypes.c_size_t(valid), ctypes.byref(record)
            )
            if status or record.value is None:
                break  # the end of the buffer
            self.note(record.value)
        self._buffers.pop(buffer, None)

    def note(self, address: int) -> None:
        """Add one record of CUPTI's, which lies at ``address``."""
        kind = ctypes.c_uint32.from_address(address).value
        if kind == _KERNEL:
            text = ctypes.c_char_p.from_address(address + _NAME).value
            name = text.decode(errors="replace") if text else "unnamed"
        elif kind in (_COPY, _SET):
            name = "memcpy" if kind == _COPY else "memset"
        else:
            return
        start, end = (ctypes.c_uint64.from_address(address + at).value for at in (_START, _END))
        self.seconds[name] = self.seconds.get(name, 0.0) + (end - start) / 1e9
