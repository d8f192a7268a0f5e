"""The meeting before MPI_Init, with ranks as threads and a launcher whose children are a set."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mpdp import processes
from mpdp.comm import meeting
from mpdp.errors import RankFailedError, StallError
from mpdp.launch import Announcement
from mpdp.processes import Process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets")


class Node:
    """A node of `size` ranks of a job of `world`; `living` is what the launcher's children are."""

    def __init__(self, size, world=None):
        self.size, self.world = size, world or size
        self.process = subprocess.Popen(["sleep", "60"])
        self.launcher = processes.look(self.process.pid)
        self.living = set(range(size))
        self.ends = {}
        self.threads = []

    def announcement(self, rank):
        return Announcement(self.world, rank, rank, self.size, "hydra")

    def start(self, rank, call, *arguments, **options):
        def work():
            try:
                call(self.announcement(rank), self.launcher, *arguments, **options)
                self.ends[rank] = None
            except Exception as error:
                self.ends[rank] = error
            if call is not meeting.meet or self.ends[rank] is not None:
                self.living.discard(rank)  # its process ends

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self.threads.append(thread)

    def meet(self, rank, timeout=10.0, **options):
        self.start(rank, meeting.meet, timeout, **options)

    def leave(self, rank):
        self.start(rank, meeting.leave)

    def there(self, count):
        """Come back when so many ranks are at the meeting: the host's socket, and one of it for each guest."""
        name = f"mpdp-meeting-{os.getuid()}-{self.launcher.pid}-{self.launcher.start}"
        deadline = time.monotonic() + 10
        while Path("/proc/net/unix").read_text().count(name + "\n") != count:
            assert time.monotonic() < deadline, self.ends
            time.sleep(0.01)
        time.sleep(0.1)  # what they say comes at once

    def join(self, seconds=20.0):
        deadline = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in self.threads), self.ends
        return self.ends

    def reported(self):
        errors = [error for error in self.ends.values() if error is not None]
        return [str(error) for error in errors if not getattr(error, "secondary", False)]


@pytest.fixture
def node(monkeypatch):
    nodes = {}

    def node(size, world=None):
        made = Node(size, world)
        nodes[made.launcher.pid] = made
        return made

    monkeypatch.setattr(meeting, "ranks_of", lambda launcher: nodes[launcher.pid].living)
    monkeypatch.setattr(meeting, "VANISHED", 0.2)
    monkeypatch.setattr(meeting, "LOOK", 0.05)
    yield node
    for made in nodes.values():
        made.process.kill()
        made.process.wait()


@pytest.mark.parametrize("size", [2, 3, 4, 16])
def test_all_go_when_all_have_come(node, size):
    here = node(size)
    for rank in range(1, size):
        here.meet(rank)
    time.sleep(0.1)
    assert here.ends == {}
    here.meet(0)
    assert here.join() == dict.fromkeys(range(size))


def test_two_jobs_of_one_user_do_not_mix(node):
    one, two = node(2), node(2)
    one.meet(0), two.meet(1)
    time.sleep(0.2)
    assert one.ends == two.ends == {}
    one.meet(1), two.meet(0)
    assert one.join() == two.join() == {0: None, 1: None}


@pytest.mark.parametrize("size", [2, 3])
def test_all_leave_in_order_when_nobody_calls_init(node, size):
    here = node(size)
    for rank in range(size):
        here.leave(rank)
    assert here.join() == dict.fromkeys(range(size))


@pytest.mark.parametrize("first", ["leave", "meet"])
def test_a_rank_that_leaves_fails_those_that_wait(node, first):
    here = node(3)
    steps = [lambda: here.leave(1), lambda: (here.meet(0), here.meet(2))]
    for step in steps if first == "leave" else reversed(steps):
        step()
        time.sleep(0.1)
    ends = here.join()
    assert ends[1] is None
    assert all(isinstance(ends[rank], RankFailedError) for rank in (0, 2) if rank in ends)
    assert len(here.reported()) >= 1
    assert here.reported()[0].startswith("rank 1 left before mpdp.init() while rank")


def test_a_rank_that_failed_is_not_reported_again(node):
    here = node(3)
    here.meet(0), here.meet(2)
    here.there(2)
    here.start(1, meeting.tell_failure, "ValueError: a bad sample")
    ends = here.join()
    assert here.reported() == []
    assert "rank 1 failed before mpdp.init(): ValueError: a bad sample" in str(ends[0])


@pytest.mark.parametrize("host", [0, 1])
def test_a_rank_that_vanished_is_reported_once(node, host):
    here = node(3)
    here.meet(host)
    here.there(1)
    here.meet(1 - host)
    here.there(2)
    here.living.discard(2)
    ends = here.join()
    (report,) = here.reported()
    assert report == (
        "rank 2 ended before mpdp.init() without a word (killed, crashed or os._exit) "
        "while ranks 0, 1 wait in it"
    )
    assert ends[1].secondary


def test_a_rank_whose_failure_is_known_is_not_reported_again(node):
    here = node(2)
    here.meet(0, reported=lambda rank: rank == 1)
    here.living.discard(1)
    assert here.join()[0].secondary


def test_those_who_leave_do_not_wait_for_one_that_vanished(node):
    here = node(3)
    here.leave(0), here.leave(1)
    time.sleep(0.3)
    assert here.ends == {}
    here.living.discard(2)
    assert here.join() == {0: None, 1: None}


def test_a_vanished_rank_of_several_nodes_has_no_name(node):
    here = node(2, world=8)
    here.meet(0)
    here.living.discard(1)
    here.join()
    assert here.reported()[0].startswith("1 rank(s) of this node ended before mpdp.init()")


def test_a_late_rank_is_a_stall(node):
    here = node(2)
    here.meet(0, timeout=0.3)
    assert isinstance(here.join()[0], StallError)
    assert here.reported()[0].startswith(
        "mpdp.init: expected all 2 ranks of this node within 0 s, got no word from rank 1"
    )


def test_the_end_of_the_launcher_is_reported_once(node):
    here = node(3)
    here.meet(0), here.meet(2)
    here.there(2)
    here.process.kill()
    here.join()
    (report,) = here.reported()
    assert report.endswith(" is gone while ranks 0, 2 wait in mpdp.init()")


def test_those_who_leave_do_not_wait_without_a_launcher(node):
    here = node(2)
    here.leave(0)
    here.there(1)
    here.process.kill()
    assert here.join() == {0: None}


def test_children_that_tell_nothing_are_no_evidence(node):
    here = node(2)
    here.living = set()
    here.meet(0)
    time.sleep(0.6)
    assert here.ends == {}
    here.meet(1)
    assert here.join() == {0: None, 1: None}


@pytest.mark.parametrize(
    "announcement, launcher",
    [
        (Announcement(4, 0, 0, 1, "hydra"), Process(1, 1, "mpirun", 0, "S")),
        (Announcement(4, 0, None, None, "pmi"), Process(1, 1, "mpirun", 0, "S")),
        (Announcement(4, 0, 0, 4, "hydra"), None),
    ],
    ids=["alone on its node", "local size unknown", "launcher unknown"],
)
def test_there_is_no_meeting_where_nobody_could_come(announcement, launcher):
    meeting.meet(announcement, launcher, 0.0)
    meeting.leave(announcement, launcher)
    meeting.tell_failure(announcement, launcher, "x")
