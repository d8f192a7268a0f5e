"""A run that is stopped after any update and resumed is the run that was never stopped."""

import pytest
from launching import PROGRAMS


@pytest.mark.parametrize(("saved", "resumed"), [(1, 1), (2, 2), (4, 3), (3, 2), (4, 1), (1, 4)])
def test_resume_after_every_update(job, tmp_path, saved, resumed):
    """Bit-equal at the same number of ranks; each sample once and equal to rounding at another (D2, D4, C4, D6)."""
    job(PROGRAMS / "checkpoints.py", "save", tmp_path, str(saved), n=saved).check()
    job(PROGRAMS / "checkpoints.py", "resume", tmp_path, str(saved), n=resumed, timeout=60).check()
