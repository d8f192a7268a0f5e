"""The rounds of ``mpdp bench faults``: trial after trial, a row each as they come, and the table in the end."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ... import __version__
from ...comm.tuned import processor
from ...cores import cores
from ...errors import LaunchError
from .jobs import Mpi
from .kinds import KINDS
from .trial import Trial, Trials

TRIALS = 320
SIZES = (2, 3, 4)
# One of each way to end, and no stall but one: those take their timeout.
QUICK = ("dataset", "worker", "exit_0", "return", "os_exit_3", "kill", "crash", "stopped", "launcher_killed", "nan",
         "flipped_bit", "skipped_batch")  # fmt: skip


def run(
    *,
    device: str = "cpu",
    quick: bool = False,
    trials: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    kinds: Sequence[str] | None = None,
    pythons: Sequence[str] = (),
    json_path: str | None = None,
) -> int:
    """Break jobs, print a row for each kind and what went wrong. **Local.** It starts the jobs itself.

    Args:
        device: of the ranks, ``"cpu"`` or ``"cuda"``.
        quick: a dozen faults of two ranks.
        trials: faults (default: 320).
        seconds: after which no fault is begun.
        seed: of the moments.
        kinds: some of ``kinds.KINDS`` (default: all that the device has).
        pythons: interpreters beside this one, each with another MPI.
        json_path: file of the JSON object; the rows come into ``PATH.rows.jsonl`` one by one, and those that are there
            are not run again. ``-`` is stdout, and keeps no rows.

    Returns:
        the exit status: 1 where anything is not as promised.
    """
    say = sys.stderr if json_path == "-" else sys.stdout
    chosen = tuple(
        kinds or (QUICK if quick else [k for k, kind in KINDS.items() if kind.device in ("cpu", device)])
    )
    try:
        found = [Mpi.of(python) for python in (sys.executable, *pythons)]
    except LaunchError as error:
        print(f"mpdp bench faults: error: {error}", file=sys.stderr)
        return 1
    mpis = {mpi.family: mpi for mpi in found}
    count = trials or (len(chosen) if quick else TRIALS)
    plan: dict[str, Any] = {"seed": seed, "kinds": list(chosen), "mpis": {f: str(m.library) for f, m in mpis.items()},
            "sizes": list(SIZES[:1] if quick else SIZES), "device": device}  # fmt: skip
    keep = None if json_path in (None, "-") else Path(f"{json_path}.rows.jsonl")
    rows = _kept(keep, plan)
    if rows:
        print(f"{len(rows)} faults are in {keep} already", file=say, flush=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mpdp-faults-") as folder:
        todo = Trials(mpis, Path(folder))
        for number in range(len(rows), count):
            if seconds is not None and time.monotonic() - begin > seconds:
                break
            trial = Trial.drawn(number, seed, chosen, list(mpis), plan["sizes"], device)
            row = todo.run(trial).row()
            rows.append(row)
            _keep(keep, row)
            print(line(row), file=say, flush=True)
    result = summary(rows) | {
        "plan": plan,
        "asked": count,
        "mpdp": __version__,
        "python": platform.python_version(),
        "processor": processor(),
        "cores": cores(),
        "seconds": round(time.monotonic() - begin, 1),
    }
    print("\n".join(table(result)), file=say, flush=True)
    if json_path == "-":
        print(json.dumps(result))
    elif json_path is not None:
        Path(json_path).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["wrong"] else 0


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all trials, and of each group of kinds. **Local.**

    Example:
        >>> row = {"kind": "kill", "seconds": 0.2, "hung": False, "false_success": False, "lost_status": False,
        ...        "orphans": 0, "lost": False, "reported": True, "wrong": []}
        >>> summary([row, {**row, "seconds": 0.4}])["groups"]["kill"]["p95_seconds"]
        0.4
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(KINDS[row["kind"]].group, []).append(row)
    return {
        **_figures(rows),
        "groups": {name: _figures(some) for name, some in groups.items()},
        "rows_wrong": [row for row in rows if row["wrong"]],
    }


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = sorted(row["seconds"] for row in rows)
    return {
        "faults": len(rows),
        "median_seconds": round(statistics.median(seconds), 3) if rows else None,
        "p95_seconds": seconds[min(len(rows) - 1, int(0.95 * len(rows)))] if rows else None,
        "most_seconds": seconds[-1] if rows else None,
        "hangs": _count(rows, "hung"),
        "false_successes": _count(rows, "false_success"),
        "lost_status": _count(rows, "lost_status"),
        "orphans": sum(row["orphans"] for row in rows),
        "lost_checkpoints": _count(rows, "lost"),
        "reported": _count(rows, "reported"),
        "wrong": _count(rows, "wrong"),
    }


def _count(rows: Iterable[dict[str, Any]], name: str) -> int:
    return sum(bool(row[name]) for row in rows)


def line(row: dict[str, Any]) -> str:
    """Return one trial for people. **Local.**"""
    where = f"rank {row['rank']} of {row['n']}, update {row['step']:2}, {row['loop']:3}"
    what = f"{row['number']:4} {row['kind']:17} {where}"
    end = f"{row['family']:7} {row['form']:8} {row['seconds']:6.2f} s, status {row['status']:3}"
    return f"{what}, {end}" + "".join(f"\n     WRONG: {text}" for text in row["wrong"])


def table(result: dict[str, Any]) -> list[str]:
    """Return the figures as a table of Markdown. **Local.**"""
    heads = {
        "faults": "faults",
        "median_seconds": "median s",
        "p95_seconds": "p95 s",
        "most_seconds": "most s",
        "hangs": "hangs",
        "false_successes": "false successes",
        "orphans": "orphans",
        "lost_checkpoints": "lost checkpoints",
        "reported": "reported by a rank",
        "wrong": "not as promised",
    }
    lines = ["| fault | " + " | ".join(heads.values()) + " |", "|---" * (1 + len(heads)) + "|"]
    for name, some in [*result["groups"].items(), ("all", result)]:
        cells = [
            "" if some[key] is None else f"{some[key]:.2f}" if key.endswith("seconds") else str(some[key])
            for key in heads
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if result["lost_status"]:
        lines.append(f"status 0 after os._exit(0) under plain mpirun of MPICH: {result['lost_status']}")
    if result["faults"] < result["asked"]:
        lines.append(f"{result['asked'] - result['faults']} faults are left; run it again to go on")
    return lines


def _kept(path: Path | None, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of an earlier run of the same plan; start a new file where there is none."""
    if path is None:
        return []
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        found = [json.loads(text) for text in lines]
    except ValueError:  # it was killed in the middle of a line
        found = [json.loads(text) for text in lines[:-1]]
    if not found or found[0] != plan:
        path.write_text(json.dumps(plan) + "\n")
        return []
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return found[1:]


def _keep(path: Path | None, row: dict[str, Any]) -> None:
    if path is not None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
