"""The tables of ``mpdp bench contention``, as lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .figures import interval


def launches_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the launches. **Local.**"""
    width = max((len(row["row"]) for row in rows), default=0)
    head = f"{'launches':<{width}}  k  enqueued/s  completed/s  {'scaling of both':<20}  "
    lines = [head + "  p50 us   p99 us  p99.9 us    max us  accepted"]
    for row in rows:
        counts = f"{row['accepted']} of {row['accepted'] + row['refused']}"
        if not row["accepted"]:
            lines.append(f"{row['row']:<{width}}  {row['k']}  (cores busy, or starts late)  {counts}")
            continue
        scalings = [row[name] for name in ("enqueued_scaling", "scaling")]
        told = "  ".join("" if each is None else f"{each[0]:.2f}" for each in scalings)
        lines.append(
            f"{row['row']:<{width}}  {row['k']}  {row['enqueued_per_second']:>10,.0f}  {row['per_second']:>11,.0f}  "
            f"{told:<20}  {row['p50_us']:>8.2f} {row['p99_us']:>8.2f} {row['p99_9_us']:>9.2f} {row['max_us']:>9.1f}  "
            f"{counts}"
        )
    return "\n".join(lines)


def steps_table(made: Mapping[str, Any]) -> str:
    """Return the steps of one kind. **Local.**"""
    blocks = made["blocks"]
    lines = [
        f"{made['kind']} step of {made['workload']}, {made['ranks']} ranks, {made['batch_per_rank']} samples each:"
    ]
    first = blocks.get("processes")
    for name, seconds in blocks.items():
        against = f", {made['refused'].get(name, 0)} blocks refused"
        if not seconds:
            lines.append(f"  {name:<22} (cores busy){against}")
            continue
        if first and name != "processes":
            value, low, high = interval(seconds, first)
            against += f", {value:.2f} times [{low:.2f}, {high:.2f}] that of processes"
        lines.append(f"  {name:<22} {float(np.median(seconds)) * 1e6:>10.0f} us{against}")
    for name, cost in made["costs"].items():
        ranks = made["about"][name]["ranks"]
        lines.append(
            f"  {name} cost{'' if ranks > 1 else 's'}: first steps after {cost['start_seconds']:.1f} s, "
            f"{cost['host_bytes'] / ranks / 2**20:.0f} MiB of host memory a rank"
            + (f", {cost['device_bytes'] / ranks / 2**20:.0f} of a GPU" if cost["device_bytes"] else "")
        )
    return "\n".join(lines)


def interference_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the launches of one thread beside others. **Local.**"""
    names = [row["other"] + (f", a {row['by'].removesuffix('es')}" if row["by"] else "") for row in rows]
    names = [name.replace("a process", "by a process").replace("a thread", "by a thread") for name in names]
    width = max(map(len, names), default=0)
    lines = [
        f"{'null kernels of a thread beside':<{width}}   p50 us   p99 us  p99.9 us    max us  p99 / alone  accepted"
    ]
    for name, row in zip(names, rows):
        counts = f"{row['accepted']} of {row['accepted'] + row['refused']}"
        if not row["accepted"]:
            lines.append(f"{name:<{width}}  (cores busy)  {counts}")
            continue
        ratio = row.get("p99_ratio")
        told = "" if ratio is None else f"{ratio[0]:.2f}"
        lines.append(
            f"{name:<{width}} {row['p50_us']:>8.2f} {row['p99_us']:>8.2f} {row['p99_9_us']:>9.2f} "
            f"{row['max_us']:>9.1f}  {told:>11}  {counts}"
        )
    return "\n".join(lines)


def locks_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the locks that launches take. **Local.**"""
    width = max((len(row["launch"]) for row in rows), default=0)
    lines = [
        (
            f"{'locks, threads of C':<{width}}  k  calls/launch  waited/launch  us waited/launch  "
            "switches/launch  enqueued/s"
        )
    ]
    for row in rows:
        n = row["launches"]
        lines.append(
            f"{row['launch']:<{width}}  {row['k']}  {row['calls'] / n:>12.2f}  {row['contended'] / n:>13.3f}  "
            f"{row['waited_seconds'] * 1e6 / n:>16.3f}  {row['voluntary_switches'] / n:>15.4f}  "
            f"{row['enqueued_per_second']:>10,.0f}"
        )
    return "\n".join(lines)
