"""A plugin for pytest that finds kernels that reach beyond an array, or one that is gone: on a GPU, without MPS,

    PYTHONPATH=tests python -m pytest -x -p guarded_memory -k cuda tests/unit/kernels/test_linear.py

Each array of CuPy's ends where unmapped addresses begin, to 16 bytes, and what is freed is unmapped and its addresses
are never used again: an access there is cudaErrorIllegalAddress, where a pool's memory would hide it. Memory of a
capture comes from the pool as ever. Tests that count memory, or whose capture frees memory, fail here. Source: CUDA
driver API, virtual memory management.
"""

import contextlib
import ctypes

import cupy

ALIGNMENT = 16
_driver = ctypes.CDLL("libcuda.so.1")
_size, _address = ctypes.c_size_t, ctypes.c_uint64
_pool = cupy.get_default_memory_pool()


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


_GPU = _Location(1, 0)
_PINNED = _Properties(1, 0, _GPU, None, (ctypes.c_ubyte * 8)())
_READ_WRITE = _Access(_GPU, 3)


def _call(name, *arguments):
    code = getattr(_driver, name)(*arguments)
    if code:
        raise MemoryError(f"{name}: CUDA error {code}")


def _granularity():
    found = _size()
    _call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(_PINNED), 0)
    return found.value


class _Block:
    """Memory of its own, in addresses of its own."""

    def __init__(self, size):
        self.size = -(-size // _GRAIN) * _GRAIN
        start, handle = _address(), _address()
        reserved = _size(self.size + _GRAIN)
        _call("cuMemAddressReserve", ctypes.byref(start), reserved, _size(0), _address(0), _address(0))
        _call("cuMemCreate", ctypes.byref(handle), _size(self.size), ctypes.byref(_PINNED), _address(0))
        _call("cuMemMap", start, _size(self.size), _size(0), handle, _address(0))
        _call("cuMemSetAccess", start, _size(self.size), ctypes.byref(_READ_WRITE), _size(1))
        self._start, self._handle = start, handle
        self.address = start.value + self.size - -(-size // ALIGNMENT) * ALIGNMENT

    def __del__(self):
        with contextlib.suppress(Exception):
            _driver.cuCtxSynchronize()
            _driver.cuMemUnmap(self._start, _size(self.size))
            _driver.cuMemRelease(self._handle)


def _allocate(size):
    if size == 0 or cupy.cuda.get_current_stream().is_capturing():
        return _pool.malloc(size)
    block = _Block(size)
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(block.address, size, block, 0), 0)


cupy.cuda.Device(0).use()
cupy.cuda.runtime.free(0)  # makes the context
_GRAIN = _granularity()
cupy.cuda.set_allocator(_allocate)
