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
