"""The run folder: log, configuration and checkpoints of one run, written by rank 0 alone.

``log.jsonl`` holds one JSON object a line: one an update, one an epoch, and at the end of ``fit`` the step times of
each rank and the memory of rank 0. The guide lists their keys. A resumed run cuts the log back to the checkpoint, so
every step stands in it once. ``plans.json`` lists the plans that were timed. ``lock`` keeps other jobs out.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..comm.agreement import on_root
from ..parallel.record import Kind, exchange
from ..world import World, init
from . import checkpoint, run_lock
from .appending import take_over
from .run_lock import RunLock

T = TypeVar("T")
_FLUSH_SECONDS = 1.0


def _told(call: Callable[[], T]) -> T:
    """Return what ``call()`` does, and say of an OSError that it is about the run's folder. **Local.**"""
    try:
        return call()
    except OSError as error:
        raise OSError(
            f"run_dir: expected a folder that can be written, got {error}; choose another one or mend it"
        ) from error


def _look_at(checkpoints: Path) -> None:
    if checkpoints.exists() and not (checkpoints.is_dir() and os.access(checkpoints, os.W_OK)):
        raise OSError(f"{checkpoints}, which is no folder that can be written")


def _locked(path: Path, patience: float) -> RunLock | None:
    path.mkdir(parents=True, exist_ok=True)
    return run_lock.take(path, patience)


@dataclass
class Resumed:
    """What a trainer has taken up before it opens its folder.

    Attributes:
        rows: of the log that belong to it; 0 where ``resume()`` found none, None before any call.
        path: the checkpoint that was named; None where the newest one of the folder was asked for.
        found_none: whether ``resume()`` has looked into the folder and found no checkpoint.
    """

    rows: int | None = None
    path: Path | None = None
    found_none: bool = False


class RunFolder:
    """What rank 0 writes; on other ranks and without a folder every method does nothing.

    **Local.**

    Args:
        path: the run's folder, or None.
        writes: whether this rank is the one that writes.
    """

    def __init__(self, path: str | os.PathLike[str] | None, writes: bool) -> None:
        self.path = None if path is None else Path(path)
        self.writes = writes and self.path is not None
        self._log: Path | None = None
        self._pending: list[str] = []
        self._at_exit: weakref.finalize | None = None
        self.locks: list[RunLock] = []  # that of the folder, while this is what writes there
        self._flushed = 0.0
        self._stepped = time.monotonic()
        self.rows = 0

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints lie."""
        if self.path is None:
            raise ValueError(
                "run_dir: expected a folder for checkpoints, got None; pass run_dir= to the Trainer"
            )
        return self.path / "checkpoints"

    @property
    def used(self) -> bool:
        """Whether an earlier run left a log or checkpoints here."""
        if self.path is None:
            return False
        log = self.path / "log.jsonl"
        return (log.is_file() and log.stat().st_size > 0) or checkpoint.has_any(self.path / "checkpoints")

    def claim(self, config: dict[str, Any], resumed: Resumed, patience: float = run_lock.PATIENCE) -> None:
        """Open the folder for a run; one that an earlier run has used only where that was resumed.

        From then on other processes are kept out, until this folder is given up or gone.

        Args:
            config: see :meth:`open`.
            resumed: what was taken up before.
            patience: seconds to wait for another process that writes there.

        Raises:
            ValueError: another running job writes there; or an earlier run is there, and nothing of it, or a checkpoint
                of another run, was taken up.
            OSError: the folder cannot be written.
        """
        keep_rows, foreign = resumed.rows, resumed.path is not None and not self._holds(resumed.path)
        if foreign:  # its rows are in another log
            keep_rows = 0 if resumed.found_none else None
        asked = f" to go on in from {resumed.path}" if foreign else ""
        if self.path is None or not self.writes:
            return
        path = self.path
        if keep_rows is None and not _told((path / run_lock.NAME).exists):
            self._refuse_used(asked)  # and leave it as it is
        _told(lambda: _look_at(path / "checkpoints"))
        lock = _told(lambda: _locked(path, patience))
        try:
            if keep_rows is None:  # also by a job that has ended just now
                self._refuse_used(asked)
            self.open(config, keep_rows)
            self.locks[:] = [] if lock is None else [lock]
        finally:
            del lock  # a traceback would keep it

    def _refuse_used(self, asked: str) -> None:
        if _told(lambda: self.used):
            raise ValueError(
                f"run_dir: expected a new or empty folder{asked}, got {self.path} with an earlier run; "
                "call trainer.resume() to go on with it, or choose another folder"
            )

    def _holds(self, path: Path) -> bool:
        """Return whether a checkpoint lies here, by whatever names and links it was found."""
        with contextlib.suppress(OSError):
            return self.path is not None and any(
                parent.samefile(self.checkpoints) for parent in (path.parent, path.resolve().parent)
            )
        return False

    def open(self, config: dict[str, Any], keep_rows: int | None) -> None:
        """Make the folder, check that it can be written, and open the log.

        Args:
            config: what ``config.json`` holds, beside what it held at the run's earlier starts.
            keep_rows: rows of an existing log to keep; None starts an empty one.

        Raises:
            OSError: the folder cannot be written.
        """
        if not self.writes or self.path is None:
            return
        path = self.path
        _told(lambda: _look_at(path / "checkpoints"))
        _told(lambda: self._open(path, config, keep_rows or 0))

    def _open(self, path: Path, config: dict[str, Any], keep_rows: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        file = path / "config.json"
        before = _starts(file) if keep_rows else []
        file.write_text(json.dumps({**config, "before": before}, indent=1) + "\n")
        log = path / "log.jsonl"
        take_over(log, self)
        lines = log.read_bytes().splitlines(keepends=True) if keep_rows and log.exists() else []
        kept = lines[:keep_rows]
        temporary = log.with_suffix(".tmp")
        temporary.write_bytes(b"".join(kept))
        os.replace(temporary, log)
        self.rows = len(kept)
        self._log = log
        self._pending.clear()
        if self._at_exit is None:  # a program with a loop of its own has no end of training that would flush
            # The lock is an argument, so it is held until that is done.
            self._at_exit = weakref.finalize(self, _write_rest, log, self._pending, self.locks, os.getpid())

    def give_up(self) -> None:
        """Write what waits in memory, and no row from then on: another trainer goes on with the log."""
        with contextlib.suppress(OSError):
            self.flush()
        self._pending.clear()
        self.locks.clear()
        self._log = None

    def row(self, **fields: Any) -> None:
        """Append one row to the log; it reaches the file within about a second."""
        if self._log is None:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        self._pending.append(json.dumps(finite) + "\n")
        self.rows += 1
        now = time.monotonic()
        if now - self._flushed > _FLUSH_SECONDS:
            try:
                self.flush()
            except OSError as error:
                raise OSError(
                    f"run_dir: expected to write its log, got {error}; free or mend the disk, and resume"
                ) from error
            self._flushed = now

    def step_row(self, step: int, epoch: int, loss: float, lr: float, **beside: Any) -> None:
        """Append the row of one update."""
        if self._log is None:
            return
        now = time.monotonic()
        seconds, self._stepped = now - self._stepped, now
        self.row(kind="step", step=step, epoch=epoch, loss=loss, lr=lr, **beside, seconds=round(seconds, 6))

    def note_plans(self, plans: Mapping[str, str]) -> None:
        """Write down which plans were found fastest, where any were: ``plans.json``."""
        if self._log is not None and plans:
            (self._log.parent / "plans.json").write_text(json.dumps(dict(plans), indent=1) + "\n")

    def flush(self) -> None:
        """Write out the rows that wait in memory: all of them, or none where that fails.

        Raises:
            OSError: the log cannot be written.
        """
        if self._log is None or not self._pending:
            return
        size = self._log.stat().st_size if self._log.exists() else 0
        try:
            with open(self._log, "a", encoding="utf-8") as file:
                file.writelines(self._pending)
        except OSError:
            with contextlib.suppress(OSError):  # the folder may be gone
                os.truncate(self._log, size)
            raise
        self._pending.clear()


def _starts(file: Path) -> list[dict[str, Any]]:
    """Return what ``config.json`` held at the earlier starts of a run that is resumed, the first one first."""
    try:
        found = json.loads(file.read_bytes())
        return [*found.pop("before", []), found]
    except (OSError, ValueError, AttributeError, TypeError):
        return []  # it is for readers alone, and somebody may have written there


def _write_rest(log: Path, pending: list[str], locks: list[RunLock], pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child's copy
    with contextlib.suppress(OSError), open(log, "a", encoding="utf-8") as file:
        file.writelines(pending)
        pending.clear()  # updates under way may still add rows, and write them
    locks.clear()


def new_run_dir(name: str, base: str | os.PathLike[str] = "runs", world: World | None = None) -> Path:
    """Make a new folder ``base/name-<date>-<time>`` and return its path, the same on every rank.

    **Collective.** Rank 0 makes it; where ``base`` cannot be written it lies in the temporary folder.

    Raises:
        OSError: neither can be written, on all ranks.
    """
    world = world if world is not None else init()
    comm = world.axis("data")
    exchange(comm, Kind.NEW_RUN_DIR, 0)

    def make() -> str:
        stamp = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        for folder in (Path(base), Path(tempfile.gettempdir()) / f"mpdp-runs-{os.getuid()}"):
            for number in range(1, 1000):
                path = folder / (stamp if number == 1 else f"{stamp}-{number}")
                try:
                    path.mkdir(parents=True)
                    return str(path.resolve())
                except FileExistsError:
                    continue
                except OSError:
                    break
        raise OSError(
            f"run_dir: expected {base} or {tempfile.gettempdir()} to be writable, got neither; pass base="
        )

    made = on_root(comm, make)
    return Path(os.fsdecode(comm.broadcast_bytes(None if made is None else os.fsencode(made))))


def made_with(world: World) -> dict[str, Any]:
    """Return what a run is made with: command, versions, ranks, devices and hosts. **Collective.**

    One name a node is gathered, once a run.
    """
    from .. import __version__

    names = [name.decode() for name in _one_a_node(world)]
    loaded = {name: sys.modules.get(name) for name in ("numpy", "mpi4py", "cupy")}
    return {
        "command": sys.argv,
        "mpdp": __version__,
        **{name: str(module.__version__) for name, module in loaded.items() if module is not None},
        "python": platform.python_version(),
        "host": platform.node(),
        "hosts": names,
        "world_size": world.size,
        "transport": world.transport,
        "device": str(world.device),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _one_a_node(world: World) -> list[bytes]:
    name = platform.node().encode() if world.local_rank == 0 else b""
    return [found for found in world.axis("data").all_gather_bytes(name) if found]
