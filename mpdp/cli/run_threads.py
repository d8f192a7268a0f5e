"""``python -m mpdp.cli.run_threads N script.py ...``: run a script once in each of N threads; ``mpdp run --threads``.

Owns what a script finds: ``sys.argv``, the first entry of ``sys.path``, and a ``__main__`` of its own in each thread,
so that its global names are not shared. ``sys.modules["__main__"]`` can be one module only: rank 0's.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

from .. import guard
from ..threads import Group, prepare

INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    """Run the script. **Local.**

    Args:
        arguments: number of threads, script, and the script's own arguments.

    Returns:
        The exit status.
    """
    n, script = int(arguments[0]), arguments[1]
    sys.argv[:] = arguments[1:]
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    group = prepare(n)
    try:
        with open(script, "rb") as file:
            code = compile(file.read(), script, "exec")
        modules = [_module(script) for _ in range(n)]
        sys.modules["__main__"] = modules[0]
        group.run(lambda rank: _execute(code, modules[rank].__dict__))
    except BaseException as error:
        status = _report(group, error)
        if group.alive:  # a rank that hangs in a call of C must not keep the process
            os._exit(status)
        return status
    return 0


def _module(script: str) -> ModuleType:
    module = ModuleType("__main__")
    module.__dict__.update(__file__=script, __builtins__=__builtins__)
    return module


def _execute(code: CodeType, names: dict[str, Any]) -> None:
    exec(code, names)


def _report(group: Group, error: BaseException) -> int:
    """Print one report of what has ended the ranks, and return the exit status. **Local.**"""
    sys.stdout.flush()
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            return error.code
        print(error.code, file=sys.stderr)
        return 1
    interrupted = isinstance(error, KeyboardInterrupt)
    where = f"[{group.failed_rank or 0}/{group.size}] error in step {group.step()}: "
    lines = str(error).splitlines()
    what = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    body = "" if interrupted else "".join(traceback.format_exception(error))
    sys.stderr.write(f"{where}{what}\n{body}")
    sys.stderr.flush()
    guard.current.mark("failed", f"in step {group.step()}: {what}", group.failed_rank or 0)
    return INTERRUPTED if interrupted else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
