"""Batch norm over ranks: n ranks compute what one computes, whatever the shares; and what goes wrong ends the job."""

import json
import re

import numpy as np
import pytest
from launching import PROGRAMS

PROGRAM, FAULTS = PROGRAMS / "batch_norm.py", PROGRAMS / "batch_norm_faults.py"
CASES = ["uneven", "accumulate", "fewer than ranks", "one", "single samples", "own loop"]
# Updates amplify rounding: with one sample a rank, the statistics of two or three samples do so by their nature.
TOLERANCE = 1e-11


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one rank computes, once a case."""
    import launching

    results = {}

    def train(case):
        if case not in results:
            folder = tmp_path_factory.mktemp("alone")
            launching.launch(PROGRAM, case, folder, n=1, form="python").check()
            results[case] = read(folder, 1)
        return results[case]

    return train


def read(folder, size):
    with np.load(folder / f"n{size}.npz") as arrays:
        state = dict(arrays)
    return state, json.loads((folder / f"n{size}.json").read_text())


def check(alone, folder, case, size):
    state, rest = read(folder, size)
    expected, numbers = alone(case)
    assert state.keys() == expected.keys() and "second.running_var" in state
    for name, array in state.items():
        assert np.abs(array - expected[name]).max() <= TOLERANCE * np.abs(expected[name]).max(), name
    assert rest["losses"] == pytest.approx(numbers["losses"], rel=TOLERANCE)
    assert rest["result"] == pytest.approx(numbers["result"], rel=TOLERANCE)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks_equal_one_rank(job, alone, tmp_path, case, size):
    job(PROGRAM, case, tmp_path, n=size).check()
    check(alone, tmp_path, case, size)


@pytest.mark.parametrize("case", ["accumulate", "fewer than ranks"])
def test_ranks_over_mpi_equal_one_rank(job, alone, tmp_path, case):
    job(PROGRAM, case, tmp_path, n=3, environ={"MPDP_TRANSPORT": "mpi"}).check()
    check(alone, tmp_path, case, 3)


@pytest.mark.parametrize("size", [2, 3])
def test_local_statistics_leave_replicas_equal(job, tmp_path, size):
    """The program compares every bit of weights and running statistics after each update."""
    result = job(PROGRAM, "local", tmp_path, n=size).check()
    state, _ = read(tmp_path, size)
    assert np.isfinite(state["norm.running_var"]).all() and (state["norm.running_mean"] != 0).all()
    assert "error" not in result.output


MESSAGES = {
    # The launcher may see it first, and end the survivors before they have their say.
    "kill": r"rank \d died|killed by signal|rank \d was the first to end",
    "raise": r"\[\d/\d\] error in step 2: ValueError: a bad sample",
    "branch": r"DisagreementError: batch norm (left|right) forward: expected all ranks in it, got rank",
    "zero rows": r"rank \d has no sample of this micro-batch and ran model and loss on zero rows",
    "no loss": r"ValueError: loss: expected one on every rank, got None: the other ranks' backward waits",
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fault", MESSAGES)
def test_what_goes_wrong_ends_the_job(job, fault, size):
    result = job(FAULTS, fault, n=size, form="mpdp run")
    assert result.rc != 0 and not result.timed_out and not result.orphans and result.seconds < 10, f"{result}"
    assert re.search(MESSAGES[fault], result.output), f"{result}"
