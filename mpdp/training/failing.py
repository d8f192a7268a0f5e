"""What an exception does that leaves a public call of the trainer: reported at once, told to the callbacks.

A rank that raises alone would leave the others waiting, so the job is on its way to its end before the program's own
``except`` and ``finally`` run. How it ends is :mod:`mpdp.guard`'s part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trainer import Trainer


def ends_the_job(method: Callable[..., Any]) -> Callable[..., Any]:
    """Report what leaves a public call and let the job end, unless all ranks raise it together. **Local.**

    Of calls inside one another (an evaluation in a callback of ``fit``) the outermost does so.
    """

    @functools.wraps(method)
    def wrapper(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        self.depth += 1
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            if self.depth == 1:
                alone = not getattr(error, "agreed", False)
                if alone:
                    self.world.fail(error)
                self.updates.write_log(ends=not alone or self.world.size == 1)
                for callback in self.callbacks:
                    _tell(callback, self, error)
            raise
        finally:
            self.depth -= 1

    return wrapper


def _tell(callback: Any, trainer: Trainer, error: BaseException) -> None:
    """Tell a callback of an error; what it raises itself must not hide that one."""
    try:
        callback.on_exception(trainer, error)
    except Exception as second:
        error.add_note(
            f"while this was handled, the callback {type(callback).__name__}.on_exception raised "
            f"{type(second).__name__}: {second}"
        )
