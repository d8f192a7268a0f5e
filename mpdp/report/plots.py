"""Plots of runs: losses, metrics, learning rate, throughput, and where the time of a step goes; several runs overlaid.

Reads ``log.jsonl`` of run folders and nothing else. Needs matplotlib, which is imported when something is drawn.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import MissingDependencyError

_POINTS = 400  # of a smoothed curve
_PARTS = ("data", "messages", "compute")
_NO_METRIC = ("kind", "epoch", "step", "loss", "validation_loss")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's log; a last line that is torn is left out.

    **Local.**

    Raises:
        ValueError: no log there, or a line that is no row.
    """
    path = folder / "log.jsonl"
    if not os.path.isfile(path):  # False also where a name is too long
        raise ValueError(
            f"RUN_DIR: expected the folder of a run with log.jsonl, got {folder}; pass its run_dir"
        )
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            row["kind"]
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                continue
            raise ValueError(
                f"RUN_DIR: expected a row of a log, got line {number} of {path} ({error}); mend it"
            ) from error
        rows.append(row)
    return rows


def rows_of(log: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the rows of one kind. **Local.**"""
    return [row for row in log if row["kind"] == kind]


def curve(
    steps: Sequence[dict[str, Any]], name: str
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return steps, means, lowest and highest values of a column, in at most 400 groups of equal length.

    **Local.** Rows without a finite value are left out.

    Example:
        >>> curve([{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 1.0}], "loss")
        ([1, 3], [2.0, 1.0], [2.0, 1.0], [2.0, 1.0])
    """
    found = [(row["step"], row[name]) for row in steps if row.get(name) is not None]
    group = -(-len(found) // _POINTS) or 1
    pieces = [found[i : i + group] for i in range(0, len(found), group)]
    values = [[value for _, value in piece] for piece in pieces]
    return (
        [piece[-1][0] for piece in pieces],
        [statistics.fmean(v) for v in values],
        [min(v) for v in values],
        [max(v) for v in values],
    )


def throughput(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return samples a second of each update that says how many it had; the first includes start-up. **Local.**"""
    return [
        {"step": row["step"], "rate": row["samples"] / row["seconds"]}
        for row in steps[1:]
        if row.get("samples") and row.get("seconds")
    ]


def breakdown(log: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return milliseconds a step by what they were spent on: the mean over ranks at the end, else rank 0's updates.

    **Local.** Empty where the log does not say.
    """
    ranks = rows_of(log, "ranks")
    if ranks:
        rows = ranks[-1]["ranks"]
        return {part: 1e3 * statistics.fmean(row[part] for row in rows) for part in _PARTS}
    steps = [row for row in rows_of(log, "step")[1:] if "data_seconds" in row and "message_seconds" in row]
    if not steps:
        return {}
    data, messages, total = (
        1e3 * statistics.median(row[name] for row in steps)
        for name in ("data_seconds", "message_seconds", "seconds")
    )
    return {"data": data, "messages": messages, "compute": max(0.0, total - data - messages)}


def metric_names(logs: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    """Return the metrics that some epoch of some run has. **Local.**"""
    names = (name for log in logs for row in rows_of(log, "epoch") for name in row)
    return [name for name in dict.fromkeys(names) if name not in _NO_METRIC]


def plot_runs(logs: dict[str, list[dict[str, Any]]], path: Path) -> list[str]:
    """Draw runs over one another into a PNG, and return the titles of the panels.

    **Local.**

    Args:
        logs: name of a run to the rows of its log.
        path: of the PNG.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    pyplot = _plotting()
    metrics = metric_names(list(logs.values()))
    titles = ["loss", *metrics, "learning rate", "samples a second", "ms a step (mean over ranks)"]
    columns = 2 if len(titles) <= 4 else 3
    lines = -(-len(titles) // columns)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(5 * columns, 3.4 * lines), layout="constrained", squeeze=False
    )
    panels = dict(zip(titles, grid.reshape(-1)))
    for spare in grid.reshape(-1)[len(titles) :]:
        spare.set_axis_off()
    for number, (name, log) in enumerate(logs.items()):
        colour = f"C{number % 10}"
        steps, epochs = rows_of(log, "step"), rows_of(log, "epoch")
        _draw_curve(panels["loss"], steps, "loss", colour, name)
        _draw_epochs(panels["loss"], epochs, "validation_loss", colour, f"{name}, validation", linestyle="--")
        for metric in metrics:
            _draw_epochs(panels[metric], epochs, metric, colour, name)
        _draw_curve(panels["learning rate"], steps, "lr", colour, name)
        _draw_curve(panels["samples a second"], throughput(steps), "rate", colour, name)
    _draw_bars(panels[titles[-1]], {name: breakdown(log) for name, log in logs.items()})
    for title, panel in panels.items():
        panel.set_title(title, fontsize=10)
        panel.grid(alpha=0.3)
        if title != titles[-1]:
            panel.set_xlabel("update", fontsize=8)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return titles


def _draw_curve(panel: Any, rows: Sequence[dict[str, Any]], column: str, colour: str, label: str) -> None:
    x, mean, low, high = curve(rows, column)
    if x:
        panel.plot(x, mean, color=colour, label=label, linewidth=1.2, alpha=0.6)
        panel.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def _draw_epochs(
    panel: Any, rows: Sequence[dict[str, Any]], column: str, colour: str, label: str, **style: Any
) -> None:
    points = [(row["step"], row[column]) for row in rows if row.get(column) is not None]
    if points:
        panel.plot(*zip(*points), color=colour, marker="o", markersize=3, label=label, **style)


def _draw_bars(panel: Any, parts: dict[str, dict[str, float]]) -> None:
    known = {name: found for name, found in parts.items() if found}
    left = [0.0] * len(known)
    for part, colour in zip(_PARTS, ("tab:orange", "tab:purple", "tab:green")):
        widths = [found[part] for found in known.values()]
        panel.barh(list(known), widths, left=left, label=part, color=colour, height=0.5)
        left = [a + b for a, b in zip(left, widths)]
    panel.set_ylim(-0.5, len(known) + 0.3)  # room for the legend


def _plotting() -> Any:
    """Return ``matplotlib.pyplot``, set to draw files."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError(
            f'plot: expected matplotlib, got {error}; install it with: pip install "mpdp[plot]"'
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
