"""Finding the MPI that mpi4py loads, with small programs that stand for Python and mpirun."""

import json

import pytest

from mpdp.cli.mpi_library import MpiLibrary, find_launcher, launcher_family, probe
from mpdp.errors import LaunchError

OPEN = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/"
OPEN_4 = "mpirun (Open MPI) 4.1.4"
HYDRA = "HYDRA build details:\n    Version:                                 5.0.2"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260101"


def program(path, text, status=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'EOF'\n{text}\nEOF\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


def python(tmp_path, answer, status=0):
    return program(tmp_path / "python", answer if isinstance(answer, str) else json.dumps(answer), status)


def test_probe(tmp_path):
    found = probe(python(tmp_path, {"vendor": "MPICH", "version": [5, 0, 2], "path": "/v/lib/libmpi.so.12"}))
    assert found == MpiLibrary("mpich", "MPICH", (5, 0, 2), "/v/lib/libmpi.so.12")
    assert str(found) == "MPICH 5.0.2"


@pytest.mark.parametrize(
    "answer, message",
    [
        (
            {"missing": "No module named 'mpi4py'"},
            "mpi4py: expected it to be installed, .*pip install mpi4py",
        ),
        (
            {"unloadable": "cannot load MPI library\nlibmpi.so: not found"},
            r"MPI: expected a library that mpi4py can load, got none \(cannot .*pip install .mpdp\[mpich\]",
        ),
        (
            {"vendor": "Microsoft MPI", "version": [10, 0, 0], "path": ""},
            "MPI: expected one of .*got 'Microsoft MPI'",
        ),
        ("", r"mpi4py: expected it to load, got exit status 0 \(no message\)"),
    ],
    ids=["no mpi4py", "no library", "unknown make", "crash"],
)
def test_what_is_missing_is_named(tmp_path, answer, message):
    with pytest.raises(LaunchError, match=message):
        probe(python(tmp_path, answer))


@pytest.mark.parametrize(
    "text, family",
    [(OPEN, "openmpi"), (OPEN_4, "openmpi"), (HYDRA, "mpich"), (INTEL, "intel"), ("what", None)],
)
def test_a_launcher_says_who_it_is(tmp_path, text, family):
    assert launcher_family(program(tmp_path / "mpirun", text)) == family


def test_the_librarys_own_launcher_comes_first(tmp_path):
    own = program(tmp_path / "venv/bin/mpirun", HYDRA)
    program(tmp_path / "path/mpirun", HYDRA)
    library = MpiLibrary("mpich", "MPICH", (5, 0, 2), str(tmp_path / "venv/lib/libmpi.so.12"))
    assert find_launcher(library, {"PATH": str(tmp_path / "path")}) == own


def test_a_distributions_layout(tmp_path):
    """Debian: /usr/lib/x86_64-linux-gnu/libmpi.so.40, and mpirun of whichever MPI is the alternative."""
    program(tmp_path / "usr/bin/mpirun", HYDRA)
    own = program(tmp_path / "usr/bin/mpirun.openmpi", OPEN_4)
    library = MpiLibrary(
        "openmpi", "Open MPI", (4, 1, 4), str(tmp_path / "usr/lib/x86_64-linux-gnu/libmpi.so.40")
    )
    assert find_launcher(library, {"PATH": ""}) == own


def test_the_path_is_next(tmp_path):
    found = program(tmp_path / "path/mpirun", OPEN)
    library = MpiLibrary("openmpi", "Open MPI", (5, 0, 11), str(tmp_path / "venv/lib/libmpi.so.40"))
    assert find_launcher(library, {"PATH": str(tmp_path / "path")}) == found


def test_another_mpis_launcher_is_refused(tmp_path):
    other = program(tmp_path / "path/mpirun", HYDRA)
    library = MpiLibrary("openmpi", "Open MPI", (5, 0, 11), "/v/lib/libmpi.so.40")
    with pytest.raises(
        LaunchError, match=r"mpirun: expected one of Open MPI 5.0.11 .* at /v/lib/libmpi.so.40"
    ) as info:
        find_launcher(library, {"PATH": str(tmp_path / "path")})
    assert f"got {other} of mpich; put that MPI's mpirun on PATH" in str(info.value)


def test_no_launcher_at_all(tmp_path):
    library = MpiLibrary("mpich", "MPICH", (5, 0, 2), "")
    with pytest.raises(LaunchError, match=r"mpirun: expected one of MPICH 5.0.2 .*, got none; "):
        find_launcher(library, {"PATH": str(tmp_path)})
