"""The CUDA kernels that work with indices: label checks, embedding, scatter.

Part of ``kernels.cuda``, which assembles them; the docstrings are in ``kernels.base``. A check costs no wait: it
writes what it finds into pinned host memory, where :meth:`CudaIndices.pending_error` looks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .base import Array, Shape
from .cuda_source import THREADS, CudaBase, integer, types, whole_number
from .precision import wide

_TARGET, _EMBEDDING = range(2)
_SITES = {
    _TARGET: "target: expected class indices in 0..{last}, got {found}; check the labels or the model's outputs",
    _EMBEDDING: "embedding: expected indices in 0..{last}, got {found}; check the tokens or the size of the table",
}
_CHUNK = 65_536  # indices that one block checks
_RUN, _MERGED, _PIECE = 256, 16, 16  # as in segments.cu
_MOST = 2**32 - 1
_SUM_THREADS = 128
_WANTED_THREADS = 60_000  # of a sum whose threads read one number of each row after the other


class CudaIndices(CudaBase):
    """Label checks, embedding and scatter. **Local.**"""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self._step: Any = 0
        self._record: np.ndarray | None = None  # fields of indices.cu's Record, in pinned memory

    # -- errors that are found later -----------------------------------------------------------------------

    def begin_step(self, step: Any) -> None:
        self._step = step

    def pending_error(self) -> Exception | None:
        record = self._record
        if record is None or record[0] == 0:
            return None
        _, site, value, position, limit, inner, axes, step = (int(field) for field in record)
        record[0] = 0
        found = f"{value} at sample {position // max(inner, 1)}"
        if axes == 2:
            found += f", position ({position % inner},)"
        elif axes > 2:
            found += f", element {position % inner} of it"
        text = _SITES[site].format(last=limit - 1, found=found)
        return ValueError(f"{text} (found on {self.device} in step {step})")

    def _check(self, index: Array, limit: int, site: int, ignore: int | None) -> Array:
        """Start the check of flat indices; return how many are not ignored, as a 0-d float64 array."""
        xp = self.xp
        count = xp.empty((), np.float64)
        if index.size == 0:
            count.fill(0)
            return count
        flat = self.flat(index)
        shape = index.shape
        inner = math.prod(shape[1:])
        where = limit, site, inner, len(shape), *whole_number(self._step)
        built = ("INDEX", integer(index.dtype), *types(np.float32, np.float32))
        chunks = -(-index.size // _CHUNK)
        counts, firsts = (xp.empty(chunks, np.int64) if chunks > 1 else None for _ in range(2))
        threads = 1024 if index.size > THREADS else THREADS
        address = self._findings()
        self.launch(
            "indices", "check", built, chunks, threads, flat, index.size, _CHUNK, ignore or 0, ignore is not None,
            count, counts, firsts, address, *where,
        )  # fmt: skip
        if chunks > 1:
            found = count, counts, firsts, address
            self.launch("indices", "check_finish", built, 1, 1024, flat, chunks, *found, *where)
        return count

    def _findings(self) -> int:
        """Return the address of the record that checks write into."""
        if self._record is None:
            fields = self.xp.cuda.alloc_pinned_memory(64)
            self._record = np.frombuffer(fields, np.int64, 8)
            self._record[:] = 0
        return int(self._record.ctypes.data)

    def _check_and_loss(
        self, logits: Array, target: Array, ignore: int, count: Array, *outputs: Array
    ) -> None:
        """Check few targets, count them, and write tops, sums and the loss of their rows; see indices.cu."""
        rows, width = logits.shape
        where = width, _TARGET, 1, 1, *whole_number(self._step)
        lanes = 32
        while lanes > 4 and rows * lanes > 1024:  # rather all rows at once than few steps for each
            lanes //= 2
        built = ("INDEX", integer(target.dtype), *types(logits.dtype, outputs[-1].dtype), "LANES", lanes)
        self.launch(
            "indices", "check_and_loss", built, 1, 1024, target, rows, width, ignore, count, self._findings(),
            logits, *outputs, *where,
        )  # fmt: skip

    def check_class_indices(self, target: Array, classes: int, ignore_index: int | None) -> Array:
        return self._check(target, classes, _TARGET, ignore_index)

    # -- rows by index -------------------------------------------------------------------------------------

    def embedding(self, weight: Array, index: Array) -> Array:
        rows, width = weight.shape
        out = self.xp.empty((*index.shape, width), weight.dtype)
        self._check(index, rows, _EMBEDDING, None)
        if out.size:
            built = ("INDEX", integer(index.dtype), *types(weight.dtype, weight.dtype))
            self.launch(
                "indices", "gather", built, -(-index.size // 8), (32, 8),
                self.flat(weight), self.flat(index), out, index.size, rows, width,
            )  # fmt: skip
        return out

    def embedding_backward(
        self, g: Array, index: Array, rows: int, out: Array | None = None, beta: float = 0.0
    ) -> Array:
        xp, width = self.xp, g.shape[-1]
        if out is None:
            out, beta = xp.empty((rows, width), g.dtype), 0.0
        if out.size == 0:
            return out
        target = out if out.flags.c_contiguous else xp.empty(out.shape, out.dtype)
        accumulate = beta != 0.0 and target is out
        if not accumulate:
            target.fill(0)
        count = index.size
        if count:
            g = self.flat(g)
            ordered = self._ordered(index, rows)
            pack = _pack(width, g, target)
            built = ("INDEX", integer(index.dtype), *types(g.dtype, target.dtype), "N", pack)
            pieces = -(-count // _PIECE)
            parts = xp.empty((pieces, 2, width), wide(g.dtype))
            blocks = -(-pieces * (width // pack) // _SUM_THREADS)
            shape = count, width, accumulate
            self.launch(
                "segments", "piece_sums", built, blocks, _SUM_THREADS, g, ordered, parts, target, *shape
            )
            self.launch(
                "segments", "piece_finish", built, blocks, _SUM_THREADS, ordered, parts, target, *shape
            )
        return out if target is out else self.store(target, out, beta)

    def _ordered(self, index: Array, rows: int) -> Array:
        """Return the indices, each with its position below it in 64 bits, in ascending order."""
        if max(rows, index.size) >= _MOST:
            raise ValueError(
                f"index: expected fewer than 2^32 - 1 rows and indices, got {rows} and {index.size}; cut them"
            )
        count = index.size
        built = ("INDEX", integer(index.dtype), *types(np.float32, np.float32), "N", 1)
        ordered = self.xp.empty(count, np.uint64)
        blocks = -(-count // _RUN)
        self.launch("segments", "sort_runs", built, blocks, _RUN, self.flat(index), ordered, count, rows)
        length = _RUN
        while length < count:
            merged = self.xp.empty(count, np.uint64)
            blocks = -(-count * _MERGED // THREADS)
            self.launch("segments", "merge_runs", built, blocks, THREADS, ordered, merged, count, length)
            ordered, length = merged, length * _MERGED
        return ordered

    def token_embedding(self, tokens: Array, positions: Array, index: Array) -> Array:
        rows, width = tokens.shape
        length = index.shape[-1]
        self._check(index, rows, _EMBEDDING, None)
        out = self.xp.empty((*index.shape, width), tokens.dtype)
        if out.size:
            tokens, positions = self.flat(tokens), self.flat(positions)
            pack = _pack(width, tokens, positions, out)
            built = ("INDEX", integer(index.dtype), *types(tokens.dtype, tokens.dtype), "N", pack)
            self.launch(
                "tokens", "token_sums", built, -(-out.size // pack // THREADS), THREADS,
                tokens, positions, self.flat(index), out, index.size, rows, length, width,
            )  # fmt: skip
        return out

    def _first_axis_sums(self, g: Array, out: Array | None, beta: float) -> Array:
        """Return the sum of g (count, ...) over its first axis, in order."""
        if out is None:
            out, beta = self.xp.empty(g.shape[1:], g.dtype), 0.0
        target = out if out.flags.c_contiguous else self.xp.empty(out.shape, out.dtype)
        if target.size:
            g = self.flat(g)
            pack = _pack(target.size, g, target)
            while pack > 2 and target.size // pack < _WANTED_THREADS:
                pack //= 2
            built = ("INDEX", "int", *types(g.dtype, target.dtype), "N", pack)
            blocks = -(-target.size // pack // _SUM_THREADS)
            accumulate = beta != 0.0 and target is out
            self.launch(
                "tokens", "first_axis_sums", built, blocks, _SUM_THREADS,
                g, target, len(g), target.size, accumulate,
            )  # fmt: skip
        return out if target is out else self.store(target, out, beta)

    def scatter(self, g: Array, index: Any, shape: Shape) -> Array:
        xp = self.xp
        parts = index if isinstance(index, tuple) else (index,)
        arrays = [part for part in parts if isinstance(part, xp.ndarray | np.ndarray | list)]
        if not arrays:
            out = xp.zeros(shape, g.dtype)
            out[index] = g
            return out
        if len(parts) == 1 and isinstance(index, xp.ndarray) and index.dtype.kind in "iu" and len(shape) > 1:
            keys = index.astype(np.int64, copy=False)
            rows = xp.where(keys < 0, keys + shape[0], keys)
            flat = g.reshape(index.size, math.prod(shape[1:]))
            return self.embedding_backward(flat, rows, shape[0]).reshape(shape)
        # An element may be chosen more than once: look its number up, then add by number, in a fixed order.
        size = math.prod(shape)
        chosen = xp.arange(size).reshape(shape)[index]
        return self.embedding_backward(g.reshape(chosen.size, 1), chosen.reshape(-1), size).reshape(shape)


def _pack(width: int, *arrays: Array) -> int:
    """Return how many neighbours a thread takes at once: up to 16 bytes of the first array, if all allow it."""
    n = 16 // arrays[0].dtype.itemsize
    while n > 1 and (width % n or any(a.data.ptr % min(16, n * a.dtype.itemsize) for a in arrays)):
        n //= 2
    return n
