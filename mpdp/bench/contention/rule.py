"""The rule by which the figures become a verdict; written before the run, and the same for every machine.

Verdict arms: null kernels in a loop of C, by k threads without Python in one process and by k processes, with k the
most workers that have a core each (and a GPU each, where there are several). A scaling is the rate of k workers over
that of one, of what the GPUs completed where there are several, of enqueueing on one GPU, whose front end the workers
share.

1. A verdict arm with fewer accepted repetitions than wanted: ``undecided (cores busy)``.
2. Threads scale to at least 0.8 k: ``no contention here``.
3. Threads below that, processes at least 0.9 k: ``the driver's lock is real here``, if the threads are seen to wait
   (for locks inside the driver, in one launch of a hundred or a tenth of their time; by voluntary switches; or by a
   99th percentile that is at least twice that of one thread); else ``undecided``.
4. Both below: ``undecided``, since the GPU or the machine limits processes as well.

What follows for training needs a GPU a worker: processes are to be preferred if the launch-bound step with the same
collective is more than 5 % faster than that of the better way to have threads, with the whole interval. On one GPU
this is said to be open.
Captured steps stand in the table beside it: ranks that are threads do not capture, so they have none to compare.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SCALES, SCALES_APART = 0.8, 0.9  # of k: threads, processes
WAITS = 2.0  # of the 99th percentile of one thread
CONTENDED = 0.01  # of the launches
WAITED = 0.1  # of the time inside of launches
FASTER = 0.05


@dataclass(frozen=True)
class Verdict:
    """What the figures say.

    Attributes:
        word: ``"no contention"``, ``"lock"`` or ``"undecided"``.
        line: for people, with ``verdict: `` before it.
        open_questions: what this machine cannot decide.
        k: the number of workers that decided; None where none did.
    """

    word: str
    line: str
    open_questions: tuple[str, ...] = ()
    k: int | None = None


def decide(
    rows: Sequence[Mapping[str, Any]],
    *,
    threads: str,
    processes: str,
    wanted: int,
    gpus: int,
    machine: str,
    missing: str | None = None,
    locks: Sequence[Mapping[str, Any]] = (),
) -> Verdict:
    """Return the verdict on launches.

    **Local.**

    Args:
        rows: of :func:`figures.summary`.
        threads, processes: the rows of the verdict arms.
        wanted: accepted repetitions of each.
        gpus: 0 for mocks.
        machine: what the verdict is about, in words.
        missing: why there are no verdict arms.
        locks: of :func:`locks.count`, for what the verdict arms launch.
    """
    unsettled = _open(gpus)
    if missing is not None:
        return Verdict("undecided", f"undecided ({missing})", unsettled)
    scaling = "scaling" if gpus > 1 else "enqueued_scaling"
    found = {(row["row"], row["k"]): row for row in rows}
    ks = sorted(k for row, k in found if row == threads and k > 1 and (gpus <= 1 or k <= gpus))
    if not ks:
        return Verdict("undecided", "undecided (one core: nothing runs beside anything)", unsettled)
    for k in reversed(ks):  # the most workers whose arms are complete
        arms = [found.get((row, each)) for row in (threads, processes) for each in (1, k)]
        if all(arm is not None and arm["accepted"] >= wanted for arm in arms):
            break
    else:
        return Verdict("undecided", "undecided (cores busy)", unsettled)
    of_threads, of_processes = found[threads, k][scaling], found[processes, k][scaling]
    told = f"{k} threads launch {_told(of_threads)} of one, {k} processes {_told(of_processes)}, on {machine}"
    if of_threads[0] >= SCALES * k:
        return Verdict("no contention", f"no contention here: {told}", unsettled, k)
    if of_processes[0] < SCALES_APART * k:
        return Verdict("undecided", f"undecided (processes do not scale either): {told}", unsettled, k)
    alone, together = found[threads, 1], found[threads, k]
    waits = (
        together["p99_us"] >= WAITS * alone["p99_us"]
        or (together["voluntary_switches"] or 0) > (alone["voluntary_switches"] or 0)
        or any(each["k"] > 1 and _contended(each) for each in locks)
    )
    if not waits:
        why = "threads are slower, but are not seen to wait"
        return Verdict("undecided", f"undecided ({why}): {told}", unsettled, k)
    return Verdict("lock", f"the driver's lock is real here: {told}", unsettled, k)


def _contended(row: Mapping[str, Any]) -> bool:
    """Return whether launches wait for locks: often, or seldom and long, as who leaves one takes it again."""
    in_calls = row["k"] * row["launches"] / row["enqueued_per_second"]  # seconds, of all workers
    return bool(row["contended"] > CONTENDED * row["launches"] or row["waited_seconds"] > WAITED * in_calls)


def readings(rows: Sequence[Mapping[str, Any]], k: int) -> list[str]:
    """Return in words what each way of launching gains from k workers, in the order of the rows.

    **Local.** The locked share f is that of a call which one worker at a time can be in, if that is what limits:
    the scaling is then 1 / (f + (1 - f) / k). A share above 1 is a cost of handing over. Launches from Python count
    when they are complete, since a thread waits for Python's lock between them too.
    """
    found = []
    for row in rows:
        verb, name = ("enqueue", "enqueued_scaling") if row["loop"] == "c" else ("complete", "scaling")
        if row["k"] == k and row["accepted"] and row[name] is not None:
            scaling = row[name][0]
            share = (k / scaling - 1) / (k - 1)
            found.append(
                f"{row['row']}: {k} workers {verb} {scaling:.2f} times as fast as one, locked share {share:.2f}"
            )
    return found


def _told(scaling: Sequence[float]) -> str:
    value, low, high = scaling
    return f"{value:.2f} times [{low:.2f}, {high:.2f}]"


def _open(gpus: int) -> tuple[str, ...]:
    if gpus == 0:
        return ("without a GPU the driver's lock is not measured: the launches here are mocks",)
    if gpus == 1:
        return (
            "one GPU cannot decide whether processes train faster: its front end is shared, and contexts take turns",
        )
    return ()


def whose(rows: Sequence[Mapping[str, Any]], threads: str, own: str, k: int) -> list[str]:
    """Return in words whose the lock is, where threads of one context do not scale: one GPU can tell.

    **Local.**

    Args:
        rows: of :func:`figures.summary`.
        threads, own: the rows of threads of C that share a context, and of those with one each.
        k: the number of workers that decided.
    """
    found = {row["row"]: row for row in rows if row["k"] == k and row["accepted"] and row["enqueued_scaling"]}
    if threads not in found or own not in found:
        return []
    shared, apart = found[threads]["enqueued_scaling"], found[own]["enqueued_scaling"]
    told = f"{k} threads enqueue {_told(apart)} of one with a context each, {_told(shared)} with one context"
    if shared[0] >= SCALES * k:
        word = "no lock that matters"
    elif apart[0] >= SCALES * k:
        word = "the lock is the context's"
    elif apart[1] <= shared[2]:
        word = "contexts of their own do not help: the lock is the process's, or the GPU is what limits"
    else:
        word = "contexts of their own help in part"
    return [f"contexts: {word}: {told}"]


def graph_readings(samples: Sequence[Mapping[str, Any]], gpus: int, mps: bool) -> list[str]:
    """Return in words whether graphs do away with the lock, and what the GPU's front end can do at most.

    **Local.** Graphs suffice where k threads launch graphs of 100 kernels at least as fast as k processes, but for 5 %,
    with the whole interval; k is the most workers that were measured, and have a GPU each where there are several.

    Args:
        samples: of all repetitions.
        gpus: that were used.
        mps: processes under MPS were measured too.
    """
    from .arms import verdict_rows
    from .figures import interval
    from .targets import Launch

    def rates(row: str, k: int) -> list[float]:
        return [s["per_second"] for s in samples if (s["row"], s["k"]) == (row, k) and s["accepted"]]

    found = []
    rows = verdict_rows(gpus, mps, Launch("graph", nodes=100)) if gpus else ("", "")
    for k in sorted({s["k"] for s in samples if s["row"] == rows[0]}, reverse=True):
        threads, processes = (rates(row, k) for row in rows)
        if k > 1 and (gpus < 2 or k <= gpus) and threads and processes:
            ratio = interval(threads, processes)
            word = "graphs suffice" if ratio[1] > 1 - FASTER else "graphs do not suffice"
            if ratio[1] <= 1 - FASTER <= ratio[2]:
                word = "undecided"
            found.append(
                f"graphs: {word}: {k} threads launch those of 100 {_told(ratio)} as fast as {k} processes"
            )
            break
    nodes = 1000
    ceilings = [
        statistics.median(made) * nodes
        for k in sorted({s["k"] for s in samples})
        if (made := rates(verdict_rows(gpus, mps, Launch("graph", nodes=nodes))[0], k)) and gpus
    ]
    if ceilings:
        found.append(
            f"ceiling: graphs of {nodes} complete at most {max(ceilings):,.0f} null kernels a second, "
            "in any number of streams"
        )
    return found


def advise(made: Mapping[str, Any], gpus: int) -> str:
    """Return what the training steps say of threads and processes.

    **Local.**

    Args:
        made: of :meth:`steps.Steps.turns`, with launch-bound steps, not captured. Of the two ways to have threads the
            faster one counts. On several GPUs those with the same all-reduce count, where processes choose another;
            on one, processes under MPS where it runs.
        gpus: 0 on CPUs.
    """
    from .figures import interval
    from .steps import DATA_PARALLEL, STAGED

    blocks, way = made["blocks"], ""
    chosen = made["about"].get("processes", {}).get("transport")
    if (
        gpus > 1
        and chosen != "cuda_ipc"
        and blocks.get(f"threads{STAGED}")
        and blocks.get(f"processes{STAGED}")
    ):
        way = STAGED
    ways = [found for name in (f"threads{way}", DATA_PARALLEL) if (found := blocks.get(name))]
    processes = (gpus == 1 and blocks.get("processes MPS")) or blocks.get(f"processes{way}")
    if not ways or not processes:
        return "training: undecided (not measured, or the cores were busy)"
    ratio, low, high = interval(min(ways, key=statistics.median), processes)
    told = f"a step of threads takes {ratio:.2f} times [{low:.2f}, {high:.2f}] that of processes"
    if gpus == 1:
        return f"training: {told}, on one GPU: no word on several"
    if low > 1 + FASTER:
        word = "take processes"
    elif high < 1 - FASTER:
        word = "take threads"
    else:
        word = "either will do"
    return f"training: {word}: {told}"
