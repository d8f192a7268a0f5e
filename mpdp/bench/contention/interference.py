"""The table of interference: one thread's launches beside another thread, or process, that does something else.

On several GPUs the other works on the next one, so that they share nothing but the driver and the process.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from .arms import NULL, own_name
from .control import LEAST, until_free
from .figures import interval, latency_figures
from .targets import Launch
from .workers import Workers

OTHERS = (
    NULL,
    Launch("allocate", nbytes=1 << 20),
    Launch("copy pageable", nbytes=4 << 20),
    Launch("event wait", microseconds=20.0),
    Launch("module load"),
)
ATTEMPTS = 3  # refused repetitions for one accepted, at most
NOTHING = "nothing"
_FIGURES = ("p50_us", "p99_us", "p99_9_us", "max_us")


def measure(
    workers: Workers,
    control: Callable[[int], float],
    cpus: Sequence[int],
    *,
    repetitions: int,
    seconds: float,
    until: float,
    keep: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
    launch: Launch = NULL,
    others: Sequence[Launch] = OTHERS,
) -> list[dict[str, Any]]:
    """Return one row for each thing that goes on beside, by a thread and by a process.

    **Local.** Repetitions take turns in random order, between two controls, like those of the arms.

    Args:
        workers: who run; their processes have to be called ``processes``.
        control: k -> share of their cores that k threads get.
        cpus: cores of the workers, in order.
        repetitions: wanted of each.
        seconds: of one repetition.
        until: ``time.monotonic()`` after which none begins.
        keep: is given each sample.
        say: is told what does not work, and is left out.
        launch: of the thread that is looked at.
        others: what goes on beside it.

    Returns:
        rows with ``other``, ``by``, ``accepted``, ``refused``, and where one was accepted medians of the latencies'
        quantiles, ``per_second`` of the launches, ``others_per_second``, and ``p99_ratio``: that against nothing
        beside, with its interval.
    """
    bound = list(cpus[:2]) if len(cpus) > 1 else [-1, -1]
    arms: list[tuple[Launch | None, str | None]] = [(None, None)]
    arms += [(other, by) for other in others for by in (None, "processes")]
    samples: dict[tuple[str, str], list[dict[str, Any]]] = {}
    order, left = random.Random(0), list(arms)
    while left and time.monotonic() < until:
        order.shuffle(left)
        for arm in list(left):
            if time.monotonic() >= until:
                break
            other, by = arm
            name = NOTHING if other is None else own_name(other), "" if other is None else by or "thread"
            found = samples.setdefault(name, [])
            before = until_free(control, 2)
            try:
                timing, beside = workers.beside(launch, other, by, seconds, bound)
            except Exception as error:
                say(f"left out: launches beside {' of a '.join(filter(None, name))}: {error}")
                left.remove(arm)
                continue
            accepted = min(before, after := control(2)) >= LEAST
            found.append(
                {
                    "interference": name[0],
                    "by": name[1],
                    "accepted": accepted,
                    "control": [round(before, 4), round(after, 4)],
                    "n": timing.calls,
                    "per_second": timing.calls / max(seconds, (timing.ended - timing.started) / 1e9),
                    "others_per_second": None if beside is None else beside.calls / seconds,
                    **latency_figures([timing.latencies]),
                }
            )
            keep(found[-1])
            good = sum(sample["accepted"] for sample in found)
            if good == repetitions or len(found) == (1 + ATTEMPTS) * repetitions:
                left.remove(arm)
    return _rows(samples)


def _rows(samples: dict[tuple[str, str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    alone = [sample["p99_us"] for sample in samples.get((NOTHING, ""), []) if sample["accepted"]]
    rows = []
    for (other, by), group in sorted(samples.items(), key=lambda item: item[0][0] != NOTHING):
        good = [sample for sample in group if sample["accepted"]]
        row: dict[str, Any] = {
            "other": other,
            "by": by,
            "accepted": len(good),
            "refused": len(group) - len(good),
        }
        if good:
            row |= {name: statistics.median(sample[name] for sample in good) for name in _FIGURES}
            row["per_second"] = statistics.median(sample["per_second"] for sample in good)
            if other != NOTHING:
                row["others_per_second"] = statistics.median(sample["others_per_second"] for sample in good)
                row["p99_ratio"] = interval([s["p99_us"] for s in good], alone) if alone else None
        rows.append(row)
    return rows
