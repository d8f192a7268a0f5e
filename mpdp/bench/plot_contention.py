"""The plots of ``mpdp bench contention``: launches a second, latencies, and steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from .contention.figures import histogram_edges
from .plot import plotting


def plot_contention(result: dict[str, Any], path: str) -> None:
    """Draw launches a second against the number of workers, latencies as distributions, and steps. **Local.**"""
    pyplot = plotting()
    figure, axes = pyplot.subplots(2, 2, figsize=(13, 9), layout="constrained")
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["accepted"]:
            rows.setdefault(row["row"], []).append(row)
    (enqueued, completed), (latencies, steps) = axes
    for name, arms in rows.items():
        arms.sort(key=lambda row: row["k"])
        ks = [row["k"] for row in arms]
        (line,) = enqueued.plot(
            ks, [row["enqueued_per_second"] for row in arms], marker="o", markersize=3, label=name
        )
        completed.plot(
            ks, [row["per_second"] for row in arms], marker="o", markersize=3, color=line.get_color()
        )
        most = arms[-1]
        counts = np.array(most["histogram"])
        beyond = 1 - np.cumsum(counts) / counts.sum()
        latencies.step(
            histogram_edges(len(counts) + 1)[1:],
            np.maximum(beyond, 1e-7),
            where="post",
            color=line.get_color(),
        )
    enqueued.set(xscale="log", yscale="log", xlabel="workers", ylabel="launches a second, enqueued")
    completed.set(xscale="log", yscale="log", xlabel="workers", ylabel="launches a second, completed")
    for each in (enqueued, completed):
        each.set_xticks(sorted({row["k"] for row in result["rows"]}))
        each.get_xaxis().set_major_formatter("{x:g}")
        each.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    latencies.set(
        xlim=(0.5, None),
        xscale="log",
        yscale="log",
        xlabel="latency of a launch, us, most workers",
        ylabel="share that is longer",
    )
    for i, made in enumerate(result["steps"]):
        names = [name for name, seconds in made["blocks"].items() if seconds]
        if not names:  # the cores were busy
            continue
        places = np.arange(len(names)) + i * (len(names) + 1)
        steps.boxplot([np.array(made["blocks"][name]) * 1e6 for name in names], positions=places)
        for place, name in zip(places, names):
            steps.annotate(
                f"{name}, {made['kind']}", (place, 0), rotation=90, fontsize=7, ha="center", va="bottom"
            )
    steps.set(ylabel="step, us", ylim=(0, None), xticks=[])
    if rows:
        figure.legend(fontsize=7, loc="outside lower center", ncols=2)
    title = result.get("gpu", result["processor"])
    figure.suptitle(f"threads or processes: {title}\n{result['verdict']}", fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
