"""Products by cuBLASLt: descriptions, algorithms and workspaces, through ``nvmath.bindings``.

CuPy's own cuBLAS refuses to be captured in a CUDA graph and knows neither epilogues nor a choice of algorithms. This
module owns a handle, what a product needs on the host (a :class:`Plan`, made once for a :class:`Problem`) and one
workspace a stream. It knows addresses and numbers, no arrays; ``cuda_products`` turns arrays into problems.

Only algorithms that give the same bits each time are taken: none that adds parts in the result in place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .plan_book import PlanBook

WORKSPACE_BYTES = 32 << 20  # what NVIDIA advises for Hopper, and all that a product ever gets
TRIED = 8  # plans that a timed choice compares
CODES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}  # cudaDataType_t
COMPUTE = {  # cublasComputeType_t by dtype and whether TF32 may be used
    ("float32", False): 68,
    ("float32", True): 77,
    ("float64", False): 70,
    ("float16", False): 68,
    ("bfloat16", False): 68,
}
_NOT_IN_PLACE = 0b110  # cublasLtReductionScheme_t: none always, in the arithmetic's type, in the result's
_RESULT_BYTES = 96  # of cublasLtMatmulHeuristicResult_t
_ALGORITHM_BYTES = 64  # of the cublasLtMatmulAlgo_t at its start
_PER_THREAD_STREAM = 2  # the one address that names another stream in each thread
_SCALARS = {name: np.array([0, 1], name) for name in ("float32", "float64")}  # on the host
_WORTH = 0.97  # of the suggested plan's time: what another must take less than to be chosen


def scalars(read: str) -> tuple[int, int]:
    """Return the addresses of 0 and 1 in the type that products of a dtype are scaled in. **Local.**"""
    held = _SCALARS["float64" if read == "float64" else "float32"]
    return held.ctypes.data, held.ctypes.data + held.itemsize


class Problem(NamedTuple):
    """What a product's algorithm depends on: ``out = a @ b`` row by row, ``batch`` times. Strides in elements."""

    read: str  # dtype of a and b
    written: str  # dtype of out
    tf32: bool
    rows: int
    columns: int
    inner: int
    transposed_a: int
    stride_a: int  # between the rows of a (of its transpose)
    step_a: int  # between the matrices of a batch; 0 repeats one
    transposed_b: int
    stride_b: int
    step_b: int
    batch: int = 1
    epilogue: str = "DEFAULT"  # name of a cublasLtEpilogue_t
    alignment: int = 16  # bytes of which all addresses are a multiple

    def key(self) -> str:
        """Return the problem as text."""
        return " ".join(str(int(x) if isinstance(x, bool) else x) for x in self)


class Plan:
    """A problem's descriptions and algorithm, ready to run; freed with the object."""

    __slots__ = (
        "_pointers",
        "a",
        "algorithm",
        "b",
        "description",
        "found",
        "library",
        "one",
        "out",
        "owner",
        "zero",
    )

    def __init__(self, owner: CublasLt, problem: Problem) -> None:
        self.owner = owner
        self.library = library = owner.library
        read, written = CODES[problem.read], CODES[problem.written]
        p = problem
        # cuBLAS counts columns first: what it calls B.T A.T is this package's A B, row by row.
        self.description = library.matmul_desc_create(
            COMPUTE[p.read, p.tf32], CODES["float64" if p.read == "float64" else "float32"]
        )
        self.a = library.matrix_layout_create(
            read, *((p.inner, p.columns) if p.transposed_b else (p.columns, p.inner)), p.stride_b
        )
        self.b = library.matrix_layout_create(
            read, *((p.rows, p.inner) if p.transposed_a else (p.inner, p.rows)), p.stride_a
        )
        self.out = library.matrix_layout_create(written, p.columns, p.rows, p.columns)
        if p.batch > 1:
            steps = (self.a, p.step_b), (self.b, p.step_a), (self.out, p.rows * p.columns)
            for layout, step in steps:
                self._lay(layout, "BATCH_COUNT", p.batch)
                self._lay(layout, "STRIDED_BATCH_OFFSET", step)
        self.set("TRANSA", p.transposed_b)
        self.set("TRANSB", p.transposed_a)
        if p.epilogue != "DEFAULT":
            self.set("EPILOGUE", int(library.Epilogue[p.epilogue]))
            if "BIAS" in p.epilogue or "BGRAD" in p.epilogue:
                self.set("BIAS_DATA_TYPE", written)
            if "AUX" in p.epilogue or p.epilogue.startswith("D"):
                self.set("EPILOGUE_AUX_LD", p.columns)
        self.zero, self.one = scalars(p.read)
        self._pointers: dict[str, tuple[int, Any]] = {}
        self.found: Any = None
        self.algorithm = 0

    def set(self, name: str, value: int) -> None:
        """Set an attribute of the description, an address for example."""
        library = self.library
        attribute = int(library.MatmulDescAttribute[name])
        held = np.array([value], library.get_matmul_desc_attribute_dtype(attribute))
        library.matmul_desc_set_attribute(self.description, attribute, held.ctypes.data, held.nbytes)

    def point(self, name: str, address: int) -> None:
        """Set an address that may be another one at each call, at little cost."""
        known = self._pointers.get(name)
        if known is None:
            attribute = int(self.library.MatmulDescAttribute[name])
            known = self._pointers[name] = attribute, np.zeros(1, np.uint64)
        attribute, held = known
        if held[0] != address:
            held[0] = address
            self.library.matmul_desc_set_attribute(self.description, attribute, held.ctypes.data, 8)

    def _lay(self, layout: int, name: str, value: int) -> None:
        library = self.library
        attribute = int(library.MatrixLayoutAttribute[name])
        held = np.array([value], library.get_matrix_layout_attribute_dtype(attribute))
        library.matrix_layout_set_attribute(layout, attribute, held.ctypes.data, held.nbytes)

    def run(self, a: int, b: int, out: int, accumulate: bool, stream: int) -> None:
        """Launch the product; the arguments are addresses."""
        owner = self.owner
        owner.matmul(
            owner.handle, self.description, self.one, b, self.a, a, self.b, self.one if accumulate else self.zero,
            out, self.out, out, self.out, self.algorithm, owner.workspace(stream), WORKSPACE_BYTES, stream,
        )  # fmt: skip

    def take(self, algorithm: np.ndarray) -> None:
        """Compute by this algorithm from now on."""
        self.found = algorithm
        self.algorithm = algorithm.ctypes.data

    def __del__(self) -> None:
        library = self.library
        for layout in (getattr(self, name, 0) for name in ("a", "b", "out")):
            if layout:
                library.matrix_layout_destroy(layout)
        if getattr(self, "description", 0):
            library.matmul_desc_destroy(self.description)


class CublasLt:
    """A handle of cuBLASLt for one GPU, and the workspaces of its streams. **Local.**

    Args:
        xp: CuPy; the GPU is the current one.
        device: ordinal of the GPU.
        book: where plans are looked up.

    Raises:
        ImportError: ``nvmath-python`` or the library is not installed.
    """

    def __init__(self, xp: Any, device: int, book: PlanBook) -> None:
        from nvmath.bindings import cublasLt

        self.library: Any = cublasLt
        self.xp = xp
        self.handle = cublasLt.create()
        self.matmul = cublasLt.matmul
        self.book = book
        properties = xp.cuda.runtime.getDeviceProperties(device)
        self.multiprocessors = int(properties["multiProcessorCount"])
        self._machine = f"cublasLt {cublasLt.get_version()} {properties['name'].decode()}"
        self._workspaces: dict[Any, Any] = {}

    def workspace(self, stream: int) -> int:
        """Return the address of a stream's workspace, made at first use and kept: graphs hold it."""
        place: Any = (stream, threading.get_ident()) if stream == _PER_THREAD_STREAM else stream
        array = self._workspaces.get(place)
        if array is None:
            array = self._workspaces[place] = self.xp.empty(WORKSPACE_BYTES, np.uint8)
        return array.data.ptr

    def plan(self, problem: Problem) -> Plan | None:
        """Return a plan, the book's where it has one; None where the library has no algorithm."""
        plan = Plan(self, problem)
        key = f"{self._machine} {problem.key()}"
        text = self.book.find(key, lambda: self._fastest(problem))
        if text is not None:
            algorithm = np.frombuffer(bytes.fromhex(text), np.uint8).copy()
            if algorithm.nbytes == _ALGORITHM_BYTES and self._fits(plan, algorithm):
                plan.take(algorithm)
                return plan
        found = self.candidates(plan, problem, 1)
        if not found:
            return None
        plan.take(found[0])
        return plan

    def candidates(self, plan: Plan, problem: Problem, most: int) -> list[np.ndarray]:
        """Return the algorithms that the library suggests, best first by its own estimate."""
        library = self.library
        preference = library.matmul_preference_create()
        try:
            for name, value in (
                ("MAX_WORKSPACE_BYTES", WORKSPACE_BYTES),
                ("REDUCTION_SCHEME_MASK", _NOT_IN_PLACE),
                *((f"MIN_ALIGNMENT_{x}_BYTES", problem.alignment) for x in "ABCD"),
            ):
                attribute = int(library.MatmulPreferenceAttribute[name])
                held = np.array([value], library.get_matmul_preference_attribute_dtype(attribute))
                library.matmul_preference_set_attribute(preference, attribute, held.ctypes.data, held.nbytes)
            results = np.zeros((most, _RESULT_BYTES), np.uint8)
            count = np.zeros(1, np.int32)
            try:
                library.matmul_algo_get_heuristic(
                    self.handle, plan.description, plan.a, plan.b, plan.out, plan.out, preference, most,
                    results.ctypes.data, count.ctypes.data,
                )  # fmt: skip
            except library.cuBLASLtError:  # "not supported" is an error here
                return []
        finally:
            library.matmul_preference_destroy(preference)
        return [row[:_ALGORITHM_BYTES].copy() for row in results[: count[0]]]

    def _fits(self, plan: Plan, algorithm: np.ndarray) -> bool:
        """Return whether the library can solve the plan's problem by an algorithm."""
        result = np.zeros(_RESULT_BYTES, np.uint8)
        try:
            self.library.matmul_algo_check(
                self.handle, plan.description, plan.a, plan.b, plan.out, plan.out, algorithm.ctypes.data,
                result.ctypes.data,
            )  # fmt: skip
        except self.library.cuBLASLtError:
            return False
        return int(result[_ALGORITHM_BYTES:][:8].view(np.uint64)[0]) <= WORKSPACE_BYTES

    # -- timing --------------------------------------------------------------------------------------------

    def times(self, problem: Problem, most: int = TRIED) -> list[tuple[float, np.ndarray]]:
        """Return (seconds, algorithm) of each suggested algorithm, in the order of the suggestion; waits."""
        plan = Plan(self, problem)
        found = self.candidates(plan, problem, most)
        if not found:
            return []
        arrays = self._scratch(plan, problem)
        a, b, out = (x.data.ptr for x in arrays[:3])
        stream = self.xp.cuda.Stream(non_blocking=True)
        self.xp.cuda.get_current_stream().synchronize()
        timed = []
        with stream:
            for algorithm in found:
                plan.take(algorithm)
                timed.append((self.time(lambda: plan.run(a, b, out, False, stream.ptr), stream), algorithm))
        self._workspaces.pop(stream.ptr, None)  # the address may name another stream next
        return timed

    def time(self, launch: Callable[[], None], stream: Any) -> float:
        """Return the seconds a launch takes inside of a graph, the best of several runs."""
        cuda = self.xp.cuda
        launch()
        times = 4
        for _ in range(2):  # a first graph tells how many launches make a second one long enough
            stream.begin_capture()
            for _ in range(times):
                launch()
            graph = stream.end_capture()
            graph.launch(stream)
            best = float("inf")
            for _ in range(3):
                start, end = cuda.Event(), cuda.Event()
                start.record(stream)
                graph.launch(stream)
                end.record(stream)
                end.synchronize()
                best = min(best, cuda.get_elapsed_time(start, end) / 1e3 / times)
            more = max(4, min(50, int(1e-3 / max(best, 1e-7))))
            if more <= times:
                break
            times = more
        return best

    def _scratch(self, plan: Plan, problem: Problem) -> list[Any]:
        """Return arrays for a, b, out and whatever the epilogue names, filled with small numbers."""
        p = problem
        down_a, down_b = (p.inner if p.transposed_a else p.rows), (p.columns if p.transposed_b else p.inner)
        sizes = (
            (p.batch - 1) * p.step_a + down_a * p.stride_a,
            (p.batch - 1) * p.step_b + down_b * p.stride_b,
        )
        arrays: list[Any] = []
        for n in sizes:
            arrays.append(self._numbers(n, p.read))
        arrays.append(self.xp.empty(p.batch * p.rows * p.columns, _dtype(p.written)))
        if "BIAS" in p.epilogue or "BGRAD" in p.epilogue:
            arrays.append(self._numbers(max(p.rows, p.columns), p.written))
            plan.set("BIAS_POINTER", arrays[-1].data.ptr)
        if "AUX" in p.epilogue or p.epilogue.startswith("D"):
            arrays.append(self._numbers(p.rows * p.columns, p.written))
            plan.set("EPILOGUE_AUX_POINTER", arrays[-1].data.ptr)
        return arrays

    def _numbers(self, count: int, dtype: str) -> Any:
        x = self.xp.arange(count, dtype=np.uint32)
        x *= np.uint32(2654435761)  # numbers all over [-0.5, 0.5): the power a product draws depends on them
        return (x.astype(np.float32) / np.float32(2**32) - np.float32(0.5)).astype(_dtype(dtype))

    def _fastest(self, problem: Problem) -> str | None:
        """Return the fastest algorithm as text; the suggested one unless another is clearly faster."""
        timed = self.times(problem)
        if len(timed) < 2:
            return None
        seconds, algorithm = min(timed, key=lambda pair: pair[0])
        if seconds > _WORTH * timed[0][0]:
            algorithm = timed[0][1]
        return algorithm.tobytes().hex()


def _dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
