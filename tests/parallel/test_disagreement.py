"""Ranks that hold different things get one error on all ranks, before or at the first step it can be seen."""

import re
import sys

import launching
import pytest
from launching import PROGRAMS


@pytest.mark.parametrize(
    ("size", "transport", "nodes"),
    [(2, "auto", None), (3, "auto", None), (2, "mpi", None), (3, "two_level", "2")],
)
def test_every_difference_is_named_on_all_ranks(job, size, transport, nodes):
    environ = {"MPDP_TRANSPORT": transport, "MPDP_NODES": nodes}
    result = job(PROGRAMS / "disagreement.py", "all", n=size, environ=environ).check()
    assert result.output.count("passed ") == 38


def test_ranks_that_run_different_scripts_are_told_at_the_start(tmp_path):
    """As on hosts of which one has an older copy."""
    if launching.mpi() is None:
        pytest.skip("no MPI")
    for name, text in (
        ("a", "from launching import fault; fault(); import mpdp; mpdp.init(timeout=60)\n"),
        ("b", "from launching import fault; fault(); import mpdp; mpdp.init(timeout=60)"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(text)
    line, settings = launching.mpirun(1)
    python = [sys.executable, str(tmp_path / "a" / "train.py")]
    other = ["-n", "1", sys.executable, str(tmp_path / "b" / "train.py")]
    result = launching.run([*line, *python, ":", *other], environ=settings)
    sentence = (
        r"^\[0/2\] error .*: init: expected the same script on all ranks, got train\.py \(\w+\) on rank 0; "
    )
    assert result.rc != 0 and result.seconds < 30 and not result.orphans, result
    assert re.search(sentence, result.output, re.MULTILINE), result


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
