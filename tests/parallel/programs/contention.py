"""All arms of the benchmark once, against the fake driver of ``fake_libcuda.c``, without a look at the cores."""

import os
import time

from launching import record

from mpdp.bench.contention import arms, figures, rounds, rule
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


def main():
    rounds.LATE = 10.0
    planned, said = arms.plan("full", 1, (1, 2), False, True, False), []
    rows = rows_of(planned, 1, said)
    os.environ["FAKE_LONG"] = "1"
    own = row_name("pthreads", "c", arms.own_name(arms.OWN))
    threads, processes = arms.verdict_rows(1, False)
    decisive = rows_of([arm for arm in planned if arm.row in (threads, processes, own)], 3, said)
    verdict = rule.decide(decisive, threads=threads, processes=processes, wanted=3, gpus=1, machine="a fake")
    scaling = {row["row"]: row["enqueued_scaling"][0] for row in decisive if row["k"] == 2}
    found = {"said": said, "rows": len(rows), "arms": len(planned), "word": verdict.word}
    record({**found, "threads": scaling[threads], "own": scaling[own], "processes": scaling[processes]}, 0)


if __name__ == "__main__":
    main()
