"""What the GPU transports need of CUDA, for one GPU: memory, handles, streams, kernels. All of it through CuPy.

``tests/emulated_gpu.py`` has another implementation, which runs the same kernels on the host. Read ``cuda_memory`` for
what is done with it. Importing this module needs no CuPy; making the class does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..device import Device
from ..device_memory import identity
from ..errors import DeviceError
from ..kernels import cuda_source

FOLDER = Path(__file__).parent / "cuda_src"
WHOLE = (
    2 << 20
)  # bytes: CUDA gives whole pages of this size to allocations of at least one, and handles cover pages
_HIGH = -5  # priority of a stream; CUDA takes the highest there is
_HALVES = ("float16", "bfloat16")


@cache
def source(dtype: Any, size: int, copies: bool) -> str:
    """Return the text of the collectives of one dtype over ``size`` ranks. **Local.**

    Args:
        dtype: of the elements; uint8 where parts are copied.
        size: ranks.
        copies: parts are copied, not summed.
    """
    dtype = np.dtype(dtype)
    half, stored = dtype.name in _HALVES, c_name(dtype)
    constants = {
        "T": stored,
        "A": "float" if half else "u32" if dtype.name == "uint8" else stored,
        "W": size,
        "COPIES": int(copies),
        "WIDENED": "wide" if half else "(A)",
        "NARROWED": "As<T>::of" if half else "(T)",
    }
    defined = [f"#define {name} {value}" for name, value in constants.items()]
    return "\n".join([*defined, (FOLDER / "direct.cu").read_text()])


@cache
def c_name(dtype: Any) -> str:
    """Return the C name of a dtype that can be summed. **Local.**"""
    dtype = np.dtype(dtype)
    return cuda_source.integer(dtype) if dtype.kind in "iu" else cuda_source.stored(dtype)


class CudaGpu:
    """One GPU of this process, through CuPy. **Local.**

    Args:
        device: the GPU.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._cupy = device.xp
        self._runtime: Any = self._cupy.cuda.runtime
        self._device = self._cupy.cuda.Device(device.ordinal)
        self._modules: dict[tuple[Any, ...], Any] = {}
        self._functions: dict[tuple[Any, ...], Any] = {}
        self._threads = threading.local()

    @property
    def multiprocessors(self) -> int:
        """How many multiprocessors this process may use."""
        return int(self._device.attributes["MultiProcessorCount"])

    @property
    def identity(self) -> bytes:
        """The name of the GPU itself, equal in every process of the node."""
        return identity(self.device)

    # -- memory

    def allocate(self, nbytes: int) -> int:
        """Return the address of zeroed memory outside of CuPy's pool, in pages of its own.

        Raises:
            DeviceError: there is not enough.
        """
        whole = -(-max(nbytes, 1) // WHOLE) * WHOLE
        try:
            with self._device:
                pointer = int(self._runtime.malloc(whole))
                self._runtime.memset(pointer, 0, whole)
                self._runtime.deviceSynchronize()
        except self._runtime.CUDARuntimeError as error:
            raise DeviceError(
                f"device {self.device}: expected {whole} bytes for communication, got {error}; free memory (CuPy's "
                "pool: cupy.get_default_memory_pool().free_all_blocks()) or use a smaller model"
            ) from error
        return pointer

    def free(self, pointer: int) -> None:
        """Give memory of :meth:`allocate` back."""
        with self._device:
            self._runtime.free(pointer)

    def export(self, pointer: int) -> bytes:
        """Return a handle by which other processes of the node open memory of :meth:`allocate`."""
        with self._device:
            return bytes(self._runtime.ipcGetMemHandle(pointer))

    def open(self, handle: bytes) -> int:
        """Return the address of another process's memory.

        Raises:
            DeviceError: CUDA cannot map it.
        """
        try:
            with self._device:
                return int(self._runtime.ipcOpenMemHandle(handle))  # CuPy's default enables peer access
        except self._runtime.CUDARuntimeError as error:
            raise DeviceError(f"device {self.device}: cannot open another rank's memory: {error}") from error

    def close(self, pointer: int) -> None:
        """Unmap what :meth:`open` gave."""
        with self._device:
            self._runtime.ipcCloseMemHandle(pointer)

    def pinned(self, words: int) -> np.ndarray:
        """Return zeroed host memory that kernels write to, as uint32."""
        with self._device:
            memory = self._cupy.cuda.alloc_pinned_memory(4 * words)
        array = np.frombuffer(memory, np.uint32, words)
        array[:] = 0
        return array

    def write(self, pointer: int, data: np.ndarray) -> None:
        """Copy host memory to the device, and wait."""
        with self._device:
            kind = self._runtime.memcpyHostToDevice
            self._runtime.memcpy(pointer, data.ctypes.data, data.nbytes, kind)

    def read(self, pointer: int, data: np.ndarray) -> None:
        """Copy device memory to the host, and wait."""
        with self._device:
            kind = self._runtime.memcpyDeviceToHost
            self._runtime.memcpy(data.ctypes.data, pointer, data.nbytes, kind)

    def array(self, pointer: int, nbytes: int, owner: Any) -> Any:
        """Return memory as a uint8 array, whose views keep ``owner`` alive."""
        cuda = self._cupy.cuda
        memory = cuda.UnownedMemory(pointer, nbytes, owner, self.device.ordinal)
        return self._cupy.ndarray((nbytes,), np.uint8, cuda.MemoryPointer(memory, 0))

    # -- order

    def stream(self) -> Any:
        """Return a new stream of high priority that never waits for the null stream."""
        with self._device:
            return self._cupy.cuda.Stream(non_blocking=True, priority=_HIGH)

    def current(self) -> Any:
        """Return the stream on which the calling thread works."""
        return self._cupy.cuda.get_current_stream(self.device.ordinal)

    def event(self) -> Any:
        """Return an event for :meth:`mark`."""
        with self._device:
            return self._cupy.cuda.Event(disable_timing=True)

    def mark(self, event: Any, stream: Any) -> None:
        """Let an event stand behind all that was submitted to a stream."""
        event.record(stream)

    def join(self, stream: Any, event: Any) -> None:
        """Let what is submitted to a stream from now on come after an event as it stands, without waiting here."""
        stream.wait_event(event)

    def reached(self, event: Any) -> bool:
        """Return whether the GPU has come to an event. Any thread."""
        with self._device:  # in a thread of its own it would make a context on GPU 0
            return bool(event.done)

    def capturing(self, stream: Any) -> bool:
        """Return whether what is submitted to a stream goes into a graph; never true of the null stream."""
        return stream.ptr > 1 and bool(stream.is_capturing())

    def done(self, stream: Any) -> bool:
        """Return whether a stream has nothing left to do. Any thread."""
        with self._device:
            return bool(stream.done)

    def synchronize(self) -> None:
        """Wait until the GPU has done all that this process asked for."""
        with self._device:
            self._runtime.deviceSynchronize()

    # -- kernels

    def prepare(
        self, name: str, built: tuple[Any, int, bool], blocks: int, threads: int, arguments: tuple[Any, ...]
    ) -> Callable[[Any], None]:
        """Return what launches a kernel of ``cuda_src`` on a stream, as often as wanted.

        Its arguments are laid out once: CuPy does so in each launch, which takes twice as long as the launch.

        Args:
            name: of the kernel.
            built: dtype, ranks and copies, as for :func:`source`.
            blocks, threads: of the grid.
            arguments: structures (``np.void``) and integers.
        """
        function = self._functions.get((name, built))
        if function is None:
            with self._device:
                kernel = self._module(built).get_function(name).kernel
            function = self._functions[name, built] = kernel
        held = [np.array([value] if isinstance(value, np.void) else int(value)) for value in arguments]
        table = np.array([value.ctypes.data for value in held], np.uint64)
        launch, address, where = self._cupy.cuda.driver.launchKernel, function.ptr, table.ctypes.data
        bind = self._bind

        def launched(stream: Any, _held: Any = (function, held, table)) -> None:
            bind()
            launch(address, blocks, 1, 1, threads, 1, 1, 0, stream.ptr, where, 0)

        return launched

    def _bind(self) -> None:
        """Give the calling thread the GPU's context: a launch, unlike an allocation, asks for it."""
        if not getattr(self._threads, "bound", False):
            with self._device:
                self._runtime.setDevice(self.device.ordinal)
            self._threads.bound = True

    def _module(self, built: tuple[Any, int, bool]) -> Any:
        if built not in self._modules:
            text = "\n".join(
                [
                    (cuda_source.FOLDER / "types.cuh").read_text(),
                    (FOLDER / "ordered.cuh").read_text(),
                    "#define GIVEN const __grid_constant__",  # read by index without a copy
                    source(*built),
                ]
            )
            self._modules[built] = self._cupy.RawModule(code=text, options=("-std=c++17",))
        return self._modules[built]
