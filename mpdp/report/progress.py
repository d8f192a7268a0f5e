"""Progress of a run on stderr: a bar on a terminal or in a notebook, one line an epoch elsewhere.

Only rank 0 makes one. A closed or narrow-minded stream never stops a training: what cannot be written is dropped.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any, SupportsFloat

_REFRESH_SECONDS = 0.1


class Progress:
    """Show how far a run is.

    **Local.**

    Args:
        shown: whether this rank shows anything.
        total: updates of the whole run, or None.
        done: updates finished before.
        size: ranks, for the heading of a line.
    """

    def __init__(self, shown: bool, total: int | None, done: int, size: int) -> None:
        self._shown = shown
        self._total = total
        self._size = size
        self._bar: Any = None
        self._samples = 0
        self._start = time.monotonic()
        self._last = 0.0
        self._begin = self._done = done
        if shown and (_is_terminal() or _is_notebook()):
            self._bar = _bar_class()(
                total=total,
                initial=done,
                unit="step",
                file=sys.stderr,
                ascii=not _takes_unicode(),
                leave=True,
                mininterval=_REFRESH_SECONDS,
            )

    def step(self, loss: SupportsFloat, samples: int) -> None:
        """Count one update of ``samples`` samples."""
        self._samples += samples
        self._done += 1
        if self._bar is None:
            return
        now = time.monotonic()
        self._bar.update(1)
        if now - self._last > _REFRESH_SECONDS:
            self._last = now
            rate = self._samples / max(now - self._start, 1e-9)
            self._bar.set_postfix_str(f"loss {float(loss):.4f}, {rate:,.0f} samples/s", refresh=False)

    def epoch(self, row: dict[str, Any]) -> None:
        """Report a finished epoch and its row of the history."""
        if not self._shown:
            return
        elapsed = time.monotonic() - self._start
        rate = self._samples / max(elapsed, 1e-9)
        numbers = " ".join(f"{k} {v:.4f}" for k, v in row.items() if isinstance(v, float))
        left = ""
        if self._total and self._done > self._begin:
            one = elapsed / (self._done - self._begin)  # of this call: a resumed run did the others elsewhere
            left = f" {one * max(0, self._total - self._done):.0f} s left"
        self._write(f"[0/{self._size}] epoch {row['epoch']} {numbers} {rate:,.0f} samples/s{left}")

    def say(self, text: str) -> None:
        """Write one line beside the bar."""
        if self._shown:
            self._write(f"[0/{self._size}] {text}")

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.close()
            self._bar = None

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if self._bar is not None:
                self._bar.write(line, file=sys.stderr)
            else:
                sys.stderr.write(line + "\n")  # one write: launchers mix what comes in pieces
                sys.stderr.flush()


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


def _is_notebook() -> bool:
    """Return whether a notebook shows what this process writes."""
    ipython = sys.modules.get("IPython")
    try:
        shell = None if ipython is None else ipython.get_ipython()
    except Exception:  # IPython is being imported
        return False
    return type(shell).__name__ == "ZMQInteractiveShell"


def _bar_class() -> Any:
    """Return a widget's class in a notebook that has widgets, else that of a bar of characters."""
    if _is_notebook():
        with contextlib.suppress(ImportError):
            import ipywidgets  # noqa: F401
            from tqdm.notebook import tqdm as widget

            return widget
    from tqdm import tqdm

    return tqdm


def _takes_unicode() -> bool:
    return (getattr(sys.stderr, "encoding", None) or "ascii").lower().replace("-", "").startswith("utf")
