"""The ceiling: how fast a device multiplies large matrices, which model FLOP utilisation is measured against.

A figure of the data sheet would be out of reach: a GPU lowers its clock under this load.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import ml_dtypes
import numpy as np

from .. import kernels
from ..device import Device, as_device
from ..kernels.precision import tf32

SIDES = {"cpu": (1024,), "cuda": (4096, 8192)}
_SECONDS = 0.3  # of work that a figure is taken from: enough for the clock to settle


def product_rate(device: Device | str = "cuda", dtype: str = "bfloat16", seconds: float = _SECONDS) -> float:
    """Return the floating-point operations a second of the fastest product of square matrices. **Local.**

    Products are ``x @ w.T`` of the kernels that training uses, one behind the other for ``seconds``; of several sizes
    the best median counts. Numbers are normally distributed: with zeros a GPU draws less power and runs faster.

    Args:
        device: where; it is waited for.
        dtype: ``"bfloat16"``, ``"float16"``, ``"float32"``, ``"tf32"`` or ``"float64"``.
        seconds: for each size.

    Raises:
        ValueError: another dtype.

    Example:
        >>> product_rate("cpu", "float32", seconds=0.01) > 1e8
        True
    """
    known = ("bfloat16", "float16", "float32", "tf32", "float64")
    if dtype not in known:
        raise ValueError(f"dtype: expected one of {', '.join(known)}, got {dtype!r}; choose one")
    device = as_device(device)
    k = kernels.for_device(device)
    with k.active():
        if dtype == "tf32":
            with tf32():
                return max(_rate(k, side, np.dtype(np.float32), seconds) for side in SIDES[device.kind])
        kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        return max(_rate(k, side, kind, seconds) for side in SIDES[device.kind])


def _rate(k: Any, side: int, dtype: np.dtype, seconds: float) -> float:
    random = np.random.default_rng(0)
    row = random.standard_normal((side, 64), dtype=np.float32)
    x, w = (k.xp.tile(k.from_host(np.roll(row, n)), side // 64).astype(dtype) for n in (0, 1))
    out = k.xp.empty((side, side), dtype)

    def products(count: int) -> float:
        """Return the seconds of one of ``count`` products."""
        if k.device_kind == "cpu":
            start = time.perf_counter()
            for _ in range(count):
                k.gemm(x, w.T, out)
            return (time.perf_counter() - start) / count
        begin, end = k.xp.cuda.Event(), k.xp.cuda.Event()
        begin.record()
        for _ in range(count):
            k.gemm(x, w.T, out)
        end.record()
        end.synchronize()
        return k.xp.cuda.get_elapsed_time(begin, end) / 1e3 / count

    products(2)
    count = max(1, int(seconds / 10 / products(3)))
    return 2.0 * side**3 / statistics.median(products(count) for _ in range(9))
