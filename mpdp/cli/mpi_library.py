"""Which MPI library mpi4py will load, and which launcher belongs to it.

Owns the question and asks it in a process of its own, which loads the library without ``MPI_Init``. A
launcher of another MPI than the library's starts n worlds of one, or dies in ``MPI_Init``, so the pair is
checked.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import LaunchError

_PROBE = """
import json, sys
try:
    import mpi4py
except ImportError as error:
    print(json.dumps({"missing": str(error)})); sys.exit()
mpi4py.rc.initialize = mpi4py.rc.finalize = False
try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    print(json.dumps({"unloadable": str(error)})); sys.exit()
vendor, version = MPI.get_vendor()
path = ""
try:
    with open("/proc/self/maps") as maps:
        names = [line.split(None, 5)[5].strip() for line in maps if "libmpi" in line]
    path = next((name for name in names if name.rsplit("/", 1)[-1].startswith("libmpi.")), "")
except OSError:
    pass
print(json.dumps({"vendor": vendor, "version": version, "path": path, "details": MPI.Get_library_version()}))
"""
_FAMILIES = {"Open MPI": "openmpi", "MPICH": "mpich", "MVAPICH": "mpich", "Intel MPI": "intel"}
_NAMES = {
    "openmpi": ("mpirun", "mpirun.openmpi", "orterun", "mpiexec", "mpiexec.openmpi"),
    "mpich": ("mpirun", "mpiexec.hydra", "mpirun.mpich", "mpiexec", "mpiexec.mpich"),
    "intel": ("mpirun", "mpiexec.hydra", "mpiexec"),
}
_INSTALL = (
    'install one with: pip install "mpdp[mpich]" (or "mpdp[openmpi]"), '
    "or point MPI4PY_LIBMPI at the libmpi.so of your system"
)


@dataclass(frozen=True)
class MpiLibrary:
    """The MPI library that mpi4py loads.

    Attributes:
        family: ``"openmpi"``, ``"mpich"`` or ``"intel"``.
        vendor: its name for people.
        version: major, minor, patch.
        path: the file, or ``""`` where the system does not say.
        details: what it says of its version.
    """

    family: str
    vendor: str
    version: tuple[int, ...]
    path: str
    details: str = ""

    def __str__(self) -> str:
        return f"{self.vendor} {'.'.join(str(part) for part in self.version)}"


def probe(python: str = sys.executable, environ: Mapping[str, str] | None = None) -> MpiLibrary:
    """Ask which MPI library mpi4py loads. **Local.** One short-lived process, 0.1 to 0.3 s.

    Raises:
        LaunchError: mpi4py or an MPI library is missing, or it is of an unknown make.
    """
    result = subprocess.run(
        [python, "-c", _PROBE], capture_output=True, text=True, env=None if environ is None else dict(environ)
    )
    try:
        answer = json.loads(result.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        detail = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise LaunchError(
            f"mpi4py: expected it to load, got exit status {result.returncode} ({detail}); "
            'run `python -c "from mpi4py import MPI"` to see why'
        ) from None
    if "missing" in answer:
        raise LaunchError(
            f"mpi4py: expected it to be installed, got {answer['missing']!r}; "
            "install it with: pip install mpi4py"
        )
    if "unloadable" in answer:
        first = answer["unloadable"].strip().splitlines()[0]
        raise LaunchError(f"MPI: expected a library that mpi4py can load, got none ({first}); {_INSTALL}")
    family = _FAMILIES.get(answer["vendor"])
    if family is None:
        known = ", ".join(_FAMILIES)
        raise LaunchError(
            f"MPI: expected one of {known}, got {answer['vendor']!r}; start the job with its own mpirun"
        )
    return MpiLibrary(
        family, answer["vendor"], tuple(answer["version"]), answer["path"], answer.get("details", "")
    )


def find_launcher(library: MpiLibrary, environ: Mapping[str, str] | None = None) -> str:
    """Return the path of the launcher that belongs to a library.

    **Local.** Looks in ``bin`` beside the library's own folders first, then on PATH, and asks each candidate
    who it is.

    Raises:
        LaunchError: there is none, or only another MPI's.
    """
    environ = os.environ if environ is None else environ
    others: list[str] = []
    for candidate in _candidates(library, environ):
        family = launcher_family(candidate)
        if family == library.family:
            return candidate
        others.append(f"{candidate} of {family or 'an unknown make'}")
    found = ", ".join(others) if others else "none"
    where = f" at {library.path}" if library.path else ""
    raise LaunchError(
        f"mpirun: expected one of {library} (mpi4py loads its library{where}), got {found}; "
        "put that MPI's mpirun on PATH, or point MPI4PY_LIBMPI at the library of the mpirun that you have"
    )


def launcher_family(path: str) -> str | None:
    """Return the family of a launcher from what it says of itself, or None. **Local.**"""
    try:
        result = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = result.stdout + result.stderr
    if re.search(r"Open MPI|OpenRTE|PRRTE", text):
        return "openmpi"
    if "Intel(R) MPI" in text:
        return "intel"
    return "mpich" if re.search(r"HYDRA|MPICH", text) else None


def first_on_path(environ: Mapping[str, str] | None = None) -> tuple[str, str | None] | None:
    """Return the mpirun that a user who types ``mpirun`` gets, and its family; None where there is none. **Local.**"""
    found = shutil.which("mpirun", path=(os.environ if environ is None else environ).get("PATH", os.defpath))
    return None if found is None else (found, launcher_family(found))


def _candidates(library: MpiLibrary, environ: Mapping[str, str]) -> list[str]:
    folders: list[str] = []
    if library.path:
        for file in (Path(library.path), Path(library.path).resolve()):
            folders += [str(parent / "bin") for parent in list(file.parents)[:4] if parent != parent.parent]
    folders += environ.get("PATH", os.defpath).split(os.pathsep)
    found = (
        shutil.which(name, path=folder)
        for folder in dict.fromkeys(folders)
        for name in _NAMES[library.family]
    )
    return list(dict.fromkeys(path for path in found if path is not None))
