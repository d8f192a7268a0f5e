"""How a GPU holds images: channels last in memory, (N, C, H, W) to everyone who asks.

An array of images is a transposed view of one of shape (N, H, W, C): neighbouring channels of a pixel lie side by
side, which is how convolutions read them and lets kernels by channel take several at once. What is made of such arrays
is laid out likewise; an array in C order is turned when it comes in (a batch of images), and where the order of
elements is asked for (a reshape) CuPy turns it back.

Part of ``kernels.cuda``. Shapes: N samples, C channels, S places of a sample (pixels).
"""

from __future__ import annotations

import math
from typing import Any

from .base import Array
from .cuda_source import THREADS, CudaBase, loop_blocks, types

_PACK_BYTES = 16  # that a thread loads at once
_FEW = 16  # channels up to which a thread turns a whole pixel
MOST_NARROW = 1 << 30  # elements from which on indices are counted in 64 bits
_MOST = 65_535  # of a grid's second and third axis


class CudaLayouts(CudaBase):
    """Channels last and first. **Local.**"""

    def channels_last(self, x: Array) -> Array:
        """Return x (N, C, ...) as a contiguous array (N, ..., C): a view of x where it lies so, else a copy."""
        if x.ndim == 2:
            return self.flat(x)
        view = x.transpose(0, *range(2, x.ndim), 1)
        return view if view.flags.c_contiguous else self.turned(x, x.shape[1])

    def turned(self, x: Array, padded: int) -> Array:
        """Return a copy of x (N, C, ...) as (N, ..., padded), with zeros behind its channels."""
        x = self.flat(x)
        n, channels, *places = x.shape
        out = self.xp.empty((n, *places, padded), x.dtype)
        if out.size:
            size = math.prod(places)
            if padded <= _FEW:
                vector = self.vector(padded, out)
                self._images(
                    "few_channels_last", x.dtype, vector, n * size, x, out, n, channels, size, padded,
                    wide=out.size >= MOST_NARROW,
                )  # fmt: skip
            else:
                tiles = -(-size // 32), -(-padded // 32), min(n, _MOST)
                built = image_types(x.dtype, 1)
                self.launch(
                    "images", "channels_last", built, tiles, (32, 8), x, out, n, channels, size, padded
                )
        return out

    def channels_first(self, y: Array) -> Array:
        """Return an array (N, ..., C) as (N, C, ...): a view."""
        return y if y.ndim == 2 else y.transpose(0, y.ndim - 1, *range(1, y.ndim - 1))

    def vector(self, channels: int, *arrays: Array) -> int:
        """Return how many neighbouring channels of arrays of one dtype may be loaded at once."""
        size = arrays[0].dtype.itemsize
        vector = _PACK_BYTES // size
        while channels % vector or any(a.data.ptr % (vector * size) for a in arrays):
            vector //= 2
        return vector

    def _images(
        self,
        name: str,
        dtype: Any,
        vector: int,
        work: int,
        *arguments: Any,
        relu: bool = False,
        wide: bool = True,
    ) -> None:
        """Run a kernel of ``images.cu`` over ``work`` packs of channels, one a thread at a time."""
        built = image_types(dtype, vector, relu, wide=wide)
        self.launch("images", name, built, loop_blocks(work, THREADS), THREADS, *arguments)


def image_types(
    dtype: Any, vector: int, relu: bool = False, window: tuple[int, int] = (0, 0), wide: bool = True
) -> tuple[Any, ...]:
    """Return the types and constants of ``images.cu``. **Local.**

    Args:
        dtype: of the images.
        vector: channels that a thread takes at once.
        relu: with ReLU.
        window: of pooling, the length of a square window and its step to build the kernel for; zeros for any.
        wide: whether indices need 64 bits, with which a GPU counts slowly.
    """
    length, step = window
    return (
        *types(dtype), "VEC", vector, "RELU", int(relu), "WINDOW", length, "STEP", step, "I", "i64" if wide else "int",
    )  # fmt: skip
