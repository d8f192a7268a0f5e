"""Workers: threads or processes that read the samples of a batch side by side.

A process is started afresh, as another program: neither forked, since a rank has threads that hold locks, nor by
``multiprocessing``, whose ways of starting crash or hang under some MPIs. It finds no trace of the launcher in its
environment, sees no GPU and never starts MPI. Read next: ``worker_process``, the program that it runs.
"""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MissingDependencyError, WorkerError
from .order import share, whole
from .reading import Draw, check_dataset, read_samples, take
from .transforms import describe_dataset
from .worker_process import MARK, Form, arrays_of, tree_of

_LAUNCHER = ("OMPI_", "PMI", "PRTE", "PALS_", "FLUX_", "HYD", "MPI_LOCAL", "SLURM_", "MPDP_MARKS")
_HOME = str(Path(__file__).resolve().parents[2])  # where mpdp is imported from
_PROGRAM = (
    "import sys; sys.path.insert(0, {!r}); from mpdp.data import worker_process; worker_process.main({}, {})"
)
_END_SECONDS = 2.0  # for a worker to end by itself before it is killed


class Workers:
    """Read each batch of a data set by several workers at once.

    **Local.** A batch is cut into as many parts as there are workers; the result is the one that the data set gives
    by itself, whatever their number. Each rank has workers of its own, which start at the first batch and end with this
    object. The loader reads ahead, so they work while the model does.

    Processes get the data set pickled, once: mapped arrays are mapped again there, others are copied into each worker.
    A data set whose class stands in the script itself makes each worker import that script, as ``multiprocessing``
    does, so the script's own doings belong under ``if __name__ == "__main__":``. Threads need none of this; they help
    where reading waits for a disk, or is done by code that gives up the GIL, as decoding images is.

    Args:
        dataset: any data set; for threads, one that several may read at a time.
        count: workers a rank.
        kind: ``"processes"`` or ``"threads"``.

    Raises:
        ValueError, TypeError: a bad argument.

    Example:
        >>> from mpdp import data
        >>> numbers = data.ArrayDataset(np.arange(8.0), np.arange(8))
        >>> batch = Workers(numbers, 2, kind="threads").take_drawn(np.array([5, 1, 3]), Draw())
        >>> batch[1].tolist()
        [5, 1, 3]
    """

    def __init__(self, dataset: Any, count: int, kind: str = "processes") -> None:
        check_dataset(dataset)
        if kind not in ("processes", "threads"):
            raise ValueError(
                f'kind: expected "processes" or "threads", got {kind!r}; processes is the default'
            )
        self.dataset, self.count, self.kind = dataset, whole("count", count, 1), kind
        self.level: int = getattr(dataset, "level", 0)
        self._pool: _Threads | _Processes | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def draw_samples(self, indices: np.ndarray, draw: Draw) -> list[Any]:
        """Return the given samples, read by the caller itself. **Local.**"""
        return read_samples(self.dataset, indices, draw=draw)

    def take_drawn(self, indices: np.ndarray, draw: Draw) -> Any:
        """Return the batch of the given samples. **Local.**

        Raises:
            Exception: what the data set raises in a worker, with the traceback from there as a note.
            WorkerError: a worker cannot be started, or died.
        """
        with self._lock:
            if self._pool is None:
                pool = _Threads if self.kind == "threads" else _Processes
                self._pool = pool(self.dataset, self.count)
            parts = [indices[slice(*share(len(indices), self.count, i))] for i in range(self.count)]
            try:
                found = self._pool.read([part for part in parts if len(part)], draw)
            except WorkerError:  # the next batch starts new ones
                self._pool.close()
                self._pool = None
                raise
        return _joined(found)

    def close(self) -> None:
        """End the workers; the next batch starts new ones. **Local.**"""
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None

    def describe(self) -> dict[str, Any]:
        """Return what ranks compare. **Local.**"""
        return describe_dataset(self.dataset)

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "count": self.count, "kind": self.kind}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _joined(parts: Sequence[tuple[Form, list[Any]]]) -> Any:
    """Return one batch of the parts' arrays."""
    form, arrays = parts[0]
    for other, others in parts[1:]:
        if other != form or [a.shape[1:] for a in others] != [a.shape[1:] for a in arrays]:
            raise ValueError(
                f"sample: expected one structure and shape in a batch, got {_shown(arrays)} and {_shown(others)}; "
                "pad or crop samples to one shape"
            )
    columns = zip(*(others for _, others in parts))
    return tree_of(form, [np.concatenate(column) if len(column) > 1 else column[0] for column in columns])


def _shown(arrays: list[Any]) -> str:
    return ", ".join(f"{a.dtype}{list(a.shape[1:])}" for a in arrays)


class _Threads:
    """A pool of threads."""

    def __init__(self, dataset: Any, count: int) -> None:
        self._dataset = dataset
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="mpdp-worker")

    def read(self, parts: list[np.ndarray], draw: Draw) -> list[tuple[Form, list[Any]]]:
        calls = [self._pool.submit(take, self._dataset, part, "", draw) for part in parts]
        found = []
        error: BaseException | None = None
        for call in calls:  # all of them: none may still run when an error leaves
            try:
                found.append(arrays_of(call.result()))
            except BaseException as caught:
                error = error or caught
        if error is not None:
            raise error
        return found

    def close(self) -> None:
        self._pool.shutdown()


class _Processes:
    """Processes that each hold the data set."""

    def __init__(self, dataset: Any, count: int) -> None:
        if os.environ.get(MARK):
            raise WorkerError(
                "Workers: expected a rank to start workers, got a worker that has run the script again; "
                'put the script\'s own doings under if __name__ == "__main__":'
            )
        payload = _pickled(dataset)
        self._links: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._end = weakref.finalize(self, _end, self._links, self._processes, os.getpid())
        for number in range(count):
            here, there = Pipe()
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM.format(_HOME, there.fileno(), os.getpid())],
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[there.fileno()],
                )
            except OSError as error:
                self.close()
                raise WorkerError(
                    f"Workers: expected to start worker {number} of {count}, got {error}; use fewer"
                ) from error
            there.close()
            self._links.append(here)
            self._processes.append(process)
        for link in self._links:
            _send(link, (sys.path, sys.argv))
            link.send_bytes(payload)
        for number in range(count):
            self._answer(number)

    def read(self, parts: list[np.ndarray], draw: Draw) -> list[tuple[Form, list[Any]]]:
        asked = list(zip(self._links, parts))
        for number, (link, part) in enumerate(asked):
            try:
                _send(link, (part, tuple(draw)))
            except OSError:
                self._answer(number)
        found: list[tuple[Form, list[Any]]] = []
        error: BaseException | None = None
        for number, (link, _) in enumerate(asked):  # all of them, or later answers would be taken for others
            try:
                form, heads = self._answer(number)
                arrays = [np.empty(shape, dtype) for dtype, shape in heads]
                for array in arrays:
                    if array.nbytes:
                        link.recv_bytes_into(array.reshape(-1).view(np.uint8))
                found.append((form, arrays))
            except WorkerError:
                raise
            except BaseException as caught:
                error = error or caught
        if error is not None:
            raise error
        return found

    def close(self) -> None:
        self._end()

    def _answer(self, number: int) -> Any:
        """Return what a worker says; raise what it raised, or that it is gone."""
        try:
            kind, content = pickle.loads(self._links[number].recv_bytes())
        except (EOFError, OSError) as error:
            try:
                status = self._processes[number].wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                status = None
            raise WorkerError(
                f"Workers: expected an answer of worker {number}, got its end (status {status}); see what it has "
                'written above, or use kind="threads"'
            ) from error
        if kind == "error":
            raised, trace = content
            raised.add_note(f"in worker process {number}:\n{trace.rstrip()}")
            raise raised
        return content


def _end(links: list[Connection], processes: list[subprocess.Popen[bytes]], pid: int) -> None:
    """End worker processes: each leaves when its link is closed."""
    if os.getpid() != pid:
        return  # a forked child's copy
    for link in links:
        link.close()
    for process in processes:
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    """Return the environment of a worker: no launcher, no GPU, one thread."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return environ | one | {MARK: "1", "CUDA_VISIBLE_DEVICES": "", "MPI4PY_RC_INITIALIZE": "0"}


def _send(link: Connection, message: Any) -> None:
    link.send_bytes(pickle.dumps(message, protocol=5))


class _Pickler(pickle.Pickler):
    """Pickle mapped arrays as where they lie in their file, not as what is in it."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.memmap):
            place = _place_in_file(value)
            if place is not None:
                return np.memmap, (value.filename, value.dtype, "r", place, value.shape, _order(value))
        return NotImplemented


def _place_in_file(array: np.memmap) -> int | None:
    """Return at which byte of its file a mapped array begins; None for one that is no plain piece of it."""
    mapped = getattr(array, "_mmap", None)
    if array.filename is None or mapped is None or not array.size or not _order(array):
        return None
    import mmap

    begin = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
    offset: int = array.offset
    return offset - offset % mmap.ALLOCATIONGRANULARITY + array.ctypes.data - begin


def _order(array: np.ndarray) -> str:
    return "C" if array.flags.c_contiguous else "F" if array.flags.f_contiguous else ""


def _pickled(dataset: Any) -> bytes:
    """Return a data set as bytes, with what a worker needs to know of the script before it can read them."""
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=5).dump(dataset)
    except MissingDependencyError:
        raise
    except Exception as error:
        raise TypeError(
            f"dataset: expected one that can be pickled for worker processes, got {type(error).__name__}: {error}; "
            'define its functions at the top level of a module, or use kind="threads"'
        ) from error
    content = file.getvalue()
    script = None
    if b"__main__" in content:
        main = sys.modules["__main__"]
        script = (getattr(main.__spec__, "name", None), getattr(main, "__file__", None))
    return pickle.dumps((script, os.getcwd(), content), protocol=5)
