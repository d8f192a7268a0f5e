"""Products by cuBLAS through CuPy's own bindings: what runs without ``nvmath-python``, outside of graphs.

A problem's plan is made and run as in ``cublaslt``; epilogues have none here. CuPy's handle refuses to be captured
(cupy#6290).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import MissingDependencyError
from .cublaslt import CODES, COMPUTE, Problem, scalars

_DEFAULT = -1  # CUBLAS_GEMM_DEFAULT


class PlainCublas:
    """CuPy's handle of cuBLAS, which gives the same bits each time as long as one stream calls it. **Local.**"""

    def __init__(self, xp: Any) -> None:
        from cupy_backends.cuda.libs import cublas  # type: ignore[import-not-found,unused-ignore]

        self._cublas = cublas
        self._handle = xp.cuda.device.get_cublas_handle
        properties = xp.cuda.runtime.getDeviceProperties(xp.cuda.runtime.getDevice())
        self.multiprocessors = int(properties["multiProcessorCount"])

    def plan(self, problem: Problem) -> PlainPlan | None:
        """Return a plan; None for a problem with an epilogue."""
        return PlainPlan(self._cublas, self._handle, problem) if problem.epilogue == "DEFAULT" else None


class PlainPlan(NamedTuple):
    """A problem and what runs it."""

    cublas: Any
    handle: Callable[[], int]
    problem: Problem

    def run(self, a: int, b: int, out: int, accumulate: bool, stream: int) -> None:
        """Launch the product on the current stream; the arguments are addresses.

        Raises:
            MissingDependencyError: the stream is being captured.
        """
        p = self.problem
        zero, one = scalars(p.read)
        code, written, compute = CODES[p.read], CODES[p.written], COMPUTE[p.read, p.tf32]
        sizes = (p.transposed_b, p.transposed_a, p.columns, p.rows, p.inner)
        try:
            if p.batch == 1:
                self.cublas.gemmEx(
                    self.handle(), *sizes, one, b, code, p.stride_b, a, code, p.stride_a,
                    one if accumulate else zero, out, written, p.columns, compute, _DEFAULT,
                )  # fmt: skip
            else:
                self.cublas.gemmStridedBatchedEx(
                    self.handle(), *sizes, one, b, code, p.stride_b, p.step_b, a, code, p.stride_a, p.step_a,
                    one if accumulate else zero, out, written, p.columns, p.rows * p.columns, p.batch, compute,
                    _DEFAULT,
                )  # fmt: skip
        except NotImplementedError as error:  # CuPy's way to say that it is being captured
            raise MissingDependencyError(
                "product: expected nvmath-python to capture it in a graph, found none; install it with: "
                'pip install "mpdp[cuda13]" (or cuda12 for CUDA 12)'
            ) from error
