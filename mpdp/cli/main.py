"""``mpdp``: choose a sub-command and give it the rest of the line.

Owns the list of sub-commands. Imports one only when it is asked for, so that ``--help`` and usage errors
need neither MPI nor a GPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence

_USAGE = """\
usage: mpdp [-h] [--version] COMMAND ...

Multi-process data parallelism for NumPy and CuPy over MPI.

commands:
  run    start a script as several processes: mpdp run -n 4 train.py
  bench  measure this machine: mpdp bench train mlp
  doctor say what this machine or job offers, and what is wrong with it
  plot   draw what runs have logged: mpdp plot RUN_DIR

options:
  -h, --help  show this message and exit; also after a command
  --version   show the version and exit
"""


def _run(arguments: Sequence[str]) -> int:
    from .run import main as run

    return run(arguments)


def _bench(arguments: Sequence[str]) -> int:
    from .. import guard
    from ..bench import main as bench
    from ..errors import MissingDependencyError

    try:
        return bench(list(arguments))
    except MissingDependencyError as error:
        there = guard.current.announcement
        if there is not None and there.size > 1:
            raise  # one report of the ranks
        sys.stderr.write(f"mpdp bench: error: {error}\n")
        return 1


def _doctor(arguments: Sequence[str]) -> int:
    from .doctor import main as doctor

    return doctor(arguments)


def _plot(arguments: Sequence[str]) -> int:
    from .plot import main as plot

    return plot(arguments)


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": _run,
    "bench": _bench,
    "doctor": _doctor,
    "plot": _plot,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command. **Local.**

    Args:
        arguments: the words after ``mpdp``; default: of this process.

    Returns:
        The exit status: 2 for a usage error.
    """
    with contextlib.suppress(AttributeError, ValueError):  # a path may hold bytes that are no text
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        sys.stderr.write(_USAGE)
        return 2
    if words[0] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    if words[0] == "--version":
        import mpdp

        print(f"mpdp {mpdp.__version__}")
        return 0
    command = _COMMANDS.get(words[0])
    if command is None:
        known = ", ".join(_COMMANDS)
        sys.stderr.write(
            f"mpdp: error: command: expected one of {known}, got {words[0]!r}; see mpdp --help\n"
        )
        return 2
    return command(words[1:])
