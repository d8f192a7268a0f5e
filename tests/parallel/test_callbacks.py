"""What one rank does alone in a callback is caught at once, and told as what it is; what all do works."""

import re

import pytest
from launching import PROGRAMS

PROGRAM = PROGRAMS / "callbacks.py"


@pytest.mark.parametrize(
    ("call", "method", "n", "transport", "told"),
    [
        ("evaluate", "on_step", 2, "auto", r"evaluate\(\)"),
        ("predict", "on_epoch", 3, "auto", r"predict\(\)"),
        ("check", "on_validation", 2, "auto", "a collective inside a callback"),
        ("save", "on_step", 2, "mpi", r"save\(\)"),
        ("barrier", "on_epoch", 3, "mpi", "a collective inside a callback"),
        ("data barrier", "on_validation", 2, "auto", "a collective inside a callback"),
        ("data all-reduce", "on_step", 3, "auto", "a collective inside a callback"),
        ("data started", "on_step", 2, "auto", "a collective inside a callback"),
        ("data numbers", "on_step", 2, "auto", "a collective inside a callback"),
        ("broadcast", "on_step", 2, "auto", "a collective inside a callback"),
    ],
)
def test_a_collective_that_one_rank_calls_alone(job, tmp_path, call, method, n, transport, told):
    result = job(PROGRAM, call, method, tmp_path / "run", n=n, environ={"MPDP_TRANSPORT": transport})
    assert result.rc != 0 and not result.timed_out and not result.orphans, result
    assert result.seconds < 10, result
    assert len(result.values) == n, result
    for message, agreed in result.results:
        assert agreed
        assert re.match(rf"{told}: expected every rank to call it at the same step, got ", message), message
        assert re.search(rf"rank {n - 1} in {told} at step 3", message), message


@pytest.mark.parametrize("method", ["on_step", "on_epoch"])
def test_a_callback_that_raises_on_one_rank(job, method):
    result = job(PROGRAM, "raise", method, n=3)
    assert result.rc != 0 and not result.timed_out and result.seconds < 10, result
    assert re.search(r"^\[2/3\] error in step 3: ZeroDivisionError: division by zero", result.output, re.M), (
        result
    )
    assert f"in the callback Watch.{method}, called on rank 2 after 3 updates" in result.output


@pytest.mark.parametrize("method", ["on_step", "on_validation"])
def test_what_all_ranks_do_works(job, tmp_path, method):
    sums = set()
    for size in (1, 2, 3):
        result = job(PROGRAM, "all", method, tmp_path / f"{size}", n=size).check()
        assert [value[:2] for value in result.results] == [["passed", 6]] * size, result
        sums |= {round(value[2], 5) for value in result.results}
    assert len(sums) == 1, "training is what it was"
