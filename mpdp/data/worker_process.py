"""The program of a worker process: read the samples that a rank asks for, until the rank closes the link.

What goes over the link: the rank's ``sys.path`` and ``sys.argv``; the data set; then requests (indices, draw), each
answered by the form of the batch and its arrays' bytes, or by an error.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ..errors import WorkerError
from .reading import Draw, map_arrays, take

MARK = "MPDP_LOADER_WORKER"  # in the environment of a worker
_LOOK_SECONDS = 1.0  # between looks at whether the rank still lives
Form = Any  # a tree of numbers: which array stands where


def main(fd: int, parent: int) -> None:
    """Serve one rank.

    **Local.**

    Args:
        fd: of the link, inherited.
        parent: process id of the rank.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank's part
    for number in (
        signal.SIGTERM,
        signal.SIGUSR1,
    ):  # also its part; a program that we start does not inherit this
        signal.signal(number, lambda number, frame: None)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    link = Connection(fd)
    try:
        sys.path[:], sys.argv[:] = pickle.loads(link.recv_bytes())
        dataset = _loaded(link)
        if dataset is not None:
            while True:
                _serve(link, dataset[0])
    except (EOFError, OSError):
        return


def _loaded(link: Connection) -> tuple[Any] | None:
    """Return the data set that the rank sends; None where it cannot be had, once the rank is told."""
    message = link.recv_bytes()
    try:
        script, folder, content = pickle.loads(message)
        os.chdir(folder)
        if script is not None:
            _import_script(*script)
        dataset = pickle.loads(content)
    except (Exception, SystemExit) as error:
        _say_error(
            link,
            WorkerError(
                f"dataset: expected one that a worker process can load, got {type(error).__name__}: {error}; define it "
                'in a module, put the script\'s own doings under if __name__ == "__main__":, or use kind="threads"'
            ),
        )
        return None
    _say(link, "ready", None)
    return (dataset,)


def _import_script(name: str | None, path: str | None) -> None:
    """Make ``__main__`` the rank's script, run under another name, for what the data set takes from there."""
    from multiprocessing import spawn

    if name is not None and name != "__main__":
        spawn._fixup_main_from_name(name)  # type: ignore[attr-defined]
    elif path is not None:
        spawn._fixup_main_from_path(path)  # type: ignore[attr-defined]


def _serve(link: Connection, dataset: Any) -> None:
    """Answer one request."""
    indices, draw = pickle.loads(link.recv_bytes())
    try:
        form, arrays = arrays_of(take(dataset, indices, draw=Draw(*draw)))
        arrays = [np.ascontiguousarray(array) for array in arrays]
    except Exception as error:
        _say_error(link, error)
        return
    _say(link, "batch", (form, [(array.dtype, array.shape) for array in arrays]))
    for array in arrays:
        if array.nbytes:
            link.send_bytes(array.reshape(-1).view(np.uint8))


def _say(link: Connection, kind: str, content: Any) -> None:
    link.send_bytes(pickle.dumps((kind, content), protocol=5))


def _say_error(link: Connection, error: BaseException) -> None:
    """Send an error with its traceback; one that cannot be pickled goes as its text."""
    trace = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        notes = getattr(error, "__notes__", [])
        error = RuntimeError(f"{type(error).__name__}: {error}")
        for note in notes:
            error.add_note(note)
    _say(link, "error", (error, trace))


def arrays_of(batch: Any) -> tuple[Form, list[Any]]:
    """Return a batch as the form of its tree, and its arrays. **Local.**"""
    arrays: list[Any] = []

    def keep(array: Any, path: str) -> int:
        arrays.append(array if hasattr(array, "dtype") else np.asarray(array))
        return len(arrays) - 1

    return map_arrays(keep, batch), arrays


def tree_of(form: Form, arrays: list[Any]) -> Any:
    """Return the batch of a form and its arrays. **Local.**"""
    return map_arrays(lambda number, _: arrays[number], form)


def _watch(parent: int) -> None:
    """End this process when its rank is gone, also while a sample is being read."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os._exit(1)
