"""Reading: samples of a data set, put together into batches.

A batch has the structure of a sample (an array, a tuple or a dict of them, nested) with a leading dimension on every
array. Random numbers of a sample are keyed by what :class:`Draw` says, never by who reads it or when.

Shapes: B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..device import device_of


class Draw(NamedTuple):
    """Which random numbers the samples of a batch are given, beside their own number.

    Attributes:
        seed: the run's seed.
        epoch: counted from 0.
    """

    seed: int = 0
    epoch: int = 0


_FIRST = Draw()


def check_dataset(dataset: Any) -> int:
    """Return the length of a data set.

    **Local.**

    Raises:
        TypeError: it has no ``__len__`` or no ``__getitem__``, or is a tuple of arrays that are no samples.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or isinstance(
        dataset, (str, dict)
    ):
        raise TypeError(
            f"dataset: expected an object with __len__ and __getitem__, got {type(dataset).__name__}; "
            "wrap arrays in data.ArrayDataset(x, y)"
        )
    if isinstance(dataset, tuple) and dataset and all(is_array(item) for item in dataset):
        shapes = [item.shape for item in dataset]
        if len(set(shapes)) > 1:  # inputs and targets, not samples
            raise TypeError(
                f"dataset: expected an object with __len__ and __getitem__, got a tuple of arrays of shapes "
                f"{', '.join(map(str, shapes))}; wrap arrays in data.ArrayDataset(x, y)"
            )
    return len(dataset)


def take(dataset: Any, indices: np.ndarray, where: str = "", draw: Draw = _FIRST) -> Any:
    """Return the batch of the given samples, or None if there are none and their shape is unknown.

    **Local.** In this order: an array is indexed; a data set with ``take_drawn(indices, draw)`` gives a whole batch,
    with random numbers; one with ``draw_samples(indices, draw)`` a list of samples; one with ``__getitems__(list)`` a
    list of samples; one with ``take(indices)`` a whole batch; any other is asked sample by sample, with Python
    integers.
    Lists of samples are stacked (:func:`stack`).

    Args:
        dataset: any object with ``__len__`` and ``__getitem__``.
        indices: int64 array of shape (B,).
        where: put into the note of an error, such as ``" (rank 1, epoch 0, update 3)"``.
        draw: which random numbers the samples are given, where they ask for some.

    Raises:
        Exception: what the data set raises, with a note that names the sample.
        ValueError: samples that do not fit together.
    """
    if len(indices) == 0 and not (getattr(dataset, "takes_none", False) or is_array(dataset)):
        return None
    many = "" if len(indices) == 0 else f"{len(indices)} samples, first sample {int(indices[0])}"
    if is_array(dataset):
        with _Note(many, where):
            return plain_rows(dataset[indices])
    if hasattr(dataset, "take_drawn"):
        with _Note(many, where):
            return _checked("take_drawn", dataset.take_drawn(indices, draw), len(indices))
    if hasattr(dataset, "take") and not (
        hasattr(dataset, "draw_samples") or hasattr(dataset, "__getitems__")
    ):
        with _Note(many, where):
            return _checked("take", dataset.take(indices), len(indices))
    items = read_samples(dataset, indices, where, draw)
    with _Note(many, where):
        return stack(items, indices)


def read_samples(dataset: Any, indices: np.ndarray, where: str = "", draw: Draw = _FIRST) -> list[Any]:
    """Return the given samples as a list; see :func:`take`. **Local.**"""
    many = f"{len(indices)} samples, first sample {int(indices[0])}" if len(indices) else "no sample"
    for method, arguments in (("draw_samples", (indices, draw)), ("__getitems__", (indices.tolist(),))):
        if hasattr(dataset, method):
            with _Note(many, where):
                items = list(getattr(dataset, method)(*arguments))
                if len(items) != len(indices):
                    raise ValueError(
                        f"{method}: expected {len(indices)} samples, got {len(items)}; return one an index"
                    )
            return items
    items = []
    for index in indices.tolist():
        with _Note(f"sample {index}", where):
            items.append(dataset[index])
    return items


def sample_note(index: int, where: str = "") -> _Note:
    """Return a context that names a sample on an error that passes through. **Local.**"""
    return _Note(f"sample {index}", where)


def _checked(method: str, batch: Any, count: int) -> Any:
    """Return a batch that a data set has put together, once each of its arrays has a row an index."""
    for path, array in leaves(batch, "batch"):
        shape = np.shape(array)
        if shape[:1] != (count,):
            raise ValueError(
                f"{method}: expected arrays of leading length {count}, got {shape} in {path}; return a row an index"
            )
    return batch


def stack(items: list[Any], indices: Any) -> Any:
    """Return one batch of equal samples.

    **Local.** Tuples and dicts keep their structure; arrays, numbers and lists of numbers become arrays
    with a new leading dimension.

    Args:
        items: at least one sample.
        indices: their numbers in the data set, for messages.

    Raises:
        ValueError: samples of unequal structure or shape; the message names the samples.
        TypeError: samples that are not numbers, or None.

    Example:
        >>> stack([(1.0, 2), (3.0, 4)], [0, 1])
        (array([1., 3.]), array([2, 4]))
    """
    numbers = [int(i) for i in indices]
    for item, index in zip(items, numbers):
        if item is None:
            raise TypeError(
                f"sample: expected (x, y), a dict or an array, got None in sample {index}; "
                "does __getitem__ return what it makes?"
            )
    return _stack(items, numbers, "sample")


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


def leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif isinstance(tree, tuple):
        for i, value in enumerate(tree):
            yield from leaves(value, f"{path}[{i}]")
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
        array = item if is_array(item) else np.asarray(item)
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


def is_array(value: Any) -> bool:
    """Return whether ``value`` is an array of NumPy or CuPy."""
    return isinstance(value, np.ndarray) or type(value).__module__.partition(".")[0] == "cupy"


def plain_rows(array: Any) -> Any:
    """Return rows in memory as a plain array; a slice of a mapped file is copied out of it."""
    if isinstance(array, np.memmap):
        return np.array(array)
    return array
