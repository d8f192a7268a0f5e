"""The ring, with ranks as objects of one process: abort and report are lists."""

import re
import threading
import time

import pytest

from mpdp.comm import liveness
from mpdp.comm.activity import Activity
from mpdp.comm.liveness import Ring
from mpdp.errors import CommunicationError


class Rank:
    def __init__(self, rank, size, timeout):
        self.aborted, self.reports = [], []
        self.activity = Activity()
        self.activity.step = 3
        self.ring = Ring(rank, size, self.activity, timeout=timeout, abort=self._abort, report=self._report)

    def _abort(self, code):
        self.aborted.append(code)
        self.ring._closing = True  # a real one does not return

    def _report(self, text, body=""):
        self.reports.append((text, body))

    def die(self):
        """As the kernel does it: the sockets close and nothing is said."""
        self.ring._closing = True
        self.ring._wake()
        self.ring._thread.join()
        self.ring._successor.close(), self.ring._predecessor.close()


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(liveness, "GRACE", 0.3)
    monkeypatch.setattr(liveness, "QUIET", 0.4)


@pytest.fixture
def build():
    worlds = []

    def build(size, timeout=60.0, across_nodes=False):
        ranks = [Rank(rank, size, timeout) for rank in range(size)]
        addresses = [rank.ring.listen(across_nodes) for rank in ranks]
        in_all(ranks, lambda rank: rank.ring.connect(addresses[(rank.ring.rank + 1) % size], 5.0))
        worlds.append(ranks)
        return ranks

    yield build
    for ranks in worlds:
        for rank in ranks:
            rank.ring.close()


def in_all(ranks, action):
    threads = [threading.Thread(target=action, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def reports(ranks):
    return [(rank.ring.rank, text) for rank in ranks for text, _ in rank.reports]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("across_nodes", [False, True])
def test_all_leave(build, size, across_nodes):
    ranks = build(size, across_nodes=across_nodes)
    in_all(ranks, lambda rank: rank.ring.leave())
    in_all(ranks, lambda rank: rank.ring.close())
    time.sleep(0.1)
    assert reports(ranks) == [] and not any(rank.aborted for rank in ranks)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_nobody_passes_the_exit_before_the_last_rank_has_come(build, size):
    ranks = build(size)
    early = [threading.Thread(target=rank.ring.leave, daemon=True) for rank in ranks[1:]]
    for thread in early:
        thread.start()
    time.sleep(0.3)
    assert not any(rank.ring.all_left.is_set() for rank in ranks)
    ranks[0].ring.leave()
    for thread in early:
        thread.join(5)
    assert all(rank.ring.all_left.is_set() for rank in ranks)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_death_is_reported_by_the_successor_alone(build, monkeypatch, size):
    ranks = build(size)
    dead, others = ranks[1], [rank for rank in ranks if rank.ring.rank != 1]
    ranks[2 % size].activity.enter("all_reduce")
    monkeypatch.setattr(liveness, "GRACE", 60.0)  # nobody waits so long
    dead.die()
    until(lambda: all(rank.ring.failure for rank in others))
    until(lambda: ranks[2 % size].aborted == [1])
    (rank, text), *more = reports(others)
    assert rank == 2 % size and more == []
    assert text == (
        "rank 1 died: its process ended without a word (killed, crashed or os._exit) "
        f"while rank {rank} is in step 3 (all_reduce)"
    )


def test_the_predecessor_reports_a_death_when_the_successor_does_not(build):
    ranks = build(3)
    ranks[2].ring._judge_deaths = lambda now: None  # it is stuck
    ranks[1].die()
    until(lambda: reports(ranks))
    assert reports(ranks)[0][0] == 0 and reports(ranks)[0][1].startswith("rank 1 died")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_failure_is_known_to_all_and_reported_again_by_none(build, size):
    ranks = build(size)
    ranks[1].ring.fail("ValueError: a bad sample", after=0.3)
    until(lambda: all(rank.ring.failure for rank in ranks))
    assert {rank.ring.failure for rank in ranks} == {"rank 1 failed in step 3: ValueError: a bad sample"}
    until(lambda: ranks[1].aborted == [1])
    ranks[1].die()
    until(
        lambda: all(rank.aborted for rank in ranks)
    )  # the launcher does nothing here: they end by themselves
    assert reports(ranks) == []


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_that_left_is_reported_by_one_that_needs_it(build, size):
    ranks = build(size)
    threading.Thread(target=ranks[1].ring.leave, daemon=True).start()
    time.sleep(0.1)
    for rank in ranks:
        if rank is not ranks[1]:
            rank.activity.enter("all_reduce")
    until(lambda: reports(ranks))
    time.sleep(0.5)
    first = 2 % size
    assert reports(ranks) == [(first, f"rank 1 left while rank {first} is in step 3 (all_reduce)")]
    assert ranks[first].aborted == [1]


def test_a_rank_that_left_is_not_missed_by_one_that_computes(build):
    ranks = build(2)
    thread = threading.Thread(target=ranks[1].ring.leave, daemon=True)
    thread.start()
    time.sleep(liveness.GRACE + 0.5)
    assert reports(ranks) == []
    ranks[0].ring.leave()
    thread.join(5)
    assert not thread.is_alive()


def test_a_collective_that_the_departed_rank_has_served_may_finish(build):
    ranks = build(2)
    for rank in ranks:
        rank.activity.enter("all_reduce")
    ranks[1].activity.leave()
    threading.Thread(target=ranks[1].ring.leave, daemon=True).start()
    time.sleep(liveness.GRACE + 0.5)
    assert reports(ranks) == []


def test_a_stall_is_told_by_each_rank_with_its_stack(build):
    ranks = build(3, timeout=0.4)
    ranks[0].activity.enter("all_reduce")
    until(lambda: all(rank.reports for rank in ranks))
    texts = dict(reports(ranks))
    assert re.match(r"stalled: rank 0, step 3, all_reduce, since \d+\.\d s", texts[0])
    assert texts[1] == "stalled: rank 1, step 3, in no collective (rank 0 waits for more than 0.4 s)"
    assert all("test_liveness.py" in rank.reports[0][1] for rank in ranks)
    until(lambda: ranks[0].aborted == [1])


def test_a_silent_rank_is_a_stall_only_after_the_timeout(build, monkeypatch):
    monkeypatch.setattr(liveness, "BEAT", 0.1)
    ranks = build(2, timeout=1.0)
    ranks[1].ring._lock.acquire()  # its thread does not get on, as if the GIL were held
    begin = time.monotonic()
    until(lambda: ranks[0].reports)
    assert time.monotonic() - begin > 0.8
    ranks[1].ring._lock.release()
    assert "rank 1 has been silent for more than 1 s" in ranks[0].reports[0][0]


def test_a_forked_child_gives_up_its_copies(build):
    ranks = build(2)
    ranks[1].ring._closing = True
    ranks[1].ring._wake()
    ranks[1].ring._thread.join()  # a child has no such thread
    ranks[1].ring.forget()
    assert ranks[1].ring._successor.sock.fileno() == -1


def test_a_neighbour_that_does_not_come_is_named():
    ring = Ring(0, 3, Activity(), timeout=60.0, abort=print, report=print)
    address = ring.listen()
    with pytest.raises(CommunicationError, match="ring: expected rank 2 to connect within 1 s, got rank 0"):
        ring.connect(address, patience=1.0)  # its own address: it finds itself


def test_the_launchers_end_is_reported(build):
    class Gone:
        name, pid, ended = "mpirun", 7, True

    ranks = build(2)
    ranks[0].ring._launcher = Gone()
    until(lambda: ranks[0].aborted)
    assert reports(ranks) == [(0, "the launcher (mpirun, process 7) is gone")]


class Gpu:
    """A device that waits since ``since``, or has found an error."""

    def __init__(self, since=None, found=None):
        self.since, self.found, self.aborted = since, found, False

    def waiting(self):
        return None if self.since is None else ("a collective on the GPU", self.since)

    def error(self):
        return self.found

    def abort(self):
        self.aborted = True


def test_a_device_that_waits_too_long_is_a_stall(build):
    ranks = build(2, timeout=0.4)
    ranks[0].activity.watched.append(Gpu(since=time.monotonic()))
    until(lambda: all(rank.reports for rank in ranks))
    assert re.match(r"stalled: rank 0, step 3, a collective on the GPU, since \d", dict(reports(ranks))[0])
    assert ranks[0].activity.watched[0].aborted


def test_a_rank_that_left_is_reported_by_one_whose_device_waits_for_it(build):
    ranks = build(2)
    threading.Thread(target=ranks[1].ring.leave, daemon=True).start()
    ranks[0].activity.count = 1
    ranks[0].activity.watched.append(Gpu(since=time.monotonic()))
    until(lambda: reports(ranks))
    assert reports(ranks) == [(0, "rank 1 left while rank 0 is in step 3 (a collective on the GPU)")]


def test_a_death_ends_what_waits_on_the_devices_of_all_others(build):
    ranks = build(3)
    for rank in ranks:
        rank.activity.watched.append(Gpu())
    ranks[1].die()
    until(lambda: all(rank.activity.watched[0].aborted for rank in (ranks[0], ranks[2])))


def test_what_a_device_has_found_is_reported(build, monkeypatch):
    monkeypatch.setattr(liveness, "BEAT", 0.1)
    ranks = build(2)
    ranks[1].activity.watched.append(Gpu(found="NCCL failed on lane bulk of rank 1: a cable"))
    until(lambda: ranks[1].aborted == [1] and ranks[0].ring.failure)
    assert reports(ranks) == [(1, "NCCL failed on lane bulk of rank 1: a cable")]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_who_reports_knows_where_the_others_were(build, size):
    ranks = build(size)
    ranks[0].activity.enter("all_reduce")
    for rank in ranks[2:]:
        rank.activity.step = 4
    ranks[1].ring.fail("ValueError: a bad sample", after=5.0)
    until(lambda: "no word" not in ranks[1].ring.others())
    rest = {2: "", 3: "; rank 2 in step 4", 4: "; ranks 2, 3 in step 4"}[size]
    assert re.fullmatch(rf"rank 0 in step 3 \(all_reduce\) for \d\.\d s{rest}", ranks[1].ring.others())
    assert not any(rank.ring.others() for rank in ranks if rank.ring.rank != 1)


def test_who_says_nothing_is_named(build):
    ranks = build(4, timeout=0.5)
    ranks[2].ring._handle = lambda link, message: None  # it is stuck
    for rank in ranks[:2] + ranks[3:]:
        rank.activity.enter("all_reduce")
    until(lambda: all(rank.aborted for rank in ranks[:2] + ranks[3:]))
    # Of those that have stalled at the same moment, the lowest gets all the answers.
    lowest = next(rank for rank in ranks if rank.ring.others())
    assert lowest.ring.others().endswith("no word of rank 2"), lowest.ring.others()
    assert lowest.ring.others().count("in step 3 (all_reduce)") >= 1


def test_a_rank_that_keeps_the_others_waiting_shows_the_stacks_of_its_threads(build):
    ranks = build(2, timeout=0.5)
    gate = threading.Event()

    def read_from_a_disk_that_is_gone():
        gate.wait(20)

    thread = threading.Thread(target=read_from_a_disk_that_is_gone, name="my-loader")
    thread.start()
    ranks[0].activity.enter("all_reduce")
    until(lambda: ranks[1].reports and ranks[0].reports)
    gate.set()
    thread.join()
    assert "thread 'my-loader':" in ranks[1].reports[0][1]
    assert "read_from_a_disk_that_is_gone" in ranks[1].reports[0][1]
    assert "my-loader" not in ranks[0].reports[0][1]
