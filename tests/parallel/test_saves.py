"""Saves that one rank makes alone, saves in the background that fail, and programs that end on one."""

import pytest
from launching import PROGRAMS

from mpdp.training import checkpoint

SAVES = PROGRAMS / "saves.py"


@pytest.mark.parametrize("size", [2, 3])
def test_alone_is_an_error_on_all_ranks_and_so_is_a_full_disk(job, tmp_path, size):
    result = job(SAVES, tmp_path, "all", n=size, timeout=60).check()
    assert result.output.count("passed ") == 6


def test_a_rank_that_saves_when_the_others_have_left(job, tmp_path):
    result = job(SAVES, tmp_path, "alone_at_the_end", n=3)
    assert result.rc != 0 and not result.timed_out and result.seconds < 20, result
    assert "left while rank 0" in result.output, result


@pytest.mark.parametrize(("size", "form"), [(1, "python"), (2, "mpirun")])
def test_a_program_that_ends_on_a_save_waits_for_it(job, tmp_path, size, form):
    job(SAVES, tmp_path, "ends_on_a_save", n=size, form=form).check()
    (found, _), reasons = checkpoint.newest(tmp_path / f"ends-n{size}" / "checkpoints")
    assert found.step == 3 and reasons == []


@pytest.mark.parametrize(("size", "form"), [(1, "python"), (2, "mpirun")])
def test_a_program_does_not_end_well_on_a_save_that_fails(job, tmp_path, size, form):
    result = job(SAVES, tmp_path, "ends_on_a_save_that_fails", n=size, form=form)
    assert result.rc != 0 and not result.timed_out and result.seconds < 20, result
    assert "CheckpointError: checkpoint: expected to write below" in result.output, result
    assert "No space left on device" in result.output
