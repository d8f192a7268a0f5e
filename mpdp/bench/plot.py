"""Plots of measurements, where matplotlib is installed."""

from __future__ import annotations

from typing import Any

from ..errors import MissingDependencyError, on_all_ranks


def plotting() -> Any:
    """Return ``matplotlib.pyplot``, set to draw files. **Local.**

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise on_all_ranks(
            MissingDependencyError(
                f'--plot: expected matplotlib, got {error}; install it with: pip install "mpdp[plot]"'
            )
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_all_reduce(result: dict[str, Any], path: str) -> None:
    """Draw time and bandwidth against size. **Local.**"""
    pyplot = plotting()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    curves: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        curves.setdefault(f"{row['case']}, {row['dtype']}", []).append(row)
    for name, rows in curves.items():
        sizes = [row["bytes"] for row in rows]
        (line,) = left.plot(sizes, [row["us"] for row in rows], marker="o", markersize=3, label=name)
        left.fill_between(
            sizes,
            [row["quartiles_us"][0] for row in rows],
            [row["quartiles_us"][1] for row in rows],
            color=line.get_color(),
            alpha=0.2,
        )
        right.plot(sizes, [row["busbw"] for row in rows], marker="o", markersize=3, color=line.get_color())
    left.set(xscale="log", yscale="log", xlabel="bytes", ylabel="time, us")
    right.set(xscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s")
    left.legend(fontsize=8)
    figure.suptitle(f"all-reduce over {result['ranks']} ranks on {result['device']}, {result['processor']}")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
