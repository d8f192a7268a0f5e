"""Starting a job again: when, after how long, with how many ranks, and why not; jobs are replaced by their ends."""

import os
import signal
import threading
import time

import pytest

from mpdp.cli import restarts
from mpdp.cli.restarts import Policy, describe
from mpdp.cli.supervise import Ended, Marks
from mpdp.errors import Preempted

ERROR = "in step 3: ValueError: a bad sample"
DEATH = "in step 3: rank 1 died: its process ended without a word (killed, crashed or os._exit)"


def end(status=1, failure=None, updated=True, saved=None, ordered=False):
    failed = {} if failure is None else {1: failure}
    return Ended(status, ordered, Marks({}, failed, set(), False, updated, saved))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_WAIT", 0.0)


def run(ends, policy, available=lambda ranks: ranks):
    """Run jobs that end so; return the status, what each was started as, and what was said."""
    started, said = [], []
    left = iter(ends)

    def start(ranks, restart):
        started.append((ranks, restart))
        return next(left)

    return restarts.run(policy, start, available, said.append), started, said


def test_a_job_that_succeeds_is_started_once(quick):
    assert run([end(0)], Policy(5, 2, 2)) == (0, [(2, 0)], [])


def test_each_restart_is_told_in_one_line(quick):
    ends = [end(1, ERROR, saved=20), end(Preempted.STATUS, saved=46), end(9), end(0)]
    policy = Policy(5, 2, 2, wait=0.0)
    status, started, said = run(ends, policy)
    assert (status, started) == (0, [(2, 0), (2, 1), (2, 2), (2, 3)])
    assert said == [
        f"restart 1 of 5 in 0 s with 2 ranks, saved at update 20 (rank 1 failed {ERROR})",
        "restart 2 of 5 in 0 s with 2 ranks, saved at update 46 (a signal has stopped it)",
        "restart 3 of 5 in 0 s with 2 ranks, saved at update 46 (status 9)",
    ]


def test_waits_double_until_something_is_saved():
    policy = Policy(99, 2, 2)
    waits = []
    for saved in (None, None, None, 5, None, *[None] * 8):
        assert policy.refuses(end(9, saved=saved)) is None
        waits.append(policy.wait)
    assert waits == [1, 2, 4, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60]


@pytest.mark.parametrize(
    "ends, starts, why",
    [
        ([end(9)] * 3, 3, "--max-restarts 2 is used up"),
        (
            [end(1, "before init: ModuleNotFoundError: no such", updated=False)] * 3,
            1,
            "the first start failed before",
        ),
        ([end(1, ERROR)] * 3, 3, "the same failure came 3 times in a row"),
        ([end(9, updated=False)] * 3, 3, "3 starts in a row ended before their first update"),
        ([end(9, DEATH, updated=False)] * 3, 3, "the same failure came 3 times in a row"),
    ],
)
def test_giving_up_says_why(quick, ends, starts, why):
    most = 2 if "used up" in why else 9
    status, started, said = run(ends, Policy(most, 2, 2, wait=0.0))
    assert status == ends[-1].status and len(started) == starts
    assert said[-1].startswith(f"not started again: {why}") and len(said) == starts


def test_what_differs_or_trains_in_between_is_no_reason_to_give_up(quick):
    other = "in step 4: ValueError: a bad sample"
    ends = [
        end(1, ERROR),
        end(1, ERROR),
        end(1, other),
        end(1, ERROR),
        end(9, updated=False),
        end(9, updated=False),
    ]
    ends += [end(9), end(9, updated=False), end(9, updated=False), end(0)]
    assert run(ends, Policy(20, 2, 2, wait=0.0))[0] == 0


def test_starts_that_come_to_nothing_lose_a_rank_down_to_the_least(quick):
    ends = [end(9), *[end(9, updated=False)] * 5]
    _, started, said = run(ends, Policy(20, 4, 2, wait=0.0))
    assert [ranks for ranks, _ in started] == [4, 4, 3, 2, 2, 2]
    assert "3 starts in a row" in said[-1]


def test_the_ranks_for_which_there_is_a_place(quick):
    places = iter([4, 2, 4, 1])
    _, started, said = run([end(9)] * 9, Policy(20, 4, 2, wait=0.0), lambda ranks: next(places))
    assert [ranks for ranks, _ in started] == [4, 4, 2, 4]
    assert said[-1] == "not started again: there is a place for 1 ranks, fewer than 2"


def test_a_job_that_was_to_end_is_not_started_again(quick):
    assert run([end(Preempted.STATUS, ordered=True)], Policy(5, 2, 2)) == (75, [(2, 0)], [])


def test_a_signal_ends_the_waiting():
    before = signal.getsignal(signal.SIGTERM)

    def send():
        while signal.getsignal(signal.SIGTERM) is before:  # it would end the tests
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    begin = time.monotonic()
    status, started, _ = run([end(9)] * 2, Policy(5, 2, 2, wait=60.0, restarts=1, _idle=0))
    assert (status, len(started)) == (9, 1) and time.monotonic() - begin < 30
    assert signal.getsignal(signal.SIGTERM) is before


def test_describe():
    assert describe(end(1, ERROR)) == f"rank 1 failed {ERROR}"
    assert describe(end(139)) == "status 139"
