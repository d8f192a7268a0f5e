"""Who in this program appends to a file of a run: the trainer, or the writer, that has opened it last.

Rows wait in memory, and those of updates under way on a GPU are not known yet. A program that catches an error, makes
another trainer and resumes has both: the first must not add rows behind those that the second has cut the file back to.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Protocol


class Appends(Protocol):
    """What appends to a file."""

    def give_up(self) -> None:
        """Write what waits in memory, and nothing from then on."""


_last: weakref.WeakValueDictionary[Path, Appends] = weakref.WeakValueDictionary()


def take_over(path: Path, owner: Appends) -> None:
    """Let ``owner`` be the one that appends to a file, and whoever was so far give it up. **Local.**"""
    path = path.resolve()
    before = _last.get(path)
    if before is not None and before is not owner:
        before.give_up()
    _last[path] = owner
