"""The CUDA sources of this package: found, completed with types, compiled at first use, launched.

A source is compiled by NVRTC once for each combination of types that is used; CuPy keeps the result on disk
(``~/.cupy/kernel_cache``), so the next process loads it. Nothing is compiled when mpdp is installed or imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..device import Device
from .base import Array, Kernels
from .plan_book import PlanBook

FOLDER = Path(__file__).parent / "cuda_src"
THREADS = 256
_MOST_BLOCKS = 4096  # of grid-stride loops: 31 a multiprocessor of an H200, and far below every limit
_STORED = {"float16": "f16", "bfloat16": "bf16", "float32": "float", "float64": "double"}
_INTEGERS = {
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "i64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
}
_PLAIN = (int, float)
_SHARED = {
    "small_products"
}  # sources of which two blocks fit a multiprocessor if all its fast memory is shared
_EXACT = {"updates", "step"}  # sources that are built without fused multiply-add, to have NumPy's bits


@cache  # asking a dtype for its name costs a microsecond
def stored(dtype: Any) -> str:
    """Return the C name of a floating dtype. **Local.**"""
    try:
        return _STORED[np.dtype(dtype).name]
    except KeyError:
        raise TypeError(
            f"kernel: expected float16, bfloat16, float32 or float64 on a GPU, got {dtype}; convert it with "
            ".astype(...)"
        ) from None


@cache
def summed(dtype: Any) -> str:
    """Return the C name of what numbers of a floating dtype are added in. **Local.**"""
    return "double" if dtype == np.float64 else "float"


@cache
def types(read: Any, written: Any = None) -> tuple[str, ...]:
    """Return the types T and W of a source, and O where ``written`` is given. **Local.**"""
    own = ("T", stored(read), "W", summed(read))
    return own if written is None else (*own, "O", stored(written))


@cache
def integer(dtype: Any) -> str:
    """Return the C name of an integer dtype. **Local.**"""
    return _INTEGERS[np.dtype(dtype).name]


def loop_blocks(count: int, each: int = 4 * THREADS) -> int:
    """Return the blocks of a grid-stride loop over ``count`` elements, at least one. **Local.**"""
    return max(1, min(-(-count // each), _MOST_BLOCKS))


def number(value: Any) -> tuple[float, int, int]:
    """Return the three kernel arguments of a number: a float, a 0-d array or a column on the device. **Local.**

    The caller keeps the array until the kernel is launched: its memory would be given to the next one.
    """
    if isinstance(value, float | int):
        return float(value), 0, 0
    assert value.dtype == np.float64 and value.flags.c_contiguous, "numbers in device memory are float64"
    return 0.0, value.data.ptr, value.ndim


def whole_number(value: Any) -> tuple[int, int]:
    """Return the two kernel arguments of an integer: one of Python's, or a 0-d int64 array. **Local.**"""
    if isinstance(value, int | np.integer):
        return int(value), 0
    assert value.dtype == np.int64 and value.ndim == 0, "integers in device memory are int64"
    return 0, value.data.ptr


def program(source: str, built: tuple[Any, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the complete text of one of the sources, and the compiler's options. **Local.**

    Args:
        source: file of ``cuda_src`` without ending.
        built: names and values, in turn: a C type, or an integer constant.
    """
    lines = [(FOLDER / "types.cuh").read_text()]
    for key, value in zip(built[::2], built[1::2]):
        lines.append(f"#define {key} {value}" if isinstance(value, int) else f"typedef {value} {key};")
    lines.append((FOLDER / f"{source}.cu").read_text())
    return "\n".join(lines), ("-std=c++17", *(("--fmad=false",) if source in _EXACT else ()))


def _argument(value: Any) -> int | float:
    """Return an argument as Python's number, which CuPy passes with eight bytes."""
    if value is None:
        return 0
    if hasattr(value, "data") and hasattr(value.data, "ptr"):  # a subclass of CuPy's arrays
        return value.data.ptr
    return float(value) if isinstance(value, float) else int(value)  # bool, NumPy's scalars


class CudaBase(Kernels):
    """What all parts of the CUDA kernels share: the device, compiled functions, flat views. **Local.**

    Args:
        ordinal: index of the GPU as this process sees it.

    Raises:
        MissingDependencyError: CuPy is not installed.
        DeviceError: no such GPU.
    """

    device_kind = "cuda"

    def __init__(self, ordinal: int) -> None:
        self.device = Device("cuda", ordinal)
        self.xp = self.device.xp
        self.plan_book = PlanBook()
        self._functions: dict[tuple[Any, ...], Callable[..., None]] = {}
        self._modules: dict[tuple[Any, ...], Any] = {}
        self._runtime: Any = self.xp.cuda.runtime
        self._array = self.xp.ndarray

    def is_current(self) -> bool:
        return self._runtime.getDevice() == self.device.ordinal

    def active(self) -> Any:
        return self.xp.cuda.Device(self.device.ordinal)

    def launch(
        self, source: str, name: str, built: tuple[Any, ...], blocks: Any, threads: Any, *arguments: Any
    ) -> None:
        """Launch one kernel on the current stream.

        Args:
            source: file of ``cuda_src`` without ending.
            name: of the kernel.
            built: its types, as for :func:`program`.
            blocks, threads: of the grid, an integer or a tuple.
            arguments: arrays (passed as pointers), None (a null pointer), integers (64-bit), floats (double).
        """
        function = self._functions.get((source, name, built))
        if function is None:
            function = self._compile(source, name, built)
        grid = blocks if isinstance(blocks, tuple) else (blocks,)
        block = threads if isinstance(threads, tuple) else (threads,)
        array = self._array
        function(
            grid,
            block,
            [a.data.ptr if type(a) is array else a if type(a) in _PLAIN else _argument(a) for a in arguments],
        )

    def _compile(self, source: str, name: str, built: tuple[Any, ...]) -> Callable[..., None]:
        module = self._modules.get((source, built))
        if module is None:
            code, options = program(source, built)
            module = self._modules[source, built] = self.xp.RawModule(code=code, options=options)
        function = self._functions[source, name, built] = module.get_function(name)
        if source in _SHARED:
            function.preferred_shared_memory_carveout = 100
        return function

    def flat(self, x: Array) -> Array:
        """Return x, or a copy, with its elements in C order one behind the other."""
        return x if x.flags.c_contiguous else self.xp.ascontiguousarray(x)
