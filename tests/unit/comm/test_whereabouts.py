"""What is said of the other ranks when one reports a failure."""

from mpdp.comm.whereabouts import REACH, Whereabouts


def test_ranks_that_do_the_same_are_named_together():
    others = Whereabouts(2, 9)
    for rank in (0, 1, 3, 4, 5, 8):
        others.note(rank, "in step 4 (all_reduce)")
    others.note(6, "in step 5")
    assert str(others) == "ranks 0, 1, 3-5, 8 in step 4 (all_reduce); rank 6 in step 5; no word of rank 7"


def test_where_all_answer_nobody_is_missed():
    others = Whereabouts(0, 2)
    assert str(others) == "no word of rank 1"
    others.note(1, "in step 4")
    assert str(others) == "rank 1 in step 4"


def test_of_thousands_only_the_neighbours_in_the_ring_are_asked():
    others = Whereabouts(5, 10_000)
    assert len(others.asked) == 2 * REACH and others.near(5, 9_999) and not others.near(5, 5_000)
    assert str(others) == "no word of ranks 0-4, 6-37, 9973-9999"
