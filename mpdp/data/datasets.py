"""Datasets: samples from arrays, in memory or mapped from files, and windows of a stream of tokens.

A data set is any object with a length and samples; these two read many samples at once. They know nothing of ranks and
orders. Read next: ``reading``, for how samples become batches.

Shapes: N samples of the data set, B samples of a batch, T tokens of a context.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ..device import device_of
from .files import map_npy, map_npz, map_tokens
from .order import whole
from .reading import is_array, leaves, map_arrays, plain_rows


class ArrayDataset:
    """Serve samples from arrays that share one leading length.

    **Local.** Memory-mapped arrays stay mapped: a batch reads its own rows and no more, and the ranks
    of a node share the pages in the cache of the system.

    Args:
        arrays: each (N, ...): inputs, then the target last; tuples and dicts of arrays may stand in
            place of an array, as in ``ArrayDataset((left, right), y)``.
        named: in place of ``arrays``: samples are dicts, ``ArrayDataset(image=x, target=y)``.

    Attributes:
        arrays: what was given, as arrays: in the form of a batch of all samples.

    Raises:
        ValueError: unequal leading lengths, a 0-d array, or no array.
        TypeError: something that is no array of numbers.

    Example:
        >>> dataset = ArrayDataset(np.arange(6.0).reshape(3, 2), np.array([0, 1, 2]))
        >>> len(dataset), dataset[1]
        (3, (array([2., 3.]), np.int64(1)))
    """

    takes_none = True  # a batch of no samples has a shape

    def __init__(self, *arrays: Any, **named: Any) -> None:
        if bool(arrays) == bool(named):
            raise ValueError(
                f"arrays: expected arrays by position or by name, got {len(arrays)} and {len(named)}; "
                "pass ArrayDataset(x, y) or ArrayDataset(image=x, target=y)"
            )
        tree: Any = named if named else (arrays if len(arrays) > 1 else arrays[0])
        self.arrays = map_arrays(_as_array, tree, "arrays")
        lengths = {path: len(array) for path, array in leaves(self.arrays, "arrays")}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{length} in {path}" for path, length in lengths.items())
            raise ValueError(
                f"arrays: expected one leading length, got {shown}; inputs and targets need one row a sample"
            )
        self._length = next(iter(lengths.values()))

    @classmethod
    def from_npy(cls, *paths: str | os.PathLike[str], **named: str | os.PathLike[str]) -> ArrayDataset:
        """Serve samples from ``.npy`` files, mapped: nothing is read before a batch asks for its rows. **Local.**

        Args:
            paths: a file an array: inputs, then the target last.
            named: in place of ``paths``, as for the constructor.

        Raises:
            ValueError: a file that is no ``.npy``, or holds Python objects.
        """
        return cls(*map(map_npy, paths), **{name: map_npy(path) for name, path in named.items()})

    @classmethod
    def from_npz(cls, path: str | os.PathLike[str], *names: str) -> ArrayDataset:
        """Serve samples from arrays of one ``.npz`` file. **Local.**

        Those that are stored as they are (``numpy.savez``) stay in the file, mapped; compressed ones are read to
        memory, once a rank.

        Args:
            path: the file.
            names: of the arrays in it: inputs, then the target last (default: all, in the file's order).

        Raises:
            KeyError: no such array.
            ValueError: a file that is no ``.npz``, or holds Python objects.
        """
        return cls(*map_npz(path, names))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return map_arrays(lambda array, _: array[index], self.arrays)

    def take(self, indices: np.ndarray) -> Any:
        """Return the batch of the given samples: copies, in memory. **Local.**"""
        return map_arrays(lambda array, _: plain_rows(array[indices]), self.arrays)


class TokenDataset:
    """Serve windows of a long stream of tokens: predict each token from those before it.

    **Local.** Sample i is ``x = tokens[i T : (i + 1) T]`` and ``y``, the same shifted by one; windows do
    not overlap, and what is left behind the last whole one is not used.

    Args:
        tokens: one-dimensional integer array, such as a memory-mapped file.
        context: T, tokens a sample.

    Example:
        >>> dataset = TokenDataset(np.arange(8), context=3)
        >>> len(dataset), dataset[1]
        (2, (array([3, 4, 5]), array([4, 5, 6])))
    """

    takes_none = True

    def __init__(self, tokens: Any, context: int) -> None:
        tokens = _as_array(tokens, "tokens")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise TypeError(
                f"tokens: expected a one-dimensional integer array, got {tokens.dtype} {tokens.shape}; flatten it"
            )
        self.context = whole("context", context, 1)
        self._tokens = tokens

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], context: int, dtype: Any = None) -> TokenDataset:
        """Serve windows of a file of tokens, mapped. **Local.**

        Args:
            path: a ``.npy``, or a file of nothing but integers in this machine's order of bytes.
            context: T, tokens a sample.
            dtype: of the integers, such as ``"uint16"``; needed unless it is a ``.npy``.

        Raises:
            ValueError: no dtype, or a size that is no multiple of it.
        """
        return cls(map_tokens(path, dtype), context)

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        index = range(len(self))[index]  # negative ones count from the end; IndexError beyond
        window = self._tokens[index * self.context : (index + 1) * self.context + 1]
        return plain_rows(window[:-1]), plain_rows(window[1:])

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Return (x, y), each of shape (B, T). **Local.**"""
        xp = device_of(self._tokens).xp
        x = xp.empty((len(indices), self.context), self._tokens.dtype)
        y = xp.empty_like(x)
        for row, index in enumerate(indices.tolist()):
            x[row], y[row] = self[index]
        return x, y


def _as_array(value: Any, path: str) -> Any:
    """Return an array to keep: NumPy's (mapped ones stay mapped) and CuPy's as they are."""
    if not is_array(value):
        if isinstance(value, (str, bytes)):
            raise TypeError(
                f"{path}: expected an array, got the text {value!r}; "
                'load a file with numpy.load(path, mmap_mode="r")'
            )
        try:
            value = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"{path}: expected rows of one shape, got {error}; pad them") from error
    if value.dtype.kind in "OUSMm":
        raise TypeError(
            f"{path}: expected an array of numbers, got dtype {value.dtype}; encode it as numbers"
        )
    if value.ndim == 0:
        raise ValueError(
            f"{path}: expected a leading dimension of samples, got a 0-d array; one row a sample"
        )
    return value
