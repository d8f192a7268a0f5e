"""Small products of float32: a kernel of our own where a library's would leave most of a GPU idle.

A product of 128 x 784 by 784 x 512 has too few tiles for 132 multiprocessors. cuBLAS cuts its inner length and adds
the parts in a second kernel: 11 us on an H200, and 7 us for 128 x 512 by 512 x 10. Here the blocks of a cluster add
them through shared memory: 8 and 3 us. Clusters are there from compute capability 9.0 on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .cublaslt import Problem

# Of a result, and the inner length: beyond, cuBLASLt is faster on an H200.
MOST_ELEMENTS, MOST_INNER = 1 << 16, 1024
# Of a layer whose backward is one kernel: rows of a batch, and elements of the weight.
MOST_ROWS, MOST_WEIGHTS = 256, 1 << 19
_SPLITS = (1, 2, 4, 8)  # blocks of a cluster
_TILES = (  # rows, columns, groups of warps, cycles for each step along the inner length (measured)
    (32, 32, 8, 22.0),
    (32, 16, 4, 19.0),
    (16, 32, 4, 20.0),
    (32, 64, 4, 47.0),
    (64, 64, 2, 75.0),
)
_BACKWARD_TILES = _TILES[0], _TILES[-1]
_JOIN, _JOIN_ELEMENT = 1000.0, 1.5  # cycles to add the parts of a cluster, and for each element of a tile
_EPILOGUES = {"DEFAULT": 0, "BIAS": 0, "RELU": 1, "RELU_BIAS": 1}
Tile = tuple[int, int, int]


class SmallProduct:
    """One problem's kernel and grid, ready to run."""

    __slots__ = ("_bias", "_launch", "built", "grid", "problem", "slice", "threads")

    def __init__(self, launch: Callable[..., None], problem: Problem, multiprocessors: int) -> None:
        self._launch = launch
        self.problem = p = problem
        self._bias: int | None = None
        tile, split, self.slice = shape(p.rows, p.columns, p.inner, multiprocessors)
        packed = p.alignment >= 16
        self.built = (
            *_named(tile, split), "RELU", _EPILOGUES[p.epilogue],
            "ALONG_A", 1 - p.transposed_a, "ALONG_B", p.transposed_b,
            "PACKED_A", int(packed and (p.stride_a | (p.rows if p.transposed_a else p.inner)) % 4 == 0),
            "PACKED_B", int(packed and (p.stride_b | (p.inner if p.transposed_b else p.columns)) % 4 == 0),
        )  # fmt: skip
        self.grid = _tiles(p.rows, p.columns, tile) * split
        self.threads = _threads(tile)

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


def is_small_layer(rows: int, outputs: int, inputs: int) -> bool:
    """Return whether :func:`linear_backward` is meant for a layer and its batch. **Local.**"""
    return (
        0 < rows <= MOST_ROWS
        and 0 < outputs <= MOST_INNER
        and inputs > 0
        and rows * inputs <= 2 * MOST_ELEMENTS
        and outputs * inputs <= MOST_WEIGHTS
    )


def linear_backward(
    launch: Callable[..., None],
    g: Any,
    kept: Any,
    x: Any,
    weight: Any,
    into: tuple[tuple[Any, bool] | None, ...],
    multiprocessors: int,
) -> None:
    """Launch the whole backward of a linear layer as one kernel. **Local.**

    Args:
        launch: of ``CudaBase``.
        g: (rows, outputs), the gradient of the layer's result.
        kept: the result itself, where it went through ReLU; or None.
        x, weight: (rows, inputs) and (outputs, inputs). All are C-contiguous float32.
        into: of the gradients of x, weight and bias: None, or where it goes and whether it is added there.
        multiprocessors: of the GPU.
    """
    rows, outputs = g.shape
    inputs = x.shape[1]
    tile, split, part = backward_shape(
        rows, outputs, inputs, into[0] is not None, into[1] is not None, multiprocessors
    )
    tiles_x = 0 if into[0] is None else _tiles(rows, inputs, tile)
    tiles_weight = 0 if into[1] is None else _tiles(outputs, inputs, tile)
    blocks = tiles_x * split + tiles_weight + (0 if into[2] is None else -(-outputs // 32))
    places = [(None, False) if pair is None else pair for pair in into]
    packed = [
        int(width % 4 == 0 and all(a is None or a.data.ptr % 16 == 0 for a in arrays))
        for width, arrays in ((outputs, (g, kept)), (inputs, (x, weight)))
    ]
    built = (
        *_named(tile, split),
        "RELU",
        0,
        "ALONG_A",
        1,
        "ALONG_B",
        0,
        "PACKED_A",
        packed[0],
        "PACKED_B",
        packed[1],
    )
    launch(
        "small_products", "small_linear_backward", built, -(-blocks // split) * split, _threads(tile),
        g, kept, x, weight, *(array for array, _ in places), rows, outputs, inputs, part, tiles_x, tiles_weight,
        *(add for _, add in places),
    )  # fmt: skip


def backward_shape(
    rows: int, outputs: int, inputs: int, of_x: bool, of_weight: bool, multiprocessors: int
) -> tuple[Tile, int, int]:
    """Return what :func:`shape` returns for the gradient of x, with a tile that suits that of the weight too."""
    best: Any = None
    for candidate in _BACKWARD_TILES:
        *tile, cycles = candidate
        # Without the gradient of x one block does a tile.
        _, split, part = shape(rows, inputs, outputs if of_x else 1, multiprocessors, (candidate,))
        steps = rows * _tiles(outputs, inputs, tile) if of_weight else 0
        steps += part * split * _tiles(rows, inputs, tile) if of_x else 0
        longest = max(rows if of_weight else 1, part)
        cost = -(-steps // (longest * multiprocessors)) * longest * cycles + _joined(tile, split)
        if best is None or cost < best[0]:
            best = cost, tuple(tile), split, part
    return best[1:]


def _joined(tile: Any, split: int) -> float:
    """Return the cycles that the blocks of a cluster need to add their parts."""
    return _JOIN + _JOIN_ELEMENT * tile[0] * tile[1] if split > 1 else 0.0


def shape(
    rows: int, columns: int, inner: int, multiprocessors: int, tiles: tuple[Any, ...] = _TILES
) -> tuple[Tile, int, int]:
    """Return the tile, the blocks that share one, and the inner length of each, by estimated time. **Local.**"""
    best: Any = None
    for *tile, cycles in tiles:
        count = _tiles(rows, columns, tile)
        for split in _SPLITS:
            part = -(-inner // split // 4) * 4  # a multiple of four floats
            if split > 1 and (part < 16 or part * (split - 1) >= inner):
                continue
            cost = -(-count * split // multiprocessors) * cycles * part + _joined(tile, split)
            if best is None or cost < best[0]:
                best = cost, tuple(tile), split, part
    return best[1:]


def _tiles(rows: int, columns: int, tile: Any) -> int:
    return -(-rows // tile[0]) * -(-columns // tile[1])


def _threads(tile: Tile) -> int:
    down, across, groups = tile
    return 32 * -(-down // 32) * -(-across // 32) * groups


def _named(tile: Tile, split: int) -> tuple[Any, ...]:
    return "BM", tile[0], "BN", tile[1], "GROUPS", tile[2], "SPLIT", split
