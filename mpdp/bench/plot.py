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


def plot_train(result: dict[str, Any], path: str) -> None:
    """Draw each system's step time and what kinds of work it goes to, where that is known. **Local.**"""
    pyplot = plotting()
    figure, axes = pyplot.subplots(figsize=(9, 1.9 + 0.5 * len(result["sides"])), layout="constrained")
    colours: dict[str, Any] = {}
    wheel = pyplot.get_cmap("tab20").colors
    names = [row["name"] for row in result["sides"]]
    for row in result["sides"]:
        left = 0.0
        for kind, value in (row["breakdown_us"] or {"step": row["step_us"]}).items():
            first = kind not in colours
            colours.setdefault(kind, wheel[len(colours) % len(wheel)])
            axes.barh(
                row["name"], value, left=left, color=colours[kind], label=kind if first else None, height=0.6
            )
            left += value
        low, high = row["quartiles_us"]
        step = row["step_us"]
        axes.errorbar(step, row["name"], xerr=[[step - low], [high - step]], color="black", capsize=3)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="us a step; bar: medians by kind of work, whisker: quartiles of blocks")
    figure.legend(fontsize=8, ncols=6, loc="outside lower center")
    axes.set_title(
        f"{result['workload']}, {result['precision']}, {result['ranks']} x {result['processor']}", fontsize=10
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
