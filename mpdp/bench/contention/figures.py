"""From samples to figures: medians, scaling from one to k workers, and bootstrap intervals of ratios."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

QUANTILES = {"p50_us": 50.0, "p99_us": 99.0, "p99_9_us": 99.9}
_STEPS = 10  # of a histogram, in a factor of ten
RESAMPLES = 2000


def latency_figures(latencies: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return quantiles of all workers' latencies in microseconds, and their histogram.

    **Local.**

    Args:
        latencies: in nanoseconds.

    Returns:
        ``QUANTILES``, ``max_us`` and ``histogram``: counts by powers of ten cut into ten, from 0.1 us on.
    """
    all_us = np.concatenate(latencies) / 1000
    found: dict[str, Any] = {
        name: round(float(value), 3)
        for name, value in zip(QUANTILES, np.percentile(all_us, list(QUANTILES.values())))
    }
    bins = np.floor(np.log10(np.maximum(all_us, 0.1)) * _STEPS).astype(int) + _STEPS
    return {**found, "max_us": round(float(all_us.max()), 3), "histogram": np.bincount(bins).tolist()}


def histogram_edges(bins: int) -> list[float]:
    """Return the lower edges of a histogram's bins, in microseconds. **Local.**"""
    return [10 ** ((i - _STEPS) / _STEPS) for i in range(bins)]


def interval(
    above: Sequence[float], below: Sequence[float], resamples: int = RESAMPLES
) -> tuple[float, float, float]:
    """Return the ratio of two medians, and its 95 % bootstrap interval.

    **Local.** Both are resampled; always with the same random numbers.

    Example:
        >>> interval([4.0, 4.0, 4.0], [2.0, 2.0, 2.0])
        (2.0, 2.0, 2.0)
    """
    random = np.random.default_rng(0)
    a, b = np.asarray(above, float), np.asarray(below, float)
    tops = np.median(a[random.integers(0, len(a), (resamples, len(a)))], axis=1)
    bottoms = np.median(b[random.integers(0, len(b), (resamples, len(b)))], axis=1)
    low, high = np.percentile(tops / bottoms, [2.5, 97.5])
    return float(np.median(a) / np.median(b)), float(low), float(high)


def summary(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row an arm: medians over its accepted repetitions, and its scaling from the arm with k = 1.

    **Local.** Scaling is of the rate of enqueueing and of that of completion, each with its interval; None where the
    arm with one worker has no accepted repetition.
    """
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for sample in samples:
        groups.setdefault((sample["row"], sample["k"]), []).append(sample)
    rows = []
    for (row, k), group in groups.items():
        good = [sample for sample in group if sample["accepted"]]
        first = group[0]
        made: dict[str, Any] = {
            "row": row,
            "k": k,
            "workers": first["workers"],
            "loop": first["loop"],
            "launch": first["launch"],
            "accepted": len(good),
            "refused": len(group) - len(good),
        }
        if good:
            for name in (
                "per_second", "enqueued_per_second", "p50_us", "p99_us", "p99_9_us", "max_us", "least_share",
                "most_share", "cpu_seconds_per_million", "voluntary_switches", "involuntary_switches",
            ):  # fmt: skip
                values = [sample[name] for sample in good if sample[name] is not None]
                made[name] = statistics.median(values) if values else None
            length = max(len(sample["histogram"]) for sample in good)
            total = np.zeros(length, int)
            for sample in good:
                total[: len(sample["histogram"])] += sample["histogram"]
            made["histogram"] = total.tolist()
            alone = [s for s in groups.get((row, 1), []) if s["accepted"]]
            for name in ("per_second", "enqueued_per_second"):
                key = name.replace("per_second", "scaling")
                made[key] = (
                    interval([s[name] for s in good], [s[name] for s in alone]) if alone and k > 1 else None
                )
        rows.append(made)
    return rows
