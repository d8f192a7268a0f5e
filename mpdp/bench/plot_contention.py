"""The plots of ``mpdp bench contention``: launches a second, latencies, graphs, interference, and steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from .contention.figures import histogram_edges
from .contention.interference import NOTHING
from .plot import plotting

_DASHES = {"processes": "--", "processes MPS": ":"}
_SINGLE = (
    "kernel",
    "mock",
)  # words of what is drawn as launches; graphs have a plot of their own, calls a table


def plot_contention(result: dict[str, Any], path: str) -> None:
    """Draw what a run has found. **Local.**

    Launches a second against the number of workers, of one kernel and of graphs; latencies as distributions; what
    interferes; and steps.
    """
    pyplot = plotting()
    figure, axes = pyplot.subplots(2, 3, figsize=(18, 10), layout="constrained")
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["accepted"]:
            rows.setdefault(row["row"], []).append(row)
    single = {name: arms for name, arms in rows.items() if any(word in arms[0]["launch"] for word in _SINGLE)}
    (enqueued, completed, latencies), (graphs, beside, steps) = axes
    colors = pyplot.get_cmap("tab20").colors
    for i, (name, arms) in enumerate(single.items()):
        arms.sort(key=lambda row: row["k"])
        ks, style = [row["k"] for row in arms], _style(arms[0], colors[i % 20])
        enqueued.plot(ks, [row["enqueued_per_second"] for row in arms], label=name, **style)
        completed.plot(ks, [row["per_second"] for row in arms], **style)
        counts = np.array(arms[-1]["histogram"])
        beyond = np.maximum(1 - np.cumsum(counts) / counts.sum(), 1e-7)
        del style["marker"]
        latencies.step(histogram_edges(len(counts) + 1)[1:], beyond, where="post", **style)
    of_graphs = {name: arms for name, arms in rows.items() if arms[0]["launch"].startswith("graph")}
    lengths = sorted({int(arms[0]["launch"].split()[-1]) for arms in of_graphs.values()})
    for name, arms in of_graphs.items():
        arms.sort(key=lambda row: row["k"])
        nodes = int(arms[0]["launch"].split()[-1])
        rates, color = [row["per_second"] * nodes for row in arms], colors[2 * lengths.index(nodes)]
        graphs.plot([row["k"] for row in arms], rates, label=name, **_style(arms[0], color))
    enqueued.set(xscale="log", yscale="log", xlabel="workers", ylabel="launches a second, enqueued")
    completed.set(xscale="log", yscale="log", xlabel="workers", ylabel="launches a second, completed")
    graphs.set(xscale="log", yscale="log", xlabel="workers", ylabel="kernels a second by graphs, completed")
    for each in (enqueued, completed, graphs):
        each.set_xticks(sorted({row["k"] for row in result["rows"]}))
        each.get_xaxis().set_major_formatter("{x:g}")
        each.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    if graphs.lines:
        graphs.legend(fontsize=7)
    latencies.set(xlim=(0.5, None), xscale="log", yscale="log")
    latencies.set(xlabel="latency of a launch, us, most workers", ylabel="share that is longer")
    _draw_interference(beside, result.get("interference", []))
    _draw_steps(steps, result["steps"])
    if single:
        figure.legend(*enqueued.get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=3)
    title = result.get("gpu", result["processor"])
    figure.suptitle(f"threads or processes: {title}\n{result['verdict']}", fontsize=9)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _style(row: dict[str, Any], color: Any) -> dict[str, Any]:
    return {"color": color, "linestyle": _DASHES.get(row["workers"], "-"), "marker": "o", "markersize": 3}


def _draw_interference(axis: Any, rows: list[dict[str, Any]]) -> None:
    good = [row for row in rows if row["accepted"]]
    others = list(dict.fromkeys(row["other"] for row in good if row["other"] != NOTHING))
    for name, shift, by in (("a thread", -0.2, "thread"), ("a process", 0.2, "processes")):
        found = {row["other"]: row["p99_us"] for row in good if row["by"] == by}
        places = [i for i, other in enumerate(others) if other in found]
        axis.barh([i + shift for i in places], [found[others[i]] for i in places], 0.35, label=name)
    for row in good:
        if row["other"] == NOTHING:
            axis.axvline(row["p99_us"], color="black", linewidth=1, label="alone")
    axis.set_yticks(
        range(len(others)), [other.replace(" and ", "\n").replace(", ", "\n") for other in others], fontsize=7
    )
    axis.set(xlabel="99th percentile of a thread's launches beside, us", xscale="log" if good else "linear")
    if good:
        axis.legend(fontsize=7)


def _draw_steps(axis: Any, steps: list[dict[str, Any]]) -> None:
    names, samples = [], []
    for made in steps:
        for name, seconds in made["blocks"].items():
            if seconds:  # else the cores were busy
                names.append(f"{name}, {made['kind']}")
                samples.append(np.array(seconds) * 1e6)
    for i, each in enumerate(samples):
        axis.plot(each, [i] * len(each), "o", markersize=3, alpha=0.5, color="tab:blue")
        axis.plot(np.median(each), i, "|", markersize=12, color="black")
    if samples:
        axis.set(xscale="log")
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()
    axis.set(xlabel="step, us: blocks, and their median")
