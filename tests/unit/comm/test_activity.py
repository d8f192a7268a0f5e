"""What a rank says of itself, and that it enters nothing after a failure."""

import pytest

from mpdp.comm.activity import Activity, secondary
from mpdp.errors import RankFailedError


def test_a_call_is_visible_while_it_lasts():
    activity = Activity()
    activity.step = 3
    assert str(activity) == "step 3" and activity.call is None
    activity.enter("all_reduce")
    assert str(activity) == "step 3 (all_reduce)" and activity.since > 0 and activity.count == 1
    activity.leave()
    assert activity.call is None and activity.count == 1


def test_nothing_is_entered_after_a_failure():
    activity = Activity()
    activity.failure = "rank 1 failed in step 3: ValueError: a bad sample"
    with pytest.raises(RankFailedError, match=r"barrier: expected all ranks alive, got .* \(rank 1") as info:
        activity.enter("barrier")
    assert info.value.secondary and activity.call is None


def test_a_secondary_error_is_a_rank_failure():
    assert isinstance(secondary("x"), RankFailedError)


class Watched:
    def __init__(self):
        self.aborted, self.found = 0, None

    def waiting(self):
        return self.found

    def error(self):
        return None

    def abort(self):
        self.aborted += 1
        raise OSError("the device is gone")


def test_what_a_device_waits_in_shows_where_the_host_waits_in_nothing():
    activity, watched = Activity(), Watched()
    activity.watched.append(watched)
    assert activity.waiting()[0] is None
    watched.found = ("a collective on the GPU", 12.0)
    assert activity.waiting() == watched.found and str(activity) == "step 0 (a collective on the GPU)"
    activity.enter("barrier")
    assert activity.waiting() == ("barrier", activity.since)


def test_a_failure_ends_what_waits_on_a_device():
    activity, watched = Activity(), Watched()
    activity.watched += [watched, watched]
    activity.failure = None
    assert watched.aborted == 0
    activity.failure = "rank 1 died"
    assert watched.aborted == 2
    with pytest.raises(RankFailedError, match="rank 1 died"):
        activity.check("all_reduce")
