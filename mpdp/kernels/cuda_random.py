"""Random masks on a GPU: the words of ``kernels.random``, bit by bit. Part of ``kernels.cuda``."""

from __future__ import annotations

from typing import Any

from .base import Array
from .cuda_source import THREADS, CudaBase, whole_number


class CudaRandom(CudaBase):
    """Philox on the GPU. **Local.**"""

    def keep_mask(
        self, key: tuple[int, int], step: Any, start: Any, count: int, elements: int, threshold: int
    ) -> Array:
        """As in the interface; ``step`` and ``start`` may be 0-d int64 arrays, read when the kernel runs."""
        out = self.xp.empty((count, elements), self.xp.bool_)
        if out.size:
            self.launch(
                "random", "keep_mask", (), -(-count * -(-elements // 4) // THREADS), THREADS,
                out, *key, *whole_number(step), *whole_number(start), count, elements, threshold,
            )  # fmt: skip
        return out
