"""Clocks of ranks that are seconds apart: the offset that is found is right to the error that is told."""

import time

import pytest
from thread_ranks import run

from mpdp.comm.clocks import clock_offset

SECOND = 1_000_000_000


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_an_offset_is_right_to_its_error(size):
    def measure(comm):
        return clock_offset(comm, lambda: time.perf_counter_ns() + comm.rank * 7 * SECOND)

    found = run(size, measure)
    assert found[0] == (0, 0)
    for rank, (offset, error) in enumerate(found[1:], 1):
        assert abs(offset - rank * 7 * SECOND) <= error
        assert 0 < error < SECOND


def test_the_fastest_exchange_counts():
    """A slow answer puts rank 0's time anywhere in between; one fast one is enough."""
    delays = [0.6, 0.0, 0.6]

    def measure(comm):
        def clock():
            if comm.rank == 0:
                time.sleep(delays.pop(0))
            return time.perf_counter_ns()

        return clock_offset(comm, clock, rounds=3)

    (_, (offset, error)) = run(2, measure)
    assert abs(offset) <= error < 0.3 * SECOND
