"""Flags: waiting in its three stages, its end by a failure, and the machines that cannot do it."""

import threading
import time

import numpy as np
import pytest

from mpdp.comm import flags
from mpdp.comm.activity import Activity
from mpdp.comm.base import host_memory
from mpdp.comm.flags import DONE, READY, ROW_BYTES, Flags
from mpdp.errors import RankFailedError


def make(size, **arguments):
    rows = [host_memory(ROW_BYTES) for _ in range(size)]
    return [Flags(rank, rows, Activity(), **arguments) for rank in range(size)]


@pytest.mark.parametrize("looks", [0, 400])
@pytest.mark.parametrize("pause", [0, 0.0005, 0.02])
def test_a_wait_ends_when_the_counter_comes(pause, looks):
    """At once, while it looks or yields, and while it sleeps."""
    one, other = make(2, looks=looks)

    def post():
        for value in range(1, 6):
            time.sleep(pause)
            other.post(READY, value)

    thread = threading.Thread(target=post)
    thread.start()
    for value in range(1, 6):
        one.wait(READY, value)
        assert one.reached(READY, value)
    thread.join()
    assert not one.reached(READY, 6)
    assert not one.reached(DONE, 1)


def test_a_sleeper_is_woken_and_leaves_no_mark(monkeypatch):
    monkeypatch.setattr(flags, "_FIRST_SLEEP", 0.9)
    monkeypatch.setattr(flags, "_LONGEST_SLEEP", 0.9)
    one, other = make(2, looks=0)
    call, ends = one._call, []
    one._call = lambda *arguments: ends.append(call(*arguments))
    thread = threading.Thread(target=one.wait, args=(DONE, 1))
    thread.start()
    while not np.asarray(other.own)[flags._SLEEPERS :].any():
        time.sleep(0.01)
    time.sleep(0.1)
    other.post(DONE, 1)
    thread.join()
    assert ends[-1] == 0, "a sleep that ends by itself returns -1"
    assert not any(np.asarray(row)[flags._SLEEPERS :].any() for row in one.rows)


def test_a_wait_is_for_all_others_and_not_for_itself():
    one, two, three = make(3)
    two.post(READY, 2)
    assert not one.reached(READY, 1)
    three.post(READY, 1)
    one.wait(READY, 1)
    assert not one.reached(READY, 2)


@pytest.mark.parametrize("looks", [0, 400])
@pytest.mark.parametrize("pause", [0, 0.02])
def test_a_wait_ends_when_a_rank_is_elsewhere(pause, looks):
    """While it yields, and while it sleeps; but not when the counter has come."""
    one, two, three = make(3, looks=looks)
    gone = threading.Event()
    two.post(READY, 1)
    threading.Timer(pause, gone.set).start()
    assert not one.wait(READY, 1, gone.is_set)
    assert not any(np.asarray(row)[flags._SLEEPERS :].any() for row in one.rows)
    three.post(READY, 1)
    assert one.wait(READY, 1, gone.is_set)
    gone.clear()
    threading.Timer(pause, lambda: [each.post(READY, 2) for each in (two, three)]).start()
    assert one.wait(READY, 2, gone.is_set)


def test_more_ranks_than_marks():
    all_flags = make(70, looks=0)
    waiting = [
        threading.Thread(target=each.wait, args=(READY, 1)) for each in all_flags[:3] + all_flags[64:67]
    ]
    for thread in waiting:
        thread.start()
    time.sleep(0.05)
    for each in all_flags:
        each.post(READY, 1)
    for thread in waiting:
        thread.join(5)
        assert not thread.is_alive()


def test_a_failure_ends_a_wait():
    one, _ = make(2, looks=0)
    one._activity.enter("all_reduce")
    threading.Timer(0.05, setattr, (one._activity, "failure", "rank 1 died")).start()
    with pytest.raises(
        RankFailedError, match=r"all_reduce: expected all ranks alive, got a failure \(rank 1 died\)"
    ):
        one.wait(READY, 1)


def test_a_failure_ends_a_wait_that_offers_its_core(monkeypatch):
    """Each offer takes as long as others may keep the core, on a busy machine."""
    one, _ = make(2, looks=0)
    offers = []

    def offer():
        offers.append(1)
        if len(offers) == 100:
            one._activity.failure = "rank 1 died"

    one._yield = offer
    with pytest.raises(RankFailedError, match="rank 1 died"):
        one.wait(READY, 1)
    assert len(offers) < 200


def test_a_machine_with_another_order_of_stores_is_refused(monkeypatch):
    assert flags.unordered() is None
    monkeypatch.setattr(flags.platform, "machine", lambda: "aarch64")
    assert flags.unordered() == (
        "it needs Linux on x86-64, whose stores keep their order, and this is linux on aarch64"
    )


def test_ranks_that_outnumber_the_cores_offer_theirs_at_once(monkeypatch):
    monkeypatch.setattr(flags.cores, "on_node", lambda: 2)
    assert flags.looks(2) == flags.LOOKS
    assert flags.looks(3) == 1
