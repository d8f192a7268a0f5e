"""A run that is stopped after any update and resumed is the run that was never stopped."""

import pytest
from launching import PROGRAMS


def save_and_resume(
    job,
    folder,
    saved,
    resumed,
    saved_device="cpu",
    device="cpu",
    transport="auto",
    placements=("replicated",) * 2,
):
    common = (folder, str(saved), saved_device)
    environ = {"MPDP_TRANSPORT": transport, "SAVED_PLACEMENT": placements[0]}
    program = PROGRAMS / "checkpoints.py"
    for mode, n, where, placement, seconds in (
        ("save", saved, saved_device, placements[0], 60),
        ("resume", resumed, device, placements[1], 120),
    ):
        environ["PLACEMENT"] = placement
        job(program, mode, *common, where, n=n, timeout=seconds, environ=environ).check()


@pytest.mark.parametrize(
    ("saved", "resumed", "placements"),
    [
        (1, 1, ("replicated", "replicated")),
        (2, 2, ("replicated", "replicated")),
        (3, 3, ("sharded", "replicated")),
        (3, 3, ("sharded", "sharded")),
        (4, 1, ("sharded", "root")),
        (4, 2, ("root", "sharded")),
        (4, 3, ("replicated", "sharded")),
        (1, 4, ("replicated", "root")),
    ],
)
def test_resume_after_every_update(job, tmp_path, saved, resumed, placements):
    """Bit-equal at the same number of ranks; each sample once and equal to rounding at another (D2, D4, C4, D6)."""
    save_and_resume(job, tmp_path, saved, resumed, placements=placements)


@pytest.mark.parametrize(("saved", "resumed"), [(2, 2), (3, 2)])
def test_resume_over_mpi(job, tmp_path, saved, resumed):
    save_and_resume(job, tmp_path, saved, resumed, transport="mpi")


@pytest.mark.parametrize(
    ("saved", "saved_device", "resumed", "device"),
    [(1, "cuda", 1, "cuda"), (2, "cuda", 2, "cuda"), (2, "cpu", 1, "cuda"), (1, "cuda", 2, "cpu")],
)
def test_checkpoints_move_between_devices(gpu, job, tmp_path, saved, saved_device, resumed, device):
    save_and_resume(job, tmp_path, saved, resumed, saved_device, device)
