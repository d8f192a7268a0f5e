"""Ranks that hold different things get one error on all ranks, before or at the first step it can be seen."""

import re

import pytest
from launching import PROGRAMS


@pytest.mark.parametrize(
    ("size", "transport", "nodes"),
    [(2, "auto", None), (3, "auto", None), (2, "mpi", None), (3, "two_level", "2")],
)
def test_every_difference_is_named_on_all_ranks(job, size, transport, nodes):
    environ = {"MPDP_TRANSPORT": transport, "MPDP_NODES": nodes}
    result = job(PROGRAMS / "disagreement.py", "all", n=size, environ=environ).check()
    assert result.output.count("passed ") == 26


def test_an_agreed_error_that_nobody_catches_is_printed_once(job):
    result = job(PROGRAMS / "agreed.py", n=3)
    assert result.rc != 0
    assert not result.timed_out
    assert len(re.findall(r"^\[\d/3\] error", result.output, re.MULTILINE)) == 1
    assert (
        "[0/3] error in step 0: ValueError: global_batch_size: expected an integer of 1 or more"
        in result.output
    )
    assert "(on every rank)" in result.output
