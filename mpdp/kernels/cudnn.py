"""What convolution and attention by cuDNN share: the package, handles, and plans that are built once.

cuDNN comes through ``nvidia-cudnn-frontend``, an optional package. It knows arrays by address.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from types import ModuleType
from typing import Any

from ..errors import MissingDependencyError

Choose = Callable[[str], str | None]  # from the key of a problem to the name of a plan; None for the first
TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT"}


class Plan:
    """A graph of cuDNN with one execution plan, and the names of what it reads and writes, in order.

    ``name`` is the plan's own, where somebody chooses between several.
    """

    __slots__ = ("graph", "name", "names", "workspace_bytes")

    def __init__(self, graph: Any, names: list[Any], name: str = "") -> None:
        self.graph, self.names, self.name = graph, names, name
        self.workspace_bytes = max(1, graph.get_workspace_size())


class CudnnPlans:
    """The plans of one GPU for one kind of problem. **Local.** The thread's current device is that GPU in every call.

    A subclass builds a plan from a problem. A handle belongs to one stream, so that threads with streams of their own
    share nothing but finished plans.

    Args:
        what: what it computes, for errors.

    Raises:
        MissingDependencyError: no ``nvidia-cudnn-frontend``, or no cuDNN that it finds.
    """

    def __init__(self, what: str) -> None:
        self.cudnn = load(what)
        self._handles: dict[int, Any] = {}
        self._plans: dict[Hashable, Plan | None] = {}
        self._lock = threading.Lock()

    def plan(self, problem: Any, stream: int, choose: Choose | None = None) -> Plan | None:
        """Return the plan of a problem, None where cuDNN has none; both are remembered until :meth:`forget`."""
        try:
            return self._plans[problem]
        except KeyError:
            pass
        with self._lock:
            if problem not in self._plans:
                try:
                    self._plans[problem] = self.build(problem, self._handle(stream), choose)
                except self.cudnn.cudnnGraphNotSupportedError:
                    self._plans[problem] = None
            return self._plans[problem]

    def forget(self) -> None:
        """Drop the plans: others may be asked for now."""
        with self._lock:
            self._plans.clear()

    def build(self, problem: Any, handle: Any, choose: Choose | None = None) -> Plan:
        """Build the plan of a problem, where ``choose`` is heard if there are several; cuDNN's own error tells that it
        has none.
        """
        raise NotImplementedError

    def run(self, plan: Plan, addresses: Sequence[int], workspace: int, stream: int) -> None:
        """Launch a plan on a stream; the addresses stand in the order of the plan's names."""
        plan.graph.execute(dict(zip(plan.names, addresses)), workspace, handle=self._handle(stream))

    def _handle(self, stream: int) -> Any:
        handle = self._handles.get(stream)
        if handle is None:
            handle = self.cudnn.create_handle()
            self.cudnn.set_stream(handle=handle, stream=stream)
            self._handles[stream] = handle
        return handle

    def graph(self, handle: Any, dtype: str) -> Any:
        """Return an empty graph whose arithmetic is in float32."""
        types = self.cudnn.data_type
        return self.cudnn.pygraph(
            io_data_type=getattr(types, TYPES[dtype]),
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=handle,
        )

    def finished(self, graph: Any, names: list[Any]) -> Plan:
        """Return the plan of a graph that cuDNN's heuristics suggest first."""
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        return Plan(graph, names)


def load(what: str) -> ModuleType:
    """Return the package ``cudnn``. **Local.**

    Raises:
        MissingDependencyError: it is not installed, or finds no cuDNN.
    """
    try:
        import cudnn  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependencyError(
            f"{what} by cuDNN: expected nvidia-cudnn-frontend and cuDNN, got {error}; install them with: "
            'pip install "mpdp[cuda13]" (or cuda12 for CUDA 12)'
        ) from error
    return cudnn
