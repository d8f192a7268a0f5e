"""Runs that are killed, at every update and at every moment of a save: they go on to the same bits."""

import json

import pytest
from launching import PROGRAMS

KILLED = PROGRAMS / "killed.py"
MOMENTS = ("step", "part", "saved")


@pytest.mark.parametrize("mode", ["waits", "background"])
def test_killed_at_every_update_and_moment(job, tmp_path, mode):
    """Twelve updates with shuffle, dropout, accumulation, clipping and a schedule; 36 kills, in one process each."""
    result = job(KILLED, tmp_path, "every", mode, n=1, form="python", timeout=120).check()
    assert "36 kills, each resumed to the same bits" in result.output


@pytest.mark.parametrize(
    ("size", "mode", "steps"), [(2, "background", range(1, 13)), (3, "waits", (1, 5, 6, 11))]
)
def test_a_run_of_several_ranks_that_is_killed_again_and_again(job, tmp_path, size, mode, steps):
    """Killed at each update in turn, on another rank and at another moment, and resumed after each."""
    killed_in_turn(job, tmp_path, size, mode, steps, {"MPDP_TRANSPORT": "shared_memory"})


@pytest.mark.parametrize("size", [1, 2])
def test_background_saves_beside_graphs_on_a_gpu(gpu, job, tmp_path, size):
    killed_in_turn(job, tmp_path, size, "background", (4, 8, 9), {"KILLED_DEVICE": "cuda"})


def killed_in_turn(job, tmp_path, size, mode, steps, environ):
    job(KILLED, tmp_path / "whole", "job", "0", "step", "0", mode, n=size, environ=environ).check()
    for step in steps:
        moment = MOMENTS[step % 3]
        rank = 0 if moment == "part" else step % size
        result = job(KILLED, tmp_path, "job", str(step), moment, str(rank), mode, n=size, environ=environ)
        assert result.rc != 0 and not result.timed_out and not result.orphans, result
        assert "it should have been killed" not in result.output
    job(KILLED, tmp_path, "job", "0", "step", "0", mode, n=size, environ=environ).check()
    first, last = (json.loads((folder / "run.json").read_text()) for folder in (tmp_path / "whole", tmp_path))
    assert first == last


def test_thirty_kills_while_saving_in_the_background(job, tmp_path):
    result = job(KILLED, tmp_path, "random", "30", n=1, form="python", timeout=120).check()
    assert "30 kills during" in result.output
