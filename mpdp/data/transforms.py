"""Transforms: a data set seen through a function of each sample, with random numbers that belong to the sample.

What a sample is given depends on the run's seed, the epoch and the sample's number alone. So augmentation is the same
for every number of ranks and workers, and in a run that was resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..kernels.random import derive_key
from .reading import Draw, check_dataset, read_samples, sample_note


def sample_random(draw: Draw, index: int, level: int = 1) -> np.random.Generator:
    """Return the random numbers of one sample.

    **Local.** About 10 us. NumPy's own Philox (4x64) with a key of (seed, epoch, level) and the sample's number in the
    upper words of the counter, which a sample never reaches from below: streams do not overlap.

    Args:
        draw: seed and epoch.
        index: the sample's number in its data set.
        level: tells transforms apart that are put around one another.

    Example:
        >>> a, b = (sample_random(Draw(0, 3), 7).integers(0, 1000, 3).tolist() for _ in range(2))
        >>> a == b
        True
    """
    low, high = derive_key(draw.seed, "augmentation", draw.epoch, level)
    key = np.array([low | high << 32, 0], dtype=np.uint64)
    counter = np.array([0, 0, 0, index], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


class Transform:
    """Serve ``function(sample)`` of each sample of a data set.

    **Local.**

    Args:
        dataset: any data set.
        function: called with a sample; returns a sample. With ``random`` it is called as ``function(sample, random)``.
        random: hand over a ``numpy.random.Generator`` that belongs to (seed, epoch, sample): the trainer's seed, and
            its epoch; in evaluation the epoch is 0.

    Example:
        >>> from mpdp import data
        >>> numbers = data.ArrayDataset(np.arange(4.0), np.arange(4))
        >>> noisy = Transform(numbers, lambda sample, random: (sample[0] + random.normal(), sample[1]), random=True)
        >>> len(noisy), bool(noisy[2][0] == noisy[2][0]), bool(noisy[2][0] - 2 == noisy[1][0] - 1)
        (4, True, False)
    """

    def __init__(self, dataset: Any, function: Callable[..., Any], random: bool = False) -> None:
        check_dataset(dataset)
        if not callable(function):
            raise TypeError(
                f"function: expected a function of a sample, got {type(function).__name__}; pass one"
            )
        self.dataset, self.function, self.random = dataset, function, bool(random)
        self.level: int = getattr(dataset, "level", 0) + 1

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return a sample with the random numbers of seed 0, epoch 0."""
        return self.draw_samples(np.array([range(len(self))[index]]), Draw())[0]

    def draw_samples(self, indices: np.ndarray, draw: Draw) -> list[Any]:
        """Return the given samples. **Local.**"""
        samples = read_samples(self.dataset, indices, draw=draw)
        for place, index in enumerate(indices.tolist()):
            with sample_note(index):
                sample = samples[place]
                samples[place] = (
                    self.function(sample, sample_random(draw, index, self.level))
                    if self.random
                    else self.function(sample)
                )
        return samples

    def describe(self) -> dict[str, Any]:
        """Return what ranks compare. **Local.**"""
        return describe_dataset(self.dataset)


class Select:
    """Serve ``(inputs..., target)`` from samples that are dicts, as those of Hugging Face ``datasets`` are.

    **Local.**

    Args:
        dataset: any data set whose samples are dicts.
        inputs: the key of the model's input, or several.
        target: the key of the target; None leaves it out.

    Example:
        >>> rows = [{"text": [1, 2], "mask": [1, 1], "label": 0}, {"text": [3, 4], "mask": [1, 0], "label": 1}]
        >>> Select(rows, "text", "label")[1]
        ([3, 4], 1)
        >>> Select(rows, ("text", "mask"), "label")[1]
        ([3, 4], [1, 0], 1)
    """

    def __init__(self, dataset: Any, inputs: str | Sequence[str], target: str | None = None) -> None:
        check_dataset(dataset)
        self.dataset = dataset
        self.keys = ((inputs,) if isinstance(inputs, str) else tuple(inputs)) + (
            () if target is None else (target,)
        )
        if not self.keys:
            raise ValueError("inputs: expected one key or several, got none; name what the model takes")
        self.level: int = getattr(dataset, "level", 0)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self._pick(self.dataset[index])

    def draw_samples(self, indices: np.ndarray, draw: Draw) -> list[Any]:
        """Return the given samples. **Local.**"""
        return [self._pick(sample) for sample in read_samples(self.dataset, indices, draw=draw)]

    def describe(self) -> dict[str, Any]:
        """Return what ranks compare. **Local.**"""
        return describe_dataset(self.dataset)

    def _pick(self, sample: Any) -> Any:
        if not isinstance(sample, dict):
            raise TypeError(
                f"sample: expected a dict, got {type(sample).__name__}; Select is for data sets with named columns"
            )
        missing = [key for key in self.keys if key not in sample]
        if missing:
            raise KeyError(
                f"sample: expected {missing[0]!r} among {', '.join(map(str, sample))}; name its keys"
            )
        values = tuple(sample[key] for key in self.keys)
        return values if len(values) > 1 else values[0]


def describe_dataset(dataset: Any) -> dict[str, Any]:
    """Return what ranks compare of a data set beside its length: what its ``describe()`` says. **Local.**"""
    found = dataset.describe() if isinstance(getattr(type(dataset), "describe", None), _FUNCTION) else {}
    return found if isinstance(found, dict) else {}


_FUNCTION = type(describe_dataset)
