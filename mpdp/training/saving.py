"""Saves: the checkpoints that a trainer writes, one under way at the most, at once or by a thread.

Each rank that has something to write puts a part of its own into one temporary directory, and says what is in it in a
file beside it. When all are there rank 0 writes the manifest and renames the directory: until then there is no
checkpoint. So a thread of each rank can do all that without a message. What has become of it all ranks learn together:
at the next call that they make together, and at the end of ``fit``.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import guard
from ..comm.agreement import agree, on_root, together
from ..errors import CheckpointError, on_all_ranks
from ..parallel.record import Kind, exchange
from . import checkpoint, snapshot
from .calling import call_back
from .checkpoint import Slice
from .manifest import Piece

if TYPE_CHECKING:
    from .trainer import Trainer

_LOOK_SECONDS = 0.01  # between looks for the parts of other ranks


class Saves:
    """The checkpoints of one trainer.

    Args:
        trainer: whose state is written, below its run folder.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._job: Job | None = None
        self._settled = False  # all ranks know that the job is done or has failed
        self._said = False
        self._telling: Job | None = None  # whose on_checkpoint is being called

    @property
    def under_way(self) -> bool:
        """Whether a save has begun that nobody has finished; the same on all ranks."""
        return self._job is not None

    @property
    def has_news(self) -> bool:
        """Whether this rank knows something of the save under way that the others have to know. **Local.**"""
        return self._job is not None and not self._settled and self._job.over

    def save(self, wait: bool) -> Path:
        """Begin to write a checkpoint, and finish it where ``wait``; return the directory that it is to be.

        **Collective.** The save before it is finished first.

        Raises:
            CheckpointError: this one or the one before could not be written, on all ranks.
            ValueError: a callback asks for it when it is told of a save that one has asked for so, on all ranks.
        """
        if self._telling is not None and self._telling.nested:  # each would bring the next one
            raise on_all_ranks(
                ValueError(
                    "save: expected no call in on_checkpoint of a save that was itself made in on_checkpoint, got one "
                    f"for {self._telling.final.name}; let the callback save once, not whenever it is told of a save"
                )
            )
        self.finish()
        trainer = self._trainer
        comm = trainer.world.axis("data")
        state, arrays = snapshot.state(trainer)
        opened = on_root(comm, self._open)
        text = None if opened is None else os.fsencode(f"{opened[2]}\0{opened[0]}\0{opened[1]}")
        serial, temporary, final = os.fsdecode(comm.broadcast_bytes(text)).split("\0")
        collect = snapshot.in_parts(trainer) and not self._all_see(Path(temporary))
        try:
            slices = snapshot.tensors(trainer, copy=not wait, collect=True) if collect else None

            def take() -> Job:
                mine = snapshot.tensors(trainer, copy=not wait) if slices is None else slices
                return Job(trainer, Path(temporary), Path(final), int(serial), mine, arrays, state)

            job = together(comm, take)
            job.writers = _ranks_that(comm, job.writes)
            job.nested = self._telling is not None
        except BaseException:
            if comm.rank == 0:
                checkpoint.discard(Path(temporary))
            raise
        self._job, self._settled = job, False
        trainer.position.saved_step = trainer.step_count
        if not wait:
            job.start()
            return job.final
        job.write()
        self._finish_one()
        return job.final

    def _open(self) -> tuple[Path, Path, int]:
        folder = self._trainer.folder
        root = folder.checkpoints
        try:
            folder.flush()
        except OSError as error:
            raise CheckpointError(
                f"checkpoint: expected to write the log of {root.parent}, got {error}; free or mend the disk"
            ) from error
        return checkpoint.begin(root, self._trainer.step_count)

    def _all_see(self, folder: Path) -> bool:
        """Return whether every rank sees a folder of rank 0, and can so write a part there. **Collective.**"""
        blind = _ranks_that(self._trainer.world.axis("data"), not folder.is_dir())
        if blind and not self._said:
            self._said = True
            self._trainer.world.log(
                "info",
                f"save: {blind} ranks do not see the run's folder: rank 0 collects what they hold and writes all",
            )
        return blind == 0

    def look(self, stop: bool) -> bool:
        """Find out with all ranks what has become of the save under way; return whether one asks to stop.

        **Collective.** Called where some rank :attr:`has_news`.
        """
        job = self._job
        assert job is not None
        comm = self._trainer.world.axis("data")
        agreed = exchange(comm, Kind.SAVING, self._trainer.step_count, sums=(float(job.over),), stop=stop)
        self._settled = agreed.sums[0] > 0
        return agreed.stop

    def check(self) -> None:
        """Raise what has gone wrong in the save under way, and call back if it is done. **Collective.**"""
        if self.under_way and not self._settled:
            self.look(stop=False)
        self.collect()

    def collect(self) -> None:
        """Finish the save under way if all ranks know that it is over. **Collective.**"""
        if self._settled:
            self._finish_one()

    def finish(self) -> None:
        """Wait for the save under way and call back; so for the one that a callback begins then.

        **Collective.**

        Raises:
            CheckpointError: it could not be written, on all ranks; earlier checkpoints are intact.
        """
        while self.under_way:
            self._finish_one()

    def _finish_one(self) -> None:
        job = self._job
        if job is None:
            return
        trainer = self._trainer
        comm = trainer.world.axis("data")
        try:
            job.written.wait()
            agree(comm, job.part_error)
            on_root(comm, job.completed)
        except BaseException:
            job.give_up()
            trainer.position.saved_step = None
            raise
        finally:
            self._job, self._settled = None, False
            job.forget()
        before, self._telling = self._telling, job
        try:
            call_back(trainer, "on_checkpoint", job.final)
        finally:
            self._telling = before


class Job:
    """One checkpoint, as one rank writes it.

    Attributes:
        final: the directory that it becomes.
        writes: whether this rank has a part; rank 0 always does. ``writers``: how many ranks have.
        nested: whether it was asked for in on_checkpoint of another one.
        written: set when this rank's part is on the disk, or has failed with ``part_error``.
    """

    def __init__(
        self,
        trainer: Trainer,
        temporary: Path,
        final: Path,
        serial: int,
        slices: Sequence[Slice],
        arrays: Sequence[Slice],
        state: dict[str, Any],
    ) -> None:
        self.temporary, self.final, self.serial = temporary, final, serial
        self.rank = trainer.world.axis("data").rank
        self.step = trainer.step_count
        self.writers, self.nested = 1, False
        self.written, self._done = threading.Event(), threading.Event()
        self.part_error: BaseException | None = None
        self._commit_error: BaseException | None = None
        self._given_up = threading.Event()
        self._slices = [*slices, *arrays] if self.rank == 0 else list(slices)
        self.writes = self.rank == 0 or bool(self._slices)
        self._state = state if self.rank == 0 else {}
        self._metrics = snapshot.metrics(trainer)
        self._pieces: list[Piece] = []
        self._patience = trainer.world.timeout
        self._world = trainer.world
        self._locks = list(trainer.folder.locks)  # no other job comes in before the thread has written
        self._keep = (trainer.keep, trainer.keep_best, trainer.best_mode)
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    @property
    def over(self) -> bool:
        """Whether this rank knows that the job is done or has failed. **Local.**"""
        return self.part_error is not None or (self.rank == 0 and self._done.is_set())

    def start(self) -> None:
        """Write in a thread; a program that ends waits for it. **Local.**"""
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._run, name="mpdp-save", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        self.write()
        if self.rank == 0 and self.part_error is None:
            self._complete()
        self._done.set()

    def write(self) -> None:
        """Write this rank's part. **Local.** Errors are kept for all ranks to see."""
        try:
            if self.writes:
                self._pieces = checkpoint.write_part(self.temporary, self.rank, self._slices)
                if self.rank:
                    self._tell()
        except BaseException as error:
            self.part_error = error
        finally:
            self._slices = []
            self.written.set()

    def _tell(self) -> None:
        """Tell rank 0 what the part holds."""
        text = json.dumps([checkpoint.piece_as_json(piece) for piece in self._pieces])
        path = self.temporary / f"part-{self.rank:05d}.json"
        try:
            path.with_suffix(".tmp").write_text(text)
            os.replace(path.with_suffix(".tmp"), path)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint: expected to write below {self.final.parent}, got {error}; free or mend the disk"
            ) from error

    def completed(self) -> Path:
        """Return the checkpoint's directory once it is whole. **Local**, on rank 0, when all parts are written.

        Raises:
            CheckpointError: it could not be made whole.
        """
        if self._thread is None:
            self._complete()
        else:
            self._done.wait()
        if self._commit_error is not None:
            raise self._commit_error
        return self.final

    def _complete(self) -> None:
        try:
            pieces = [*self._pieces, *self._parts_of_others()]
            checkpoint.commit(
                self.temporary, self.final, self.step, self.serial, pieces, self._state, self._metrics
            )
        except BaseException as error:
            self._commit_error = error
            return
        keep, metric, mode = self._keep
        try:
            checkpoint.prune(self.final.parent, keep, metric, mode)
        except OSError as error:
            self._world.log("warning", f"save: an old checkpoint stays, it could not be removed: {error}")

    def _parts_of_others(self) -> list[Piece]:
        """Return the pieces that other ranks have written, once they have; empty where all is rank 0's."""
        # A thread waits until it is told to give up; else all parts are written, and a folder may show them late.
        deadline = math.inf if self._thread is not None else time.monotonic() + self._patience
        while True:
            files = sorted(self.temporary.glob("part-*.json"))
            if len(files) >= self.writers - 1:
                break
            if self._given_up.wait(_LOOK_SECONDS) or time.monotonic() > deadline:
                raise CheckpointError(
                    f"checkpoint: expected the parts of {self.writers} ranks in {self.temporary}, got "
                    f"{1 + len(files)}; see what has become of the other ranks"
                )
        pieces = []
        for file in files:
            for fields in json.loads(file.read_text()):
                pieces.append(Piece(**{**fields, "shape": tuple(fields["shape"])}))
            file.unlink()
        return pieces

    def give_up(self) -> None:
        """Let go of a job that has failed on some rank, and remove what it has left. **Local.**"""
        self._given_up.set()
        if self._thread is not None:
            self._thread.join()
        if self.rank == 0:
            checkpoint.discard(self.temporary)

    def forget(self) -> None:
        """Forget what nobody needs any more: all ranks know how it ended. **Local.**"""
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """Let a program fail whose last save has failed, of which no call could tell it. **Local.**"""
        error = self.part_error or self._commit_error
        if error is not None and os.getpid() == self._pid:
            guard.current.fail_at_exit(error)


def _ranks_that(comm: Any, flag: bool) -> int:
    """Return on how many ranks a flag holds. **Collective.**"""
    return int(comm.reduce_numbers([0], [float(flag)])[1][0])
