"""Tape: the nodes that one tensor depends on, in backward order, run once.

The tape knows when each leaf's gradient gets its last contribution before backward starts, and calls back
when it does: that is what lets gradients travel while backward still runs. It writes gradients straight
into their memory and knows nothing of operations, arenas or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from .. import kernels
from ..errors import TapeError
from ..kernels.precision import is_half, wide
from .held import held_bytes
from .recording import Node
from .wants import WANTED, Before, Pair, Target, Want

if TYPE_CHECKING:
    from .tensor import Tensor

_number = attrgetter("number")
_CONSUMED = (
    "tape: expected a graph that no backward has run through yet, got one that is consumed; run the forward "
    "pass again (saved arrays are freed as backward goes), or add the losses and call backward once"
)


class Tape:
    """Collect everything that ``tensor`` depends on; :meth:`backward` then runs it, once. **Local.**

    Nodes run in the reverse of the order in which they were made. *Position* means the index of a node in
    that order. Cost: O(nodes) at construction.

    Args:
        tensor: any tensor, most often a loss. One that requires no gradient gives an empty tape.

    Attributes:
        leaves: the distinct leaves that require a gradient, in the order forward first used them.
        last_write: leaf -> position of the last node that contributes to its gradient.

    Raises:
        TapeError: an earlier backward consumed part of the graph.

    Example:
        >>> from mpdp.autodiff import Parameter
        >>> w = Parameter([1.0, 2.0])
        >>> tape = Tape((w * w).sum())
        >>> tape.backward(1.0)
        >>> w.grad
        array([2., 4.])
    """

    def __init__(self, tensor: Tensor) -> None:
        root = tensor._node
        nodes = _reachable(root) if root is not None else []
        self._nodes: list[Node] | None = nodes
        self._root = tensor if root is None and tensor.requires_grad else None
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._kernels = root.kernels if root is not None else kernels.of(tensor.data)
        position = {node: i for i, node in enumerate(nodes)}
        last_write: dict[Tensor, int] = {}
        order: dict[Tensor, int] = {}
        links: list[Any] = [None] * len(nodes)  # for each node and input: a position, a leaf or None
        words: list[int] = []  # non-negative integers alone: their hash is the same in every process
        # Forward order: the node that uses a leaf first is the one that writes its gradient last.
        for i in range(len(nodes) - 1, -1, -1):
            node = nodes[i]
            words += (node.operation.key, len(node.shape), ord(node.dtype.char))
            inward: list[Any] = []
            for source in node.inputs:
                if source is None:
                    words.append(0)
                elif type(source) is Node:
                    source = position[source]
                    words.append(2 * source + 2)
                else:
                    if source not in order:
                        order[source] = len(order)
                        last_write[source] = i
                        words.append(source._key or source._describe())
                    words.append(2 * order[source] + 1)
                inward.append(source)
            links[i] = inward
        if self._root is not None:
            last_write[self._root] = 0
            words.append(self._root._key or self._root._describe())
        self.last_write = last_write
        self.leaves: tuple[Tensor, ...] = tuple(last_write)
        self._links = links
        self._words = words

    @property
    def signature(self) -> int:
        """A number in 0..2^63-1 that is equal where the same code ran, and with near certainty nowhere else.

        It covers the sequence of operations, which node feeds which, the number of axes and dtypes, and of
        leaves the name, shape and dtype. Lengths of activations are left out: a share of another size, or
        padded to another length, is the same computation.
        """
        return hash(tuple(self._words)) & 0x7FFFFFFFFFFFFFFF

    @property
    def oldest(self) -> int:
        """Number of the node that was made first; 0 for an empty tape."""
        return self._nodes[-1].number if self._nodes else 0

    def held_bytes(self) -> int:
        """Return the bytes that backward will read, without those of the leaves. **Local.** O(nodes)."""
        return held_bytes(self._nodes or (), self.leaves)

    def backward(self, seed: Any = 1.0, after: Mapping[int, Callable[[], None]] | None = None) -> None:
        """Run backward: add the gradient of sum(seed * tensor) to every leaf. **Local.**

        Args:
            seed: the incoming gradient, a number or an array of the tensor's shape.
            after: position -> function to call once the node at that position is done.

        Raises:
            TapeError: this tape ran before, or another one consumed part of its graph.
            ValueError: a seed of another shape, or a backward rule that returned a wrong gradient.
        """
        nodes = self._nodes
        if nodes is None:
            raise TapeError(_CONSUMED)
        self._nodes = None
        g = self._seed(seed)
        if self._root is not None:
            target = _target(self._root, self._kernels)
            self._kernels.store(g, target.array, target.beta)
            _written(self._root, target.array)
            if after and 0 in after:
                after[0]()
            return
        gathered = _Gathered(nodes)
        if nodes:
            gathered.arrays[0] = g
        del g  # each gradient is freed as soon as it is used
        for i, node in enumerate(nodes):
            self._run(i, node, gathered, {})
            if after is not None and i in after:
                after[i]()

    def _run(self, i: int, node: Node, gathered: _Gathered, outside: _Outside) -> None:
        """Run the backward rule of one node, free what it held, and pass its gradients on."""
        operation, inputs, saved, k = node.operation, node.inputs, node.saved, node.kernels
        if operation is None:
            raise TapeError(_CONSUMED)
        if not k.is_current():
            with k.active():
                self._run(i, node, gathered, outside)
            return
        node.operation = node.saved = None
        node.inputs = []
        g, gathered.arrays[i] = gathered.arrays[i], None
        if g is None:  # every consumer said "no gradient", which is zero
            g = k.xp.zeros(node.shape, node.dtype)
        links = self._links[i]
        if operation.again is not None:
            places = {source: link for source, link in zip(inputs, links) if type(link) is int}
            inner = {
                stand: (gathered, places[source]) for stand, source in saved[0].items() if source in places
            }
            del saved  # the part holds its inputs until it has run
            _run_again(operation, g, {**outside, **inner})
            return
        wants: list[Want] = []
        for j, link in enumerate(links):
            if link is None:
                wants.append(None)
            elif j in operation.joins and (before := _taken(link, gathered, outside, k)) is not None:
                wants.append(Before(before))
            elif type(link) is int or link in outside or links.count(link) > 1:
                wants.append(WANTED)  # a leaf used twice by one operation: the engine adds
            else:
                wants.append(_target(link, k))
        gradients = operation.backward(k, saved, g, wants, **node.attrs)
        if len(gradients) != len(inputs):
            raise ValueError(
                f"{operation.name}: expected its backward rule to return {len(inputs)} gradients (one an "
                f"input), got {len(gradients)}; return None where none is wanted"
            )
        for j, source in enumerate(inputs):
            if source is None:
                continue
            gradient, link = gradients[j], links[j]
            if type(link) is not int and link not in outside:
                target = wants[j]
                if gradient is not target or target is WANTED:
                    if target is WANTED:
                        target = _target(source, k)
                    if gradient is not None:
                        k.store(_checked(operation.name, j, source, gradient, k), target.array, target.beta)
                    elif target.beta == 0.0:
                        target.array.fill(0)
                _written(source, target.array)
            elif gradient is not None:
                into, at = (gathered, link) if type(link) is int else outside[link]
                into.add(at, _checked(operation.name, j, source, gradient, k), k)

    def _seed(self, seed: Any) -> Any:
        if not self._kernels.is_current():
            with self._kernels.active():
                return self._seed(seed)
        xp = self._kernels.xp
        if isinstance(seed, float | int):  # a number reaches a GPU with the launch, an array needs a copy
            return xp.full(self._shape, seed, dtype=self._dtype)
        if type(seed) is xp.ndarray and seed.shape == self._shape == () and seed.dtype == self._dtype:
            return seed  # rules never write into a gradient that they get
        g = xp.array(seed, dtype=self._dtype)
        if g.shape != self._shape:
            if g.shape != ():
                raise ValueError(
                    f"seed: expected a number or an array of the tensor's shape {self._shape}, got shape "
                    f"{g.shape}; reshape it"
                )
            g = xp.full(self._shape, g, dtype=self._dtype)
        return g


class _Gathered:
    """The gradients of results that have arrived so far, by position in backward."""

    __slots__ = ("_nodes", "arrays", "owned")

    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes
        self.arrays: list[Any] = [None] * len(nodes)
        self.owned = bytearray(len(nodes))  # 1 where no operation may hold that array, so it may be added to

    def add(self, at: int, gradient: Any, k: Any) -> None:
        before = self.arrays[at]
        if before is None:
            self.arrays[at] = gradient
        elif self.owned[at]:
            k.store(gradient, before, 1.0)
        elif type(before) is not Pair and getattr(self._nodes[at].operation, "pairs", False):
            self.arrays[at] = Pair(before, gradient)
        else:  # it may be a view, or another input's gradient too: never write into it
            if type(before) is Pair:
                before = k.add(*before)
            self.arrays[at] = k.xp.asarray(k.add(before, gradient))
            self.owned[at] = 1


def _taken(link: Any, gathered: _Gathered, outside: _Outside, k: Any) -> Any:
    """Return what has arrived of an input's gradient, and forget it: the rule that gets it returns the sum."""
    if type(link) is not int:
        if link not in outside:
            return None
        gathered, link = outside[link]
    before, gathered.arrays[link], gathered.owned[link] = gathered.arrays[link], None, 0
    return k.add(*before) if type(before) is Pair else before


# For a part that is computed again: a leaf that stands for a result outside -> where its gradient is gathered.
_Outside = dict[Any, tuple[_Gathered, int]]


def _run_again(part: Any, g: Any, outside: _Outside) -> None:
    """Run forward of a part again and take its nodes in the place of the first ones."""
    tape = Tape(part.again())
    if tape.signature != part.key:
        raise ValueError(
            f"{part.name}: expected the same operations as in forward when it ran again, got others; "
            "let nothing but its inputs decide what it does"
        )
    nodes, tape._nodes = tape._nodes or [], None
    gathered = _Gathered(nodes)
    gathered.arrays[0] = g
    del g
    for i, node in enumerate(nodes):
        tape._run(i, node, gathered, outside)


def _reachable(root: Node) -> list[Node]:
    """Return the nodes that ``root`` depends on, itself first, newest first."""
    seen = {root}
    stack = [root]
    while stack:
        node = stack.pop()
        if node.operation is None:
            raise TapeError(_CONSUMED)
        for source in node.inputs:
            if type(source) is Node and source not in seen:
                seen.add(source)
                stack.append(source)
    return sorted(seen, key=_number, reverse=True)


def _checked(name: str, i: int, source: Any, gradient: Any, k: Any) -> Any:
    """Return a gradient after checking its shape and dtype against the input's; float32 is rounded to 16 bits."""
    if getattr(gradient, "shape", None) == source.shape and (
        gradient.dtype == source.dtype
        or (type(source) is not Node and source._takes(gradient.dtype))
        or (is_half(source.dtype) and gradient.dtype == wide(source.dtype))
    ):
        if gradient.dtype != source.dtype and (type(source) is Node or not source._takes(gradient.dtype)):
            gradient = gradient.astype(source.dtype)
        # 0-d results of NumPy are scalars, which nothing can be added to in place.
        return gradient if isinstance(gradient, k.xp.ndarray) else k.xp.asarray(gradient)
    got = f"{gradient.dtype} {gradient.shape}" if hasattr(gradient, "dtype") else type(gradient).__name__
    raise ValueError(
        f"{name}: expected its backward rule to return {source.dtype} {source.shape} for input {i}, got "
        f"{got}; sum over broadcast axes and keep the dtype"
    )


def _target(leaf: Tensor, k: Any) -> Target:
    """Return where the next contribution to a leaf's gradient goes."""
    grad = leaf._grad
    binding = leaf._binding
    if binding is not None:
        return Target(grad, 0.0 if leaf._written != binding.update else 1.0)
    if grad is None:
        return Target(k.xp.empty(leaf.shape, leaf.dtype), 0.0)
    return Target(grad, 1.0)


def _written(leaf: Tensor, grad: Any) -> None:
    """Note that a contribution is in place."""
    if leaf._binding is not None:
        leaf._written = leaf._binding.update
    else:
        leaf._grad = grad
