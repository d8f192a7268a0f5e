"""Datasets: things with a length and samples, and how the samples of one batch are put together.

A batch has the structure of a sample (an array, a tuple or a dict of them, nested) with a leading
dimension on every array. It knows nothing of ranks and orders. Read next: ``loader``.

Shapes: N samples of the data set, B samples of a batch, T tokens of a context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..device import device_of
from .order import whole


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

    def __init__(self, *arrays: Any, **named: Any) -> None:
        if bool(arrays) == bool(named):
            raise ValueError(
                f"arrays: expected arrays by position or by name, got {len(arrays)} and {len(named)}; "
                "pass ArrayDataset(x, y) or ArrayDataset(image=x, target=y)"
            )
        tree: Any = named if named else (arrays if len(arrays) > 1 else arrays[0])
        self.arrays = map_arrays(_as_array, tree, "arrays")
        lengths = {path: len(array) for path, array in _leaves(self.arrays, "arrays")}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{length} in {path}" for path, length in lengths.items())
            raise ValueError(
                f"arrays: expected one leading length, got {shown}; inputs and targets need one row a sample"
            )
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return map_arrays(lambda array, _: array[index], self.arrays)

    def take(self, indices: np.ndarray) -> Any:
        """Return the batch of the given samples: copies, in memory. **Local.**"""
        return map_arrays(lambda array, _: _plain(array[indices]), self.arrays)


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

    def __init__(self, tokens: Any, context: int) -> None:
        tokens = _as_array(tokens, "tokens")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise TypeError(
                f"tokens: expected a one-dimensional integer array, got {tokens.dtype} {tokens.shape}; flatten it"
            )
        self.context = whole("context", context, 1)
        self._tokens = tokens

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        index = range(len(self))[index]  # negative ones count from the end; IndexError beyond
        window = self._tokens[index * self.context : (index + 1) * self.context + 1]
        return _plain(window[:-1]), _plain(window[1:])

    def take(self, indices: np.ndarray) -> tuple[Any, Any]:
        """Return (x, y), each of shape (B, T). **Local.**"""
        xp = device_of(self._tokens).xp
        x = xp.empty((len(indices), self.context), self._tokens.dtype)
        y = xp.empty_like(x)
        for row, index in enumerate(indices.tolist()):
            x[row], y[row] = self[index]
        return x, y


def check_dataset(dataset: Any) -> int:
    """Return the length of a data set.

    **Local.**

    Raises:
        TypeError: it has no ``__len__`` or no ``__getitem__``.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(
        dataset, (str, dict)
    ):
        raise TypeError(
            f"dataset: expected an object with __len__ and __getitem__, got {type(dataset).__name__}; "
            "wrap arrays in data.ArrayDataset(x, y)"
        )
    return len(dataset)


def take(dataset: Any, indices: np.ndarray, where: str = "") -> Any:
    """Return the batch of the given samples, or None if there are none and their shape is unknown.

    **Local.** In this order: an array is indexed; a data set with ``__getitems__(list)`` gives a list of
    samples; one with ``take(indices)`` gives a whole batch; any other is asked sample by sample, with
    Python integers. Lists of samples are stacked (:func:`stack`).

    Args:
        dataset: any object with ``__len__`` and ``__getitem__``.
        indices: int64 array of shape (B,).
        where: put into the note of an error, such as ``" (rank 1, epoch 0, update 3)"``.

    Raises:
        Exception: what the data set raises, with a note that names the sample.
        ValueError: samples that do not fit together.
    """
    if len(indices) == 0 and not (isinstance(dataset, (ArrayDataset, TokenDataset)) or _is_array(dataset)):
        return None
    many = "" if len(indices) == 0 else f"{len(indices)} samples, first sample {int(indices[0])}"
    if _is_array(dataset):
        with _Note(many, where):
            return _plain(dataset[indices])
    if hasattr(dataset, "__getitems__"):
        with _Note(many, where):
            items = list(dataset.__getitems__(indices.tolist()))
            if len(items) != len(indices):
                raise ValueError(
                    f"__getitems__: expected {len(indices)} samples, got {len(items)}; return one an index"
                )
    elif hasattr(dataset, "take"):
        with _Note(many, where):
            batch = dataset.take(indices)
            for path, array in _leaves(batch, "batch"):
                shape = np.shape(array)
                if shape[:1] != (len(indices),):
                    raise ValueError(
                        f"take: expected arrays of leading length {len(indices)}, got {shape} in {path}; "
                        "return a row an index"
                    )
            return batch
    else:
        items = []
        for index in indices.tolist():
            with _Note(f"sample {index}", where):
                items.append(dataset[index])
    with _Note(many, where):
        return stack(items, indices)


def stack(items: list[Any], indices: Any) -> Any:
    """Return one batch of equal samples.

    **Local.** Tuples and dicts keep their structure; arrays, numbers and lists of numbers become arrays
    with a new leading dimension.

    Args:
        items: at least one sample.
        indices: their numbers in the data set, for messages.

    Raises:
        ValueError: samples of unequal structure or shape; the message names the samples.
        TypeError: samples that are not numbers.

    Example:
        >>> stack([(1.0, 2), (3.0, 4)], [0, 1])
        (array([1., 3.]), array([2, 4]))
    """
    return _stack(items, [int(i) for i in indices], "sample")


def split_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return what a model is called with, and the target: ``model(*inputs, **kwargs)``.

    **Local.**

    ==============================  ===========================
    batch                           call
    ==============================  ===========================
    ``(x, y)``, ``(x1, x2, y)``     ``model(x)``, ``model(x1, x2)``
    ``((x1, x2), y)``               ``model(x1, x2)``
    ``({"a": a, "b": b}, y)``       ``model(a=a, b=b)``
    ``{"a": a, "target": y}``       ``model(a=a)``
    ``x``, ``(x,)``                 ``model(x)``, target None
    ==============================  ===========================

    Raises:
        ValueError: a dict without "target", or an empty tuple.

    Example:
        >>> split_batch(((1, 2), 3))
        ((1, 2), {}, 3)
    """
    if isinstance(batch, dict):
        if "target" not in batch:
            raise ValueError(
                f'batch: expected a key "target", got {sorted(map(str, batch))}; name the target so'
            )
        return (), {key: value for key, value in batch.items() if key != "target"}, batch["target"]
    if not isinstance(batch, (tuple, list)):
        return (batch,), {}, None
    if len(batch) == 0:
        raise ValueError("batch: expected inputs and a target, got an empty tuple; return (x, y)")
    if len(batch) == 1:
        return (batch[0],), {}, None
    if len(batch) == 2 and isinstance(batch[0], dict):
        return (), dict(batch[0]), batch[1]
    if len(batch) == 2 and isinstance(batch[0], (tuple, list)):
        return tuple(batch[0]), {}, batch[1]
    return tuple(batch[:-1]), {}, batch[-1]


def map_arrays(function: Callable[[Any, str], Any], tree: Any, path: str = "batch") -> Any:
    """Return a tree of the same structure with ``function(array, path)`` of each array. **Local.**"""
    if isinstance(tree, dict):
        return {key: map_arrays(function, value, f"{path}[{key!r}]") for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_arrays(function, value, f"{path}[{i}]") for i, value in enumerate(tree))
    return None if tree is None else function(tree, path)


class _Note:
    """Note which samples were being loaded on an error that passes through."""

    def __init__(self, what: str, where: str) -> None:
        self._what, self._where = what, where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            error.add_note(f"while loading {self._what}{self._where}")


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}[{key!r}]")
    elif isinstance(tree, tuple):
        for i, value in enumerate(tree):
            yield from _leaves(value, f"{path}[{i}]")
    elif tree is not None:
        yield path, tree


def _stack(items: list[Any], indices: list[int], path: str) -> Any:
    first = items[0]
    if isinstance(first, dict):
        for item, index in zip(items, indices):
            if not isinstance(item, dict) or item.keys() != first.keys():
                keys = sorted(map(str, item)) if isinstance(item, dict) else type(item).__name__
                raise ValueError(
                    f"{path}: expected keys {sorted(map(str, first))} as in sample {indices[0]}, "
                    f"got {keys} in sample {index}; give every sample one structure"
                )
        return {key: _stack([item[key] for item in items], indices, f"{path}[{key!r}]") for key in first}
    if isinstance(first, tuple):
        for item, index in zip(items, indices):
            if not isinstance(item, tuple) or len(item) != len(first):
                got = f"{len(item)}" if isinstance(item, tuple) else type(item).__name__
                raise ValueError(
                    f"{path}: expected a tuple of {len(first)} as in sample {indices[0]}, "
                    f"got {got} in sample {index}; give every sample one structure"
                )
        return tuple(_stack([item[i] for item in items], indices, f"{path}[{i}]") for i in range(len(first)))
    if first is None and all(item is None for item in items):
        return None
    arrays = [_number_array(item, index, path) for item, index in zip(items, indices)]
    for array, index in zip(arrays, indices):
        if array.shape != arrays[0].shape:
            raise ValueError(
                f"{path}: expected shape {arrays[0].shape} as in sample {indices[0]}, "
                f"got {array.shape} in sample {index}; pad or crop samples to one shape"
            )
    return device_of(arrays[0]).xp.stack(arrays)


def _number_array(item: Any, index: int, path: str) -> Any:
    try:
        array = item if _is_array(item) else np.asarray(item)
    except ValueError as error:  # a ragged list
        raise ValueError(
            f"{path}: expected numbers of one shape, got {error} in sample {index}; "
            "return a tuple (x, y) for several arrays"
        ) from error
    if isinstance(item, (tuple, dict)) or array.dtype.kind in "OUSMm":
        raise TypeError(
            f"{path}: expected numbers or arrays of them, got {type(item).__name__} in sample {index}; "
            "encode it as numbers"
        )
    return array


def _as_array(value: Any, path: str) -> Any:
    """Return an array to keep: NumPy's (mapped ones stay mapped) and CuPy's as they are."""
    if not _is_array(value):
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


def _is_array(value: Any) -> bool:
    """Return whether ``value`` is an array of NumPy or CuPy."""
    return isinstance(value, np.ndarray) or type(value).__module__.partition(".")[0] == "cupy"


def _plain(array: Any) -> Any:
    """Return rows in memory as a plain array; a slice of a mapped file is copied out of it."""
    if isinstance(array, np.memmap):
        return np.array(array)
    return array
