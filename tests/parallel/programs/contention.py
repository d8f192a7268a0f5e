"""The arms of the benchmark against the fake driver of ``fake_libcuda.c``, without a look at the cores.

With ``all`` each arm once; else the verdict's, and what interferes and what is locked.
"""

import os
import sys
import time

from launching import record

from mpdp.bench.contention import arms, figures, interference, locks, rounds, rule
from mpdp.bench.contention.workers import Processes, Workers, environment, row_name


def rows_of(planned, repetitions, said):
    """Run some arms and return their figures."""
    workers = Workers(1, {"processes": Processes(environment(mps=False))})
    try:
        run = rounds.Rounds(
            workers,
            planned,
            lambda k: 1.0,
            [],
            repetitions=repetitions,
            seconds=0.0,
            keep=lambda sample: None,
            until=time.monotonic() + 60,
            say=said.append,
        )
        return figures.summary(run.run())
    finally:
        workers.close()


def beside():
    """Return the launches a second of a thread and of what goes on beside it together, against nothing beside it."""
    workers = Workers(1, {"processes": Processes(environment(mps=False))})
    said = []
    try:
        rows = interference.measure(
            workers, lambda k: 1.0, [], repetitions=3, seconds=0.2, until=time.monotonic() + 60,
            keep=lambda sample: None, say=said.append,
        )  # fmt: skip
    finally:
        workers.close()
    both = {
        row["by"]: (row["per_second"] + row["others_per_second"]) / rows[0]["per_second"]
        for row in rows
        if row["other"] == arms.own_name(arms.NULL)
    }
    return {"said": said, "rows": len(rows), **both}


def main():
    rounds.LATE = 10.0
    planned, said = arms.plan("full", 1, (1, 2), False, True, False), []
    if sys.argv[1:] == ["all"]:
        rows = rows_of(planned, 1, said)
        record({"said": said, "rows": len(rows), "arms": len(planned)}, 0)
        return
    os.environ["FAKE_LONG"], rounds.PILOT = "1", 24
    own = row_name("pthreads", "c", arms.own_name(arms.OWN))
    threads, processes = arms.verdict_rows(1, False)
    counted = locks.count(1, [arms.NULL], (1, 2), [], environment(mps=False), said.append, 100)
    # Warm-ups under a lock make starts late, which a run refuses: so what counts here is completion, from the common
    # start.
    for _ in range(3):  # processes share nothing: where they do not scale, the machine is busy
        decisive = rows_of([arm for arm in planned if arm.row in (threads, processes, own)], 3, said)
        scaling = {row["row"]: row["scaling"][0] for row in decisive if row["k"] == 2}
        if 1.8 < scaling[processes] < 2.2:
            break
    verdict = rule.decide(
        decisive, threads=threads, processes=processes, wanted=3, gpus=2, machine="a fake", locks=counted
    )
    found = {
        "said": said,
        "word": verdict.word,
        "line": verdict.line,
        "beside": beside(),
        "locks": [row["calls"] for row in counted],
    }
    record({**found, "threads": scaling[threads], "own": scaling[own], "processes": scaling[processes]}, 0)


if __name__ == "__main__":
    main()
