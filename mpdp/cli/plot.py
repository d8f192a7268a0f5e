"""``mpdp plot``: draw one run or several over one another, and print each rank's step times. Needs no MPI."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> int:
    """Draw runs and return the exit status. **Local.**"""
    parser = argparse.ArgumentParser(
        prog="mpdp plot",
        description="Draw loss, metrics, learning rate, throughput and where the time of a step goes.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", nargs="+", help="the run_dir of a Trainer")
    parser.add_argument(
        "-o",
        "--output",
        metavar="PATH.png",
        default=None,
        help="where (default: plots/run.png in RUN_DIR; of several runs runs.png here)",
    )
    parsed = parser.parse_args(arguments)
    from ..errors import MissingDependencyError
    from ..report import plots, step_times

    folders = [Path(text) for text in parsed.run_dir]
    try:
        logs = {name: plots.read_log(folder) for name, folder in zip(_names(folders), folders)}
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for name, log in logs.items():
        ranks = plots.rows_of(log, "ranks")
        if ranks:
            print(name if len(logs) > 1 else str(folders[0]))
            print(step_times.table(ranks[-1]["ranks"]))
            for line in step_times.stragglers(ranks[-1]["ranks"]):
                print(line)
    output = parsed.output or ("runs.png" if len(folders) > 1 else folders[0] / "plots" / "run.png")
    try:
        plots.plot_runs(logs, Path(output))
    except (MissingDependencyError, OSError) as error:
        sys.stderr.write(f"mpdp plot: error: {error}\n")
        return 1
    print(f"wrote {output}")
    return 0


def _names(folders: Sequence[Path]) -> list[str]:
    """Return a short name for each run: the end of its path that tells it from the others."""
    paths = [Path(os.path.abspath(folder)).parts for folder in folders]
    depth = 1
    while depth < max(map(len, paths)) and len({path[-depth:] for path in paths}) < len(set(paths)):
        depth += 1
    names: list[str] = []
    for path in paths:
        name = os.path.join(*path[-depth:])
        names.append(name if name not in names else f"{name} ({names.count(name) + 1})")
    return names
