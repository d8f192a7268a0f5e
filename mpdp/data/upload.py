"""Upload: copy batches to a GPU from pinned memory, asynchronously, on a stream of their own.

A slot holds pinned host memory and device memory for one batch. It is used again once the batch was given back: the
copy into it then waits, on the device, for the work that read it. The consumer's stream waits, on the device, for
the copy. The host waits for neither.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np

from ..device import Device, device_of
from .reading import map_arrays

_ALIGNMENT = 256  # bytes, of each array inside a slot


class Upload:
    """Copy trees of NumPy arrays to one GPU.

    Args:
        device: the GPU.
    """

    def __init__(self, device: Device) -> None:
        self._cupy = device.xp
        self._device = device
        self._stream: Any = None
        self._free: deque[Slot] = deque()
        self._lock = threading.Lock()

    def start(self, tree: Any) -> tuple[Any, Slot]:
        """Start the copy of all host arrays of a tree; return the tree on the device and its slot. **Local.**"""
        cupy = self._cupy
        self._device.use()
        if self._stream is None:
            self._stream = cupy.cuda.Stream(non_blocking=True)
        sizes: list[int] = []
        map_arrays(lambda array, _: sizes.append(_padded(array.nbytes)), tree)
        slot = self._take(sum(sizes))
        if slot.uploaded is not None:
            slot.uploaded.synchronize()  # the copy from its host memory; long done
        if slot.released is not None:
            self._stream.wait_event(slot.released)
        offset = 0

        def copy(array: Any, _: str) -> Any:
            nonlocal offset
            if device_of(array) == self._device:
                return array
            host = slot.host[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
            host[...] = array
            target = cupy.ndarray(array.shape, array.dtype, slot.device + offset)
            offset += _padded(array.nbytes)
            if array.nbytes:
                runtime = cupy.cuda.runtime
                runtime.memcpyAsync(
                    target.data.ptr,
                    host.ctypes.data,
                    array.nbytes,
                    runtime.memcpyHostToDevice,
                    self._stream.ptr,
                )
            return target

        copied = map_arrays(copy, tree)
        slot.uploaded = cupy.cuda.Event(block=True, disable_timing=True)
        slot.uploaded.record(self._stream)
        return copied, slot

    def give_back(self, slot: Slot) -> None:
        """Take a slot back for later batches. **Local.** Any thread."""
        with self._lock:
            self._free.append(slot)

    def _take(self, nbytes: int) -> Slot:
        with self._lock:
            found = next((slot for slot in self._free if slot.nbytes >= nbytes), None)
            if found is not None:
                self._free.remove(found)
                return found
            self._free.clear()  # sizes have grown: smaller slots would never be used again
        return Slot(self, self._cupy, nbytes)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Slot:
    """Memory of one batch on both sides.

    Attributes:
        uploaded: event behind the copy into it.
        released: event behind the last work that reads it, or None while it is in use for the first time.
    """

    def __init__(self, owner: Upload, cupy: Any, nbytes: int) -> None:
        import cupyx

        self._owner, self._cupy = owner, cupy
        self.nbytes = nbytes
        self.host = cupyx.empty_pinned(max(nbytes, 1), dtype=np.uint8)
        # Outside of CuPy's pool: its arenas belong to streams, and this memory is used by two.
        self.device = cupy.cuda.MemoryPointer(cupy.cuda.Memory(max(nbytes, 1)), 0)
        self.uploaded: Any = None
        self.released: Any = None

    def acquire(self) -> None:
        """Let the calling thread's device work come after the copy. **Local.**"""
        self._cupy.cuda.get_current_stream().wait_event(self.uploaded)

    def release(self) -> None:
        """Give the slot back: work that the calling thread has submitted may still read it. **Local.**"""
        self.released = self._cupy.cuda.Event(disable_timing=True)
        self.released.record(self._cupy.cuda.get_current_stream())
        self._owner.give_back(self)
