"""RunFiles: what a trainer does with files: a run folder, checkpoints saved and taken up.

The base of :class:`mpdp.Trainer` that holds these public calls. ``saving`` writes, ``resuming`` reads, and
``run_folder`` is what else lies there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..comm.agreement import on_root
from ..parallel import averaging
from ..parallel.record import Kind, exchange
from ..world import World
from . import resuming
from .failing import ends_the_job
from .position import Position
from .run_folder import Resumed, RunFolder, made_with
from .run_lock import PATIENCE
from .saving import Saves

if TYPE_CHECKING:
    from .trainer import Trainer


class RunFiles:
    """The calls of a trainer that work on files.

    Attributes:
        folder: the run folder. ``saves``: the checkpoint under way.
    """

    world: World
    position: Position
    folder: RunFolder
    saves: Saves
    settle: Callable[[], None]
    describe: Callable[[], dict[str, Any]]
    _refuse_inside_fit: Callable[[str], None]
    _resumed: Resumed
    _opened: bool
    _nominal_fixed: bool

    @property
    def run_dir(self) -> Path | None:
        """The run's folder, or None."""
        return self.folder.path

    @ends_the_job
    def save(self, wait: bool = True) -> Path:
        """Write a checkpoint below ``run_dir`` and return its directory, once it is whole for every rank.

        **Collective.** The newest ``keep`` checkpoints stay, and the best one of ``keep_best``.

        Args:
            wait: False copies the state to host memory, leaves the writing to a thread, and returns the directory that
                it is to be. One save is under way at the most: another one waits for it. That it is whole, callbacks
                are told at a later update; what goes wrong is raised by the next ``step``, ``fit``, ``evaluate``,
                ``predict``, ``save`` or ``resume``, at the end of ``fit``, and at the end of the program.

        Raises:
            ValueError: the trainer has no run_dir; or on_checkpoint calls it for a save that on_checkpoint has made, on
                all ranks: one such save is possible, and no endless row of them.
            CheckpointError: it, or the one before, could not be written, on all ranks; earlier checkpoints are intact.
            DisagreementError: a rank called it alone, on all ranks.
        """
        self.folder.checkpoints  # noqa: B018  a missing run_dir is a ValueError here
        averaging.refuse(cast("Trainer", self).parallel._replica, "save")
        self.settle()
        agreed = exchange(
            self.world.axis("data"), Kind.SAVE, cast("Trainer", self).step_count, stop=bool(wait)
        )
        self._open_folder()
        cast("Trainer", self).check_replicas()  # what is written is what every rank holds
        return self.saves.save(wait=agreed.stop)

    @ends_the_job
    def resume(self, path: str | os.PathLike[str] | None = None) -> bool:
        """Take up a checkpoint: weights, optimizer state, position, random state.

        **Collective.** The number of ranks may differ from the one that saved; with the same number, the run repeats
        the bits of the run that was never stopped.

        Args:
            path: a checkpoint's directory; None takes the newest complete one of ``run_dir`` and passes over torn
                ones with a warning. One of another run needs a ``run_dir`` that is new or empty: the first ``fit``,
                ``step`` or ``save`` refuses a used one.

        Returns:
            True if a checkpoint was taken up, False if there is none.

        Raises:
            CheckpointError: ``path`` is torn, or the checkpoint does not fit; nothing is loaded.
        """
        self._refuse_inside_fit("resume")
        self.settle()
        if path is None:
            self.folder.checkpoints  # noqa: B018  a missing run_dir is a ValueError here
        found = resuming.resume(cast("Trainer", self), None if path is None else Path(path))
        self._resumed = Resumed(
            self.position.log_rows if found else 0,
            None if path is None else Path(os.path.abspath(path)),
            self._resumed.found_none or not found,
        )
        self._opened = self._opened and not found  # a log that is open already is cut back too
        # One of no update holds no scale of gradients yet.
        self._nominal_fixed = found and cast("Trainer", self).step_count > 0
        return found

    def _open_folder(self, beside: dict[str, Any] | None = None) -> None:
        """Claim the run folder at the first step: refuse a used one unless the run was resumed, and one of another job.

        **Collective.**
        """
        if self._opened:
            return
        config = self.describe() | (beside or {}) | made_with(self.world)
        patience = min(PATIENCE, self.world.timeout / 2)  # the other ranks wait meanwhile
        on_root(self.world.axis("data"), lambda: self.folder.claim(config, self._resumed, patience))
        self._opened, self._resumed.found_none = True, False
