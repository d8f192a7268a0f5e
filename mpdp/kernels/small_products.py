"""Small products of float32: a kernel of our own where a library's would leave most of a GPU idle.

A product of 128 x 784 by 784 x 512 has too few tiles for 132 multiprocessors. cuBLAS cuts its inner length and adds
the parts in a second kernel: 11 us on an H200, and 7 us for 128 x 512 by 512 x 10. Here the blocks of a cluster add
them through shared memory: 10 and 4 us. Clusters are there from compute capability 9.0 on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .cublaslt import Problem

MOST_ELEMENTS, MOST_INNER = (
    1 << 16,
    1024,
)  # of a result, and the inner length: beyond, cuBLASLt is faster on an H200
_SPLITS = (1, 2, 4, 8)  # blocks of a cluster
_TILES = (  # rows, columns, of a thread's elements, cycles for each step along the inner length (measured)
    (64, 64, 4, 4, 144.0),
    (32, 64, 4, 4, 72.0),
    (32, 32, 2, 4, 48.0),
    (32, 16, 2, 2, 65.0),
    (16, 32, 2, 2, 65.0),
)
_JOIN = 1000.0  # cycles to add the parts
_EPILOGUES = {"DEFAULT": 0, "BIAS": 0, "RELU": 1, "RELU_BIAS": 1}


class SmallProduct:
    """One problem's kernel and grid, ready to run."""

    __slots__ = ("_bias", "_launch", "built", "grid", "problem", "slice", "threads")

    def __init__(self, launch: Callable[..., None], problem: Problem, multiprocessors: int) -> None:
        self._launch = launch
        self.problem = p = problem
        self._bias: int | None = None
        (down, across, tm, tn), split, self.slice = shape(p, multiprocessors)
        packed = p.alignment >= 16
        self.built = (
            "BM", down, "BN", across, "TM", tm, "TN", tn, "SPLIT", split, "RELU", _EPILOGUES[p.epilogue],
            "ALONG_A", 1 - p.transposed_a, "ALONG_B", p.transposed_b,
            "PACKED_A", int(packed and (p.stride_a | (p.rows if p.transposed_a else p.inner)) % 4 == 0),
            "PACKED_B", int(packed and (p.stride_b | (p.inner if p.transposed_b else p.columns)) % 4 == 0),
        )  # fmt: skip
        self.grid = (-(-p.columns // across), -(-p.rows // down), split)
        self.threads = (down // tm) * (across // tn)

    def point(self, name: str, address: int) -> None:
        """Set the address of the bias."""
        assert name == "BIAS_POINTER"
        self._bias = address

    def run(self, a: int, b: int, out: int, accumulate: bool, stream: int) -> None:
        """Launch the product on the current stream; the arguments are addresses."""
        p = self.problem
        self._launch(
            "small_products", "small_product", self.built, self.grid, self.threads,
            a, b, out, self._bias, p.rows, p.columns, p.inner, p.stride_a, p.stride_b, self.slice, accumulate,
        )  # fmt: skip


def is_small(p: Problem) -> bool:
    """Return whether the kernel here is meant for a problem. **Local.**"""
    return (
        p.read == p.written == "float32"
        and not p.tf32
        and p.batch == 1
        and p.epilogue in _EPILOGUES
        and p.rows * p.columns <= MOST_ELEMENTS
        and p.inner <= MOST_INNER
    )


def shape(p: Problem, multiprocessors: int) -> tuple[tuple[int, int, int, int], int, int]:
    """Return the tile, the blocks that share one, and the inner length of each, by estimated time. **Local.**"""
    best: Any = None
    for down, across, tm, tn, cycles in _TILES:
        tiles = -(-p.rows // down) * -(-p.columns // across)
        for split in _SPLITS:
            part = -(-p.inner // split // 4) * 4  # a multiple of four floats
            if split > 1 and (part < 16 or part * (split - 1) >= p.inner):
                continue
            cost = max(1.0, tiles * split / multiprocessors) * cycles * part + (_JOIN if split > 1 else 0)
            if best is None or cost < best[0]:
                best = cost, (down, across, tm, tn), split, part
    return best[1:]
