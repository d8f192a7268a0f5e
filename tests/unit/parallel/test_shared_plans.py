"""Plans are measured on rank 0 and the same on every rank afterwards."""

import pytest
import thread_ranks

from mpdp.kernels.plan_book import PlanBook
from mpdp.parallel.shared_plans import share_plans


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_ranks_have_the_plans_of_the_first(size):
    def body(comm):
        book = PlanBook(timed=True)
        book.find("a", lambda: f"measured on {comm.rank}")
        if comm.rank > 0:
            book.find("b", lambda: "never")
        found = share_plans(book, comm)
        assert not book.timed and book.missing == 0
        return found, book.plans()

    for found, plans in thread_ranks.run(size, body):
        assert (found, plans) == (1, {"a": "measured on 0"})


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_failed_measurement_is_raised_on_all_ranks(size):
    def body(comm):
        book = PlanBook(timed=True)
        book.find("a", lambda: 1 // 0)
        with pytest.raises(Exception, match="division"):
            share_plans(book, comm)
        return True

    assert all(thread_ranks.run(size, body))
