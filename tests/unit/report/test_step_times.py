"""The table of step times, and whom it names."""

import pytest
import thread_ranks

from mpdp.report.step_times import StepTimes, stragglers, table


def rows(*own, data=0.0):
    longest = max(own)
    return [
        {"rank": r, "host": f"node{r}", "step": longest, "data": data if c == longest else 0.0,
         "compute": c - (data if c == longest else 0.0), "messages": longest - c}
        for r, c in enumerate(own)
    ]  # fmt: skip


def test_the_rank_that_does_not_wait_is_slow():
    assert stragglers(rows(0.010, 0.010, 0.011)) == []
    assert stragglers(rows(0.5)) == []
    assert stragglers(rows(1e-4, 9e-4)) == [], "noise"
    (line,) = stragglers(rows(0.010, 0.025))
    assert line.startswith("rank 1 (node1) is slow: 25.0 ms a step") and line.endswith(
        "it computes for 15.0 ms more"
    )
    (line,) = stragglers(rows(0.030, 0.010, 0.010, data=0.02))
    assert line.startswith("rank 0") and line.endswith("it waits for its data for 20.0 ms more")
    assert len(stragglers(rows(0.03, 0.01, 0.01, 0.04))) == 2


def test_the_table_marks_it():
    text = table(rows(0.010, 0.025)).splitlines()
    assert len(text) == 3 and text[2].endswith("slow") and not text[1].endswith("slow")
    assert text[1].split() == ["0", "node0", "25.00", "0.00", "10.00", "15.00"]


@pytest.mark.parametrize("size", [1, 3])
def test_gathered_on_every_rank(size):
    def body(comm):
        times = StepTimes()
        times.add(100.0, 50.0, 50.0)  # the first does not count
        for _ in range(4):
            times.add(0.5, 0.1 * comm.rank, 0.2)
        return times.gather(comm)

    found = thread_ranks.run(size, body)
    assert all(other == found[0] for other in found)
    for rank, row in enumerate(found[0]):
        assert (row["rank"], row["step"], row["messages"]) == (rank, 0.5, 0.2)
        assert row["data"] == pytest.approx(0.1 * rank) and row["compute"] == pytest.approx(0.3 - 0.1 * rank)
        assert row["host"]
    assert StepTimes().gather(thread_ranks_solo())[0]["step"] == 0.0


def thread_ranks_solo():
    from mpdp.comm.activity import Activity
    from mpdp.comm.solo import SoloCommunicator

    return SoloCommunicator(Activity())
