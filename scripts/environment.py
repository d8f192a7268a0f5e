"""Make a virtual environment with mpdp installed in it, once, and print its folder.

    python3 scripts/environment.py NAME EXTRA[,EXTRA...]

It is made again only when the sources, the extras or the Python changed. It lies in the checkout where that can be
written, else in the user's cache, so that root and an ordinary user may share a checkout.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("setup.py", "setup.cfg", "README.md", "LICENSE", "mpdp")


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    if sys.version_info < (3, 11):  # noqa: UP036  this file runs before pip can refuse
        print(f"python: expected 3.11 or newer, got {sys.version.split()[0]}", file=sys.stderr)
        return 1
    name, extras = sys.argv[1:]
    base = writable_base()
    folder = base / f"{name}-py{sys.version_info.major}.{sys.version_info.minor}-{os.getuid()}"
    with open(base / f"{folder.name}.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        requirements = digest(extras, sys.version, sys.executable, (ROOT / "setup.cfg").read_text())
        sources = digest(requirements, *(f"{p.relative_to(ROOT)}{p.read_text()}" for p in source_files()))
        stamp = folder / "mpdp-sources"
        old = stamp.read_text().split() if stamp.exists() else []
        if old != [requirements, sources]:
            install(folder, extras, only_sources=bool(old) and old[0] == requirements)
            stamp.write_text(f"{requirements}\n{sources}\n")
    print(folder)
    return 0


def writable_base() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = hashlib.sha256(str(ROOT).encode()).hexdigest()[:12]
    for base in (
        ROOT / ".venv",
        cache / "mpdp" / place,
        Path(tempfile.gettempdir()) / f"mpdp-{os.getuid()}-{place}",
    ):
        with contextlib.suppress(OSError):
            base.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=base):
                return base
    raise SystemExit("environment: expected a writable checkout, cache or temporary folder, found none")


def source_files() -> list[Path]:
    return sorted(
        p
        for name in SOURCES
        for p in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
        if p.suffix in (".py", ".cu", ".cfg", ".typed")
    )


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def install(folder: Path, extras: str, only_sources: bool) -> None:
    """Install from a copy of the sources: building would leave files in the checkout."""
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip"]
    if not only_sources:
        print(f"making {folder} (a minute or so)", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        if run([sys.executable, "-m", "venv", str(folder)], quiet=True):
            # Debian splits ensurepip off: an environment without pip of its own, filled by the one outside.
            shutil.rmtree(folder, ignore_errors=True)
            if run([sys.executable, "-m", "venv", "--without-pip", str(folder)]):
                raise SystemExit(
                    "environment: expected `python3 -m venv` to work; install your system's python3-venv"
                )
            pip = [sys.executable, "-m", "pip", "--python", str(python)]
    elif run([*pip, "--version"], quiet=True):
        pip = [sys.executable, "-m", "pip", "--python", str(python)]
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "mpdp"
        copy.mkdir()
        for name in SOURCES:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, copy / name)
        options = ["--force-reinstall", "--no-deps"] if only_sources else []
        if run([*pip, "install", "-q", "--disable-pip-version-check", *options, f"{copy}[{extras}]"]):
            shutil.rmtree(folder, ignore_errors=True)
            raise SystemExit("environment: pip could not install mpdp; see its message above")


def run(command: list[str], quiet: bool = False) -> int:
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    output = subprocess.DEVNULL if quiet else sys.stderr
    return subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
