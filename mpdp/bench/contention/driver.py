"""The CUDA driver by its C functions: contexts, streams, null kernels and graphs, without CuPy.

So a launch is measured with nothing around it, and a thread can have a context of its own.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from ...errors import DeviceError

_NON_BLOCKING, _THREAD_LOCAL, _NO_TIMING = 1, 1, 2
# A kernel that does nothing, and one that spins for so many clocks.
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry nothing() { ret; }
.visible .entry busy(.param .u64 clocks) {
    .reg .u64 %r<4>;
    .reg .pred %p;
    ld.param.u64 %r0, [clocks];
    mov.u64 %r1, %clock64;
AGAIN:
    mov.u64 %r2, %clock64;
    sub.u64 %r3, %r2, %r1;
    setp.lt.u64 %p, %r3, %r0;
    @%p bra AGAIN;
    ret;
}
\0"""


class Driver:
    """``libcuda`` of this process. **Local.**

    Raises:
        DeviceError: it cannot be loaded or started.
    """

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DeviceError(
                f"libcuda: expected the driver's library, got {error}; install the driver"
            ) from error
        self("cuInit", 0)

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a function, and raise what it returns."""
        status = getattr(self.library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(status, ctypes.byref(text))
            raise DeviceError(
                f"{name}: expected success, got error {status} ({(text.value or b'').decode()})"
            )

    def address(self, name: str) -> int:
        """Return where a function lies, for the loops."""
        return ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value or 0

    def count(self) -> int:
        """Return how many GPUs there are."""
        found = ctypes.c_int()
        self("cuDeviceGetCount", ctypes.byref(found))
        return found.value

    def version(self) -> int:
        """Return the newest CUDA that the driver knows, as 13000."""
        found = ctypes.c_int()
        self("cuDriverGetVersion", ctypes.byref(found))
        return found.value

    def name(self, ordinal: int) -> str:
        """Return the name of a GPU."""
        text = ctypes.create_string_buffer(100)
        self("cuDeviceGetName", text, 100, self._device(ordinal))
        return text.value.decode()

    def _device(self, ordinal: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self("cuDeviceGet", ctypes.byref(device), ordinal)
        return device

    def primary_context(self, ordinal: int) -> ctypes.c_void_p:
        """Return the one context of a GPU that all libraries of the process share."""
        context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(ordinal))
        return context

    def new_context(self, ordinal: int) -> ctypes.c_void_p:
        """Return a context of its own on a GPU."""
        context = ctypes.c_void_p()
        self("cuCtxCreate_v2", ctypes.byref(context), 0, self._device(ordinal))
        return context


@cache
def driver() -> Driver:
    """Return the driver of this process. **Local.**"""
    return Driver()


class Submission:
    """A stream of one context with kernels and graphs to launch into it. **Local.**

    Args:
        ordinal: of the GPU.
        own_context: by ``cuCtxCreate``, instead of the primary one.
        own_stream: a non-blocking one, instead of the context's default one.
    """

    def __init__(self, ordinal: int, own_context: bool = False, own_stream: bool = True) -> None:
        self._driver = call = driver()
        self.context = call.new_context(ordinal) if own_context else call.primary_context(ordinal)
        self._own = own_context
        self.use()
        self.stream, self._module = ctypes.c_void_p(), ctypes.c_void_p()
        if own_stream:
            call("cuStreamCreate", ctypes.byref(self.stream), _NON_BLOCKING)
        call("cuModuleLoadData", ctypes.byref(self._module), PTX)
        self.event = ctypes.c_void_p()
        call("cuEventCreate", ctypes.byref(self.event), _NO_TIMING)
        self._clocks = ctypes.c_uint64()
        self.parameters: Any = (ctypes.c_void_p * 1)(ctypes.addressof(self._clocks))
        self._graphs: list[ctypes.c_void_p] = []
        self._memory: list[ctypes.c_void_p] = []
        self._pinned: list[ctypes.c_void_p] = []

    def use(self) -> None:
        """Make the context the current one of the calling thread."""
        self._driver("cuCtxSetCurrent", self.context)

    def kernel(self, microseconds: float = 0.0) -> int:
        """Return the function of a kernel that runs so long, at 1.5 GHz."""
        function = ctypes.c_void_p()
        self._clocks.value = int(1500 * microseconds)
        name = b"busy" if microseconds else b"nothing"
        self._driver("cuModuleGetFunction", ctypes.byref(function), self._module, name)
        return function.value or 0

    def launch(self, function: int) -> None:
        """Launch a kernel once."""
        one = ctypes.c_uint(1)
        self._driver(
            "cuLaunchKernel", ctypes.c_void_p(function), one, one, one, ctypes.c_uint(32), one, one, ctypes.c_uint(0),
            self.stream, self.parameters, None,
        )  # fmt: skip

    def graph(self, nodes: int) -> int:
        """Return an executable graph of null kernels, one behind the other."""
        call, function = self._driver, self.kernel()
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuStreamBeginCapture_v2", self.stream, _THREAD_LOCAL)
        for _ in range(nodes):
            self.launch(function)
        call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_uint64(0))
        call("cuGraphDestroy", graph)
        call("cuGraphUpload", executable, self.stream)
        self._graphs.append(executable)
        return executable.value or 0

    def memory(self, nbytes: int) -> int:
        """Return the address of memory of the GPU."""
        return self._allocated("cuMemAlloc_v2", self._memory, nbytes)

    def pinned(self, nbytes: int) -> int:
        """Return the address of page-locked memory of the host."""
        return self._allocated("cuMemAllocHost_v2", self._pinned, nbytes)

    def _allocated(self, name: str, kept: list[ctypes.c_void_p], nbytes: int) -> int:
        address = ctypes.c_void_p()
        self._driver(name, ctypes.byref(address), ctypes.c_size_t(nbytes))
        kept.append(address)
        return address.value or 0

    def synchronize(self) -> None:
        """Wait for the stream."""
        self._driver("cuStreamSynchronize", self.stream)

    def close(self) -> None:
        """Give back what was made."""
        self.use()
        self.synchronize()
        for graph in self._graphs:
            self._driver("cuGraphExecDestroy", graph)
        for address in self._memory:
            self._driver("cuMemFree_v2", address)
        for address in self._pinned:
            self._driver("cuMemFreeHost", address)
        self._driver("cuEventDestroy_v2", self.event)
        self._driver("cuModuleUnload", self._module)
        if self.stream:
            self._driver("cuStreamDestroy_v2", self.stream)
        if self._own:
            self._driver("cuCtxDestroy_v2", self.context)
