"""Reducers over processes whose ranks come to them in every way, right and wrong, hundreds of times."""

import re

import pytest
from launching import PROGRAMS


@pytest.mark.parametrize(
    ("size", "transport", "turns"), [(2, "auto", 600), (3, "auto", 600), (4, "auto", 300), (3, "mpi", 60)]
)
def test_ranks_that_come_to_a_reducer_in_every_way(job, size, transport, turns):
    program = PROGRAMS / "first_chunk.py"
    result = job(program, str(turns), "7", n=size, environ={"MPDP_TRANSPORT": transport}).check()
    counts = re.search(r"passed right (\d+) step (\d+) elsewhere (\d+) reducer (\d+)", result.output)
    assert counts is not None, result
    numbers = [int(count) for count in counts.groups()]
    assert sum(numbers) == turns
    assert min(numbers) > 5
