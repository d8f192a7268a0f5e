"""Convolutions by cuDNN, through ``nvidia-cudnn-frontend``: plans for shapes, and their launch.

Images have channels last, weights are (O, C / groups, I, J) in C order: cuDNN reads and writes both as they lie. It
knows arrays by address; who may call it, and what happens to what it has no plan for, is ``cuda_images``'s.

Shapes: N samples, C channels in, O out, H x W pixels in, P x Q out, I x J the window.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal, NamedTuple

from .cudnn import TYPES, Choose, CudnnPlans, Plan
from .windows import Windows


class Problem(NamedTuple):
    """What a plan depends on.

    Attributes:
        kind: forward, forward with a bias, the gradient of the images, or that of the weight.
        dtype: of all arrays.
        tf32: whether float32 operands may be rounded to TF32.
        x: (N, C, H, W).
        weight: (O, C / groups, I, J).
        windows: stride, padding, dilation.
    """

    kind: Literal["forward", "forward_bias", "images", "weight"]
    dtype: str
    tf32: bool
    x: tuple[int, ...]
    weight: tuple[int, ...]
    windows: Windows

    @property
    def out(self) -> tuple[int, ...]:
        """(N, O, P, Q)."""
        return (self.x[0], self.weight[0], *self.windows.fit(*self.x[2:]))


class CudnnConvolution(CudnnPlans):
    """The convolutions of one GPU. **Local.** The current device of the thread is that GPU in every call.

    Plans are what cuDNN's heuristics suggest first, of those that repeat their bits, and in float32 of those that round
    no operand unless TF32 is allowed. A handle belongs to one stream, so threads with streams of their own share
    nothing but finished plans.

    Args:
        gpu: its name, for the keys of plans.

    Raises:
        MissingDependencyError: no ``nvidia-cudnn-frontend``, or no cuDNN that it finds.
    """

    def __init__(self, gpu: str) -> None:
        super().__init__("convolution")
        self._gpu = gpu

    def candidates(self, problem: Problem, stream: int, most: int) -> list[Plan]:
        """Return up to ``most`` plans, in the order in which cuDNN suggests them."""
        found: list[Plan] = []
        for i in itertools.count():
            graph, names = self._graph(problem, self._handle(stream))
            if len(found) == most or i == graph.get_execution_plan_count():
                return found
            plan = self._built(graph, names, i)
            if plan is not None:
                found.append(plan)
        raise AssertionError("counting does not end")

    def _key(self, problem: Problem) -> str:
        return f"cudnn {self.cudnn.backend_version()} {self._gpu} {problem}"

    def build(self, problem: Problem, handle: Any, choose: Choose | None = None) -> Plan:
        """Return the plan that ``choose`` names, or the first that can be built."""
        graph, names = self._graph(problem, handle)
        name = None if choose is None else choose(self._key(problem))
        if name is not None:
            for i in range(graph.get_execution_plan_count()):
                if graph.get_plan_name_at_index(i) == name:
                    plan = self._built(graph, names, i)
                    if plan is not None:
                        return plan
                    graph, names = self._graph(problem, handle)
        graph.check_support()
        graph.build_plans()
        return Plan(graph, names)

    def _built(self, graph: Any, names: list[Any], index: int) -> Plan | None:
        """Return the plan of an index, None where it can't be built or is refused."""
        try:
            graph.select_plan(index)
            graph.check_support()
            graph.build_plans()
        except (self.cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError):
            return None  # a plan whose notes are refused raises one of the latter two
        return Plan(graph, names, graph.get_plan_name_at_index(index))

    def _graph(self, problem: Problem, handle: Any) -> tuple[Any, list[Any]]:
        """Return a graph with its plans listed and none built, and the names of what it reads and writes."""
        cudnn, windows = self.cudnn, problem.windows
        dtype = getattr(cudnn.data_type, TYPES[problem.dtype])
        graph = self.graph(handle, problem.dtype)
        places = {
            "padding": list(windows.padding),
            "stride": list(windows.stride),
            "dilation": list(windows.dilation),
        }
        x = {"dim": list(problem.x), "stride": _channels_last(problem.x)}
        # With one pixel a window, both orders are the same memory, and channels last needs no turning.
        pointwise = problem.weight[2:] == (1, 1)
        order = _channels_last if pointwise else _in_order
        weight = {"dim": list(problem.weight), "stride": order(problem.weight)}
        out = {"dim": list(problem.out), "stride": _channels_last(problem.out)}
        if problem.kind == "weight":
            names = [
                graph.tensor(name="x", data_type=dtype, **x),
                graph.tensor(name="g", data_type=dtype, **out),
            ]
            result, described = graph.conv_wgrad(image=names[0], loss=names[1], **places), weight
        elif problem.kind == "images":
            names = [
                graph.tensor(name="g", data_type=dtype, **out),
                graph.tensor(name="w", data_type=dtype, **weight),
            ]
            result, described = graph.conv_dgrad(loss=names[0], filter=names[1], **places), x
        else:
            names = [
                graph.tensor(name="x", data_type=dtype, **x),
                graph.tensor(name="w", data_type=dtype, **weight),
            ]
            result, described = graph.conv_fprop(image=names[0], weight=names[1], **places), out
            if problem.kind == "forward_bias":
                outputs = problem.weight[0]
                bias = [1, outputs, 1, 1]
                names.append(graph.tensor(name="b", dim=bias, stride=_channels_last(bias), data_type=dtype))
                result = graph.bias(name="bias", input=result, bias=names[2])
        result.set_output(True).set_data_type(dtype).set_dim(described["dim"]).set_stride(described["stride"])
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        note = cudnn.numerical_note
        refused = [note.NONDETERMINISTIC]
        if problem.dtype == "float32" and not problem.tf32:
            refused.append(note.TENSOR_CORE)
        graph.deselect_numeric_notes(refused)
        return graph, [*names, result]


def _channels_last(shape: Any) -> list[int]:
    _, channels, height, width = shape
    return [height * width * channels, 1, width * channels, channels]


def _in_order(shape: Any) -> list[int]:
    _, channels, height, width = shape
    return [channels * height * width, height * width, width, 1]
