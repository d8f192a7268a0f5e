"""A run that is stopped after any update and resumed is the run that was never stopped."""

import pytest
from launching import PROGRAMS


def save_and_resume(job, folder, saved, resumed, saved_device="cpu", device="cpu", transport="auto"):
    common = (folder, str(saved), saved_device)
    environ = {"MPDP_TRANSPORT": transport}
    program = PROGRAMS / "checkpoints.py"
    job(program, "save", *common, saved_device, n=saved, timeout=60, environ=environ).check()
    job(program, "resume", *common, device, n=resumed, timeout=120, environ=environ).check()


@pytest.mark.parametrize(("saved", "resumed"), [(1, 1), (2, 2), (3, 3), (4, 1), (4, 2), (4, 3), (1, 4)])
def test_resume_after_every_update(job, tmp_path, saved, resumed):
    """Bit-equal at the same number of ranks; each sample once and equal to rounding at another (D2, D4, C4, D6)."""
    save_and_resume(job, tmp_path, saved, resumed)


@pytest.mark.parametrize(("saved", "resumed"), [(2, 2), (3, 2)])
def test_resume_over_mpi(job, tmp_path, saved, resumed):
    save_and_resume(job, tmp_path, saved, resumed, transport="mpi")


@pytest.mark.parametrize(
    ("saved", "saved_device", "resumed", "device"),
    [(1, "cuda", 1, "cuda"), (2, "cuda", 2, "cuda"), (2, "cpu", 1, "cuda"), (1, "cuda", 2, "cpu")],
)
def test_checkpoints_move_between_devices(gpu, job, tmp_path, saved, saved_device, resumed, device):
    save_and_resume(job, tmp_path, saved, resumed, saved_device, device)
