"""Writers: callbacks that write what a run shows as CSV or for TensorBoard, from rank 0 alone.

Both follow the run, not the process: after ``resume()`` each epoch and update stands there once. ``log.jsonl`` holds
the same and more, in any case; these are for programs that read nothing else.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependencyError, on_all_ranks
from .appending import take_over
from .callbacks import Callback

if TYPE_CHECKING:
    from .trainer import Trainer

_FLUSH_SECONDS = 2.0
_STEPS = ("step", "epoch", "loss", "lr")


class CsvWriter(Callback):
    """Write ``epochs.csv``, a row an epoch with all metrics, and ``steps.csv``, a row an update.

    **Collective** as every callback; rank 0 writes. ``epochs.csv`` is written anew from the history after each epoch: a
    metric that comes later gets a column at the right end. Of ``steps.csv`` what lies behind the update where a run was
    resumed is cut off.

    Args:
        folder: where (default: the trainer's ``run_dir``).

    Example:
        >>> import mpdp
        >>> writer = mpdp.CsvWriter("runs/digits")
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._pending: list[list[Any]] = []
        self._steps: Path | None = None
        self._given_up = False
        self._flushed = 0.0
        self._last = 0  # the update seen last

    def on_step(self, trainer: Trainer) -> None:
        """Write a row of ``steps.csv``, within about two seconds."""
        folder = _folder(self, self._folder, trainer)
        if trainer.world.rank or self._given_up:
            return
        step = trainer.step_count
        if self._steps is None:
            folder.mkdir(parents=True, exist_ok=True)
            self._steps = folder / "steps.csv"
            take_over(self._steps, self)
            _cut_back(self._steps, step)
            weakref.finalize(self, _write_rest, self._steps, self._pending, os.getpid())
        elif step <= self._last:  # this very trainer was resumed
            self._flush()
            _cut_back(self._steps, step)
        self._last = step
        self._pending.append([step, trainer.epoch + 1, trainer.late_loss, trainer.last_lr])
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._flush()

    def on_epoch(self, trainer: Trainer) -> None:
        """Write ``epochs.csv``."""
        folder = _folder(self, self._folder, trainer)
        if trainer.world.rank or self._given_up:
            return
        self._flush()
        names = list(dict.fromkeys(name for row in trainer.history for name in row))
        rows = [[row.get(name) for name in names] for row in trainer.history]
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / "epochs.csv", [names, *rows])

    def on_checkpoint(self, trainer: Trainer, path: Any) -> None:
        """Write what waits in memory."""
        self._flush()

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Write what waits in memory."""
        self._flush()

    def give_up(self) -> None:
        """Write what waits in memory, and no row from then on: another writer goes on with the file."""
        if self._steps is not None:
            _write_rest(self._steps, self._pending, os.getpid())
        self._pending.clear()
        self._given_up = True

    def _flush(self) -> None:
        if self._steps is not None:
            _append(self._steps, self._pending)
        self._flushed = time.monotonic()


class TensorBoardWriter(Callback):
    """Write scalars for TensorBoard: ``train/loss`` and ``train/lr`` of updates, ``epoch/...`` of the history's rows.

    **Collective** as every callback; rank 0 writes. A resumed run writes a file of its own that tells TensorBoard to
    leave out what lies behind the update where it goes on. TensorBoard leaves out that update too where the first thing
    to come is the row of its epoch (a run that ended in a validation), so checkpoints hold its scalars.

    Args:
        folder: where (default: ``tensorboard`` in the trainer's ``run_dir``).
        every: updates between two scalars.

    Raises:
        MissingDependencyError: ``tensorboard`` is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every: expected an integer of 1 or more, got {every!r}; it counts updates")
        _tensorboard()
        self._folder, self._every = None if folder is None else Path(folder), every
        self._file: Any = None
        self._pending: list[tuple[int, float, dict[str, Any]]] = []
        self._flushed = 0.0
        self._last = 0  # the update seen last
        self._newest: dict[str, Any] = {}  # scalars of an update, and which one

    def on_step(self, trainer: Trainer) -> None:
        """Write the loss and the learning rate of an update, within about two seconds."""
        if trainer.step_count <= self._last:  # this very trainer was resumed
            self.close()
            self._newest = {}
        self._last = trainer.step_count
        if trainer.step_count % self._every == 0:
            scalars = {"train/loss": trainer.late_loss, "train/lr": trainer.last_lr}
            self._add(trainer, scalars)
            self._newest = {"step": trainer.step_count} | scalars
            if time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self._flush()

    def on_epoch(self, trainer: Trainer) -> None:
        """Write the row of an epoch."""
        row = {f"epoch/{k}": v for k, v in trainer.history[-1].items() if k not in ("epoch", "step")}
        self._add(trainer, row)
        self._flush()

    def on_checkpoint(self, trainer: Trainer, path: Any) -> None:
        """Write what waits in memory."""
        self._flush()

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Write what waits in memory."""
        self._flush()

    def state_dict(self) -> dict[str, Any] | None:
        """Return the scalars of the newest update; None before the first."""
        return {name: float(value) for name, value in self._newest.items()} or None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them up; what comes next begins a file."""
        self.close()
        self._newest = state

    def close(self) -> None:
        """Close the file; the next scalar opens another. **Local.**"""
        self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add(self, trainer: Trainer, scalars: dict[str, Any]) -> None:
        """Keep scalars; a loss is waited for when they are written, not here."""
        folder = _folder(self, self._folder, trainer, "tensorboard")
        if trainer.world.rank:
            return
        if self._file is None:
            self._open(folder, trainer.step_count)
        self._pending.append((trainer.step_count, time.time(), scalars))

    def _open(self, folder: Path, step: int) -> None:
        event_file_writer, event, _ = _tensorboard()
        folder.mkdir(parents=True, exist_ok=True)
        _wait_for_a_later_name(folder)
        self._file = event_file_writer.EventFileWriter(str(folder))
        start = event.SessionLog(status=event.SessionLog.START)
        self._file.add_event(event.Event(wall_time=time.time(), step=step, session_log=start))
        if self._newest.get("step") == step:  # it is left out with what lies behind it
            again = {name: value for name, value in self._newest.items() if name != "step"}
            self._pending.append((step, time.time(), again))

    def _flush(self) -> None:
        if self._file is not None and self._pending:
            _, event, summary = _tensorboard()
            for step, seconds, scalars in self._pending:
                values = [
                    summary.Summary.Value(tag=name, simple_value=float(value))
                    for name, value in scalars.items()
                    if value is not None
                ]
                self._file.add_event(
                    event.Event(wall_time=seconds, step=step, summary=summary.Summary(value=values))
                )
            self._pending.clear()
            self._file.flush()
        self._flushed = time.monotonic()


def _wait_for_a_later_name(folder: Path) -> None:
    """Wait, a second at most, until a new file's name sorts behind those of a folder: readers take them in that order.

    A name begins with the second of its making. Within one second process and count follow, as text: 10 before 9.
    """
    now = time.time()
    names = [path.name.split(".") for path in folder.glob("events.out.tfevents.*")]
    seconds = (int(name[3]) for name in names if name[3].isdecimal())
    newest = max((second for second in seconds if second <= now), default=0)  # a clock may have been set back
    if now < newest + 1:
        time.sleep(newest + 1 - now)


def _folder(writer: Callback, folder: Path | None, trainer: Trainer, below: str = "") -> Path:
    if folder is not None:
        return folder
    if trainer.run_dir is None:
        raise on_all_ranks(
            ValueError(
                f"folder: expected one for {type(writer).__name__}, got None beside a trainer without run_dir; pass one"
            )
        )
    return trainer.run_dir / below


def _write_rest(path: Path, rows: list[list[Any]], pid: int) -> None:
    """Append what is left when the writer goes, also at the end of the process, where nobody could handle an error."""
    if pid == os.getpid():  # no forked child's copy
        with contextlib.suppress(Exception):
            _append(path, rows)


def _append(path: Path, rows: list[list[Any]]) -> None:
    """Append rows that wait in memory."""
    if rows:
        with open(path, "a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([step, epoch, _number(loss), lr] for step, epoch, loss, lr in rows)
        rows.clear()


def _number(loss: Any) -> Any:
    """Return a loss as a number, which waits for a GPU only here; nothing for one that is not finite."""
    value = float(loss)
    return value if math.isfinite(value) else ""


def _cut_back(path: Path, step: int) -> None:
    """Keep the rows of ``steps.csv`` before an update, or begin it."""
    kept: list[list[Any]] = [list(_STEPS)]
    if path.exists():
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.reader(file):
                if len(row) == len(_STEPS) and row[0].isdigit() and int(row[0]) < step:
                    kept.append(row)
    _replace(path, kept)


def _replace(path: Path, rows: list[list[Any]]) -> None:
    text = io.StringIO()
    plain = [["" if isinstance(v, float) and not math.isfinite(v) else v for v in row] for row in rows]
    csv.writer(text).writerows(plain)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text.getvalue(), newline="", encoding="utf-8")
    os.replace(temporary, path)


def _tensorboard() -> tuple[Any, Any, Any]:
    try:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer import event_file_writer
    except ImportError as error:
        raise MissingDependencyError(
            f"tensorboard: expected it for TensorBoardWriter, got {error}; "
            'install it with: pip install "mpdp[tensorboard]"'
        ) from error
    return event_file_writer, event_pb2, summary_pb2
