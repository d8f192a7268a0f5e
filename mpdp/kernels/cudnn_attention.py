"""Attention by cuDNN: plans for shapes and strides.

It reads queries, keys and values where they lie, by strides, and keeps of the scores one number a query. Who may call
it, and what happens to arrays that it can't read, is ``cuda_attention``'s.

Shapes: N sequences, H heads, T queries, S keys, D features of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .cudnn import TYPES, Choose, CudnnPlans, Plan


class Problem(NamedTuple):
    """What a plan depends on; strides are in elements.

    Attributes:
        q: (N, H, T, D).
        k: (N, H, S, D), of keys and values.
        strides: of q, k, v and the result; of backward then also of g and the gradients of q, k and v.
        deterministic: of backward.
    """

    dtype: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    scale: float
    causal: bool
    deterministic: bool


class CudnnAttention(CudnnPlans):
    """The attention of one GPU. **Local.**

    A plan's addresses stand in the order of its problem's strides, with the statistics behind them: float32
    (N, H, T, 1), of each query the logarithm of the sum that its softmax divides by.
    """

    def __init__(self) -> None:
        super().__init__("attention")

    def build(self, problem: Problem, handle: Any, choose: Choose | None = None) -> Plan:
        return (self._forward if len(problem.strides) == 4 else self._backward)(problem, handle)

    def _forward(self, problem: Problem, handle: Any) -> Plan:
        graph = self.graph(handle, problem.dtype)
        dims = problem.q, problem.k, problem.k
        q, k, v = self._tensors(graph, problem, "q k v", dims)
        out, statistics = graph.sdpa(
            name="attention", q=q, k=k, v=v, generate_stats=True, attn_scale=problem.scale, **_options(problem)
        )  # fmt: skip
        self._result(out, problem, problem.q, 3)
        statistics.set_output(True).set_data_type(self.cudnn.data_type.FLOAT)
        return self.finished(graph, [q, k, v, out, statistics])

    def _backward(self, problem: Problem, handle: Any) -> Plan:
        graph = self.graph(handle, problem.dtype)
        n, h, t, _ = problem.q
        dims = problem.q, problem.k, problem.k, problem.q, problem.q
        q, k, v, out, g = self._tensors(graph, problem, "q k v out g", dims)
        statistics = graph.tensor(
            name="statistics", dim=[n, h, t, 1], stride=[h * t, t, 1, 1], data_type=self.cudnn.data_type.FLOAT
        )
        gradients = graph.sdpa_backward(
            name="attention_backward", q=q, k=k, v=v, o=out, dO=g, stats=statistics, attn_scale=problem.scale,
            **_options(problem),
        )  # fmt: skip
        for i, (gradient, dim) in enumerate(zip(gradients, dims)):
            self._result(gradient, problem, dim, 5 + i)
        return self.finished(graph, [q, k, v, out, g, *gradients, statistics])

    def _tensors(self, graph: Any, problem: Problem, names: str, dims: Any) -> list[Any]:
        dtype = getattr(self.cudnn.data_type, TYPES[problem.dtype])
        return [
            graph.tensor(name=name, dim=list(dim), stride=list(stride), data_type=dtype)
            for name, dim, stride in zip(names.split(), dims, problem.strides)
        ]

    def _result(self, tensor: Any, problem: Problem, dim: tuple[int, ...], at: int) -> None:
        dtype = getattr(self.cudnn.data_type, TYPES[problem.dtype])
        tensor.set_output(True).set_dim(list(dim)).set_stride(list(problem.strides[at])).set_data_type(dtype)


def _options(problem: Problem) -> dict[str, Any]:
    options = {"use_causal_mask": True} if problem.causal else {}
    if len(problem.strides) > 4 and problem.deterministic:
        options["use_deterministic_algorithm"] = True
    return options
