"""Replica: the model copy that one rank holds, on the arenas of one layout.

It owns memory and names: which parameter lies where, whose optimizer state belongs to it, and what happens when
parameters are frozen or thawed. When gradients are computed and reduced is the business of ``data_parallel``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import kernels
from ..autodiff import Buffer, Parameter
from ..comm.agreement import compare, together
from ..comm.base import Communicator, Request
from ..device import Device
from ..errors import DisagreementError, DivergenceError
from ..nn import Module
from ..optim import Optimizer, WeightAverage
from . import averaging
from .arena import Arena, GradientArena
from .arrivals import Arrivals
from .layout import Layout
from .masters import Masters
from .placement import check as check_placement
from .precision import Precision, reduced_dtype
from .reducer import Reducer
from .replica_check import check_replicas, take_over


class Binding:
    """What bound parameters share: the update in progress, what was, or may have been, changed behind our back, and
    the weights that are under way.
    """

    def __init__(self) -> None:
        self.update = 1
        self.dirty = False
        self.stale = False
        self.averaged = False  # an error has left the average in the working copies of slices
        self.arriving: Arrivals | None = None


class Replica:
    """Bind a model to arenas.

    **Collective.** Ranks compare their models, then take rank 0's parameters and buffers.

    Args:
        model: the same on every rank; its parameters share one dtype.
        device: where the arenas lie.
        comm: the ranks that hold a replica each.
        precision: see :class:`~mpdp.parallel.precision.Precision`.
        reduce_dtype: dtype of the gradient buffer (default: the parameters', float32 for float16).
        chunk_bytes: see :class:`Reducer`.
        placement: see :class:`~mpdp.parallel.placement.Placement`.

    Attributes:
        parameters: name to parameter in registration order; a tied one stands once.
        buffers: name to buffer.
        layout: the index space of this generation.
        arena: the gradients over it. ``weights``: the flat weights, or what this rank has of them (``masters``).
            ``copies``: the flat working copies, or None. ``masters``: the slices of the weights, None where they are
            whole.
        kernels: of the device.
        placement: who updates what. ``given``: the chunks of weights that owners give the other ranks.
        reducer: reduces the arena.
        binding: counts updates, and notes flags that were changed.
        index: name to position among the trainable parameters of the layout.
        optimizer: the one whose state belongs to the replica, or None.
        average: the moving average of its weights, or None.
    """

    def __init__(
        self,
        model: Module,
        device: Device,
        comm: Communicator,
        precision: str | None = None,
        reduce_dtype: str | None = None,
        chunk_bytes: int | None = None,
        placement: str = "replicated",
    ) -> None:
        self.device = device
        self.kernels: Any = kernels.for_device(device)
        self._placement = placement
        self.comm = comm
        self.optimizer: Optimizer | None = None
        self.average: WeightAverage | None = None
        self._chunk_bytes = chunk_bytes
        self.binding = Binding()
        together(comm, lambda: self._look_at(model, precision, reduce_dtype))
        compare(comm, "model", self.describe())
        model.bind_names()
        self._build(generation=0)
        self.broadcast()

    def _look_at(self, model: Module, precision: str | None, reduce_dtype: str | None) -> None:
        if not isinstance(model, Module):
            raise TypeError(
                f"model: expected an nn.Module, got {type(model).__name__}; derive it from nn.Module"
            )
        check_placement(self._placement)
        self.parameters: dict[str, Parameter] = dict(model.named_parameters())
        self.buffers: dict[str, Buffer] = dict(model.named_buffers())
        self.precision = Precision(precision, _one_dtype(self.parameters))
        self.dtype = self.precision.master
        self.reduce_dtype = reduced_dtype(reduce_dtype, self.dtype)

    def describe(self) -> dict[str, str]:
        """Return what must be equal on all ranks: parameters in order, dtypes, chunking. **Local.**"""
        fields = {
            f"parameter {name}": f"{p.dtype}{list(p.shape)}{'' if p.requires_grad else ' frozen'}"
            for name, p in self.parameters.items()
        }
        fields |= {f"buffer {name}": f"{b.dtype}{list(b.shape)}" for name, b in self.buffers.items()}
        return {
            "number of parameters": str(len(self.parameters)),
            **fields,
            "precision": self.precision.name,
            "reduce_dtype": self.reduce_dtype.name,
            "chunk_bytes": str(self._chunk_bytes),
            "placement": self._placement,
        }

    def _build(self, generation: int) -> None:
        """Lay the parameters out and bind them to fresh arenas."""
        self.arrive()
        shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        frozen = [name for name, p in self.parameters.items() if not p.requires_grad]
        self.layout = Layout(shapes, frozen, generation)
        self._copies: Arena | None = None
        if self.precision.copies is not None:
            self._copies = Arena(self.layout, self.precision.copies, self.device, self.comm)
        self.arena = GradientArena.over(self.layout, self.reduce_dtype, self.device, self.comm)
        self.reducer = Reducer(self.arena, self.comm, self._chunk_bytes, placement=self._placement)
        self.placement = self.reducer.placement
        in_slices = self._copies is not None and self._placement == "sharded" and not self.placement.whole
        self._weights: Arena | None = None
        if in_slices:
            whole = self.kernels.flat_zeros(self.layout.size, self.dtype)
        else:
            self._weights = Arena(self.layout, self.dtype, self.device, self.comm)
            whole = self._weights.array
        self.binding = Binding()
        self._chunks_of = {self.parameters[e.name]: self.reducer.span(e.name) for e in self.layout.trainable}
        self.index = {entry.name: i for i, entry in enumerate(self.layout.trainable)}
        self._name_of: dict[Any, str] = {}
        self._known = set(self.parameters.values())
        for buffer in self.buffers.values():
            buffer.data = kernels.move(buffer.data, self.device)
        for name, parameter in self.parameters.items():
            gradient = self.arena[name] if parameter.requires_grad else None
            copy = None if self._copies is None else self._copies[name]
            parameter.bind(self.layout.view(whole, name), gradient, self.binding, copy)
            if parameter.requires_grad:
                self._name_of[parameter] = name
        self.masters: Masters | None = None
        if in_slices:
            self.masters = Masters(self.layout, self.placement, self.comm, self.device, self.dtype)
            self._fill(self.masters, whole)
            self._show(self.masters)
        else:
            self.refresh()
        given = self.weights if self.masters is None else self.copies
        self.given = [given[start:stop] for start, stop in self.reducer.chunks]

    def _fill(self, masters: Masters, whole: Any) -> None:
        """Take this rank's slices of the weights, of which rank 0 has them all. **Collective.**"""
        assert self._copies is not None
        self.arrive()
        self.comm.broadcast(whole)
        self.kernels.store(whole, self._copies.array)
        masters.fill(whole)
        self.binding.averaged = False

    def _show(self, masters: Masters) -> None:
        """Let the parameters be what all ranks have of the weights. **Local.**"""
        assert self._copies is not None
        end = self.layout.trainable_size
        for name, parameter in self.parameters.items():
            entry = self.layout[name]
            if entry.trainable:
                parameter.show(masters.wide(name))
            else:
                zone = masters.held[end : self.layout.size]
                view = zone[entry.start - end : entry.stop - end].reshape(entry.shape)
                parameter.bind(view, None, self.binding, self._copies[name])
        self.binding.dirty = False  # the second binding has set it

    @property
    def weights(self) -> Any:
        """The flat weights over ``layout``, or what this rank has of them."""
        if self.masters is not None:
            return self.masters.held
        self.arrive()
        assert self._weights is not None
        return self._weights.array

    @property
    def weights_nbytes(self) -> int:
        """Bytes of weights that this rank has, working copies left out."""
        return int(self.weights.nbytes) if self.masters is None else self.masters.nbytes

    @property
    def copies(self) -> Any:
        """The flat working copies over ``layout``, or None."""
        self.arrive()
        return None if self._copies is None else self._copies.array

    @property
    def can_give_late(self) -> bool:
        """Whether an update may end before the weights of other ranks are here; equal on all ranks.

        The transport must carry them while this rank computes, and nothing else may read them at once: a moving
        average of whole weights does.
        """
        sharded = self._placement == "sharded" and not self.placement.whole
        return sharded and self.comm.independent and (self.average is None or self.masters is not None)

    def give_late(self) -> list[Request]:
        """Start to give all ranks what this one has updated, and return a request for each chunk. **Collective.**"""
        requests = self.placement.give(self.given)
        self.expect(requests)
        return requests

    def expect(self, requests: Sequence[Request]) -> None:
        """Let whoever reads a parameter wait for the requests of its chunks; see :class:`Arrivals`. **Local.**"""
        self.binding.arriving = Arrivals(requests, self._chunks_of, self._arrived)

    def arrive(self) -> None:
        """Wait for the weights that are under way. **Local.**"""
        if self.binding.arriving is not None:
            self.binding.arriving.all()

    def _arrived(self, arrivals: Arrivals) -> None:
        self.reducer.waited_seconds += arrivals.waited_seconds
        if self.binding.arriving is arrivals:
            self.binding.arriving = None

    def refresh(self) -> None:
        """Round the weights to the working copies again, after something else than the optimizer wrote them.

        **Local.**

        Raises:
            ValueError: they hold the average, since an error has left ``averaged()``; it takes all ranks to end that.
        """
        if self.binding.averaged:
            raise ValueError(
                "averaged: expected a block that no error leaves, got one that was caught outside of it, and forward "
                "still reads the average; catch it inside the block, or enter and leave another one on all ranks"
            )
        if self._copies is not None:
            end, size = self.layout.trainable_size, self.layout.size
            if self.masters is None:
                self.kernels.store(self.weights, self._copies.array)
            elif size > end:  # of the others nobody but the optimizer can have written the master
                self.kernels.store(self.weights[end:size], self._copies.array[end:size])
        self.binding.stale = False

    def names_of(self, positions: Mapping[Any, int]) -> dict[str, int]:
        """Return name to position for those leaves of a tape that this layout trains. **Local.**"""
        return {self._name_of[leaf]: at for leaf, at in positions.items() if leaf in self._name_of}

    def check_leaves(self, leaves: Iterable[Any]) -> None:
        """Refuse parameters that the model did not have when it was wrapped: nothing would train them. **Local.**

        Raises:
            DisagreementError: naming the parameter's shape.
        """
        for leaf in leaves:
            if isinstance(leaf, Parameter) and leaf not in self._known:
                raise DisagreementError(
                    f"model: expected the parameters it had when it was wrapped, got another of shape {leaf.shape}"
                    f"{f' ({leaf.name})' if leaf.name else ''}; build the whole model first, then wrap it"
                )

    def broadcast(self, *, root: int = 0) -> None:
        """Give every rank the parameters and buffers of ``root``. **Collective.**"""
        if self.masters is None:
            self.comm.broadcast(self.weights, root=root)
            if self.average is not None and self.average.started:
                self.comm.broadcast(self.average.array, root=root)
        elif self.layout.size > self.layout.trainable_size:  # the others are equal already
            self.comm.broadcast(self.weights[self.layout.trainable_size : self.layout.size], root=root)
        self.refresh()
        for buffer in self.buffers.values():
            flat = kernels.of(buffer.data).xp.ascontiguousarray(buffer.data).reshape(-1)
            self.comm.broadcast(flat.view(np.uint8), root=root)
            buffer.data[...] = flat.reshape(buffer.data.shape)

    def train_only(self, flags: Mapping[str, bool]) -> None:
        """Train or freeze the named parameters, in a new generation of the layout.

        **Collective.** Weights keep their values; moments those of parameters that are trained before and after.

        Raises:
            ValueError: no such parameter, on all ranks.
            DisagreementError: ranks name different ones, on all ranks.
        """
        together(self.comm, lambda: self._check_names(flags))
        compare(self.comm, "freeze or thaw", dict(sorted(flags.items())))
        old_layout, state, average = self.layout, self.collect_state(), averaging.collect(self)
        if self.masters is not None:
            self._release(self.collect_weights())
        for name, flag in flags.items():
            self.parameters[name].requires_grad = flag
        self._build(old_layout.generation + 1)
        if self.average is not None:
            averaging.lay_out(self, old_layout, average)
        if self.optimizer is not None:
            self._move_optimizer(self.optimizer, old_layout, state)

    def _release(self, whole: np.ndarray | None) -> None:
        """Give the parameters values of their own, right on rank 0 alone. **Local.**"""
        if whole is None:
            whole = np.zeros(self.layout.size, self.dtype)
        flat = self.kernels.from_host(whole)
        for name, parameter in self.parameters.items():
            parameter.release(self.layout.view(flat, name))

    def collect_weights(self) -> np.ndarray | None:
        """Return the weights over ``layout`` in host memory on rank 0 (on a CPU most often the array itself).

        **Collective.** None on other ranks.
        """
        if self.masters is not None:
            return self.masters.collect()
        return self.kernels.to_numpy(self.weights) if self.comm.rank == 0 else None

    def collect_state(self) -> dict[str, np.ndarray | None]:
        """Return the optimizer's slots over the trainable zone in host memory on rank 0, None each elsewhere.

        **Collective.**
        """
        if self.optimizer is None:
            return {}
        return {slot: self.placement.collect(flat) for slot, flat in self.optimizer.state.items()}

    def load(self, weights: np.ndarray | None, state: Mapping[str, np.ndarray | None]) -> None:
        """Take over what :meth:`collect_weights` and :meth:`collect_state` gave, and rank 0's buffers.

        **Collective.** Each argument is None on other ranks than 0.
        """
        if self.masters is not None:
            whole = self.kernels.flat_zeros(self.layout.size, self.dtype)
            if weights is not None:
                whole[...] = self.kernels.from_host(weights)
            self._fill(self.masters, whole)
        elif weights is not None:
            self.weights[...] = self.kernels.from_host(weights)
        self.broadcast()
        for slot, full in state.items():
            assert self.optimizer is not None
            self.placement.hand_out(full, self.optimizer.state[slot])

    def _check_names(self, flags: Mapping[str, bool]) -> None:
        for name in flags:
            if name not in self.parameters:
                raise ValueError(
                    f"name: expected a parameter of the model, got {name!r}; "
                    "take the full names of model.named_parameters()"
                )

    def bind_optimizer(self, optimizer: Optimizer) -> None:
        """Give the optimizer its place over the layout; the first call allocates its state. **Local.**

        Raises:
            ValueError: another optimizer than before.
        """
        if optimizer is self.optimizer:
            return
        if self.optimizer is not None:
            raise ValueError(
                "optimizer: expected the one of the first step, got another; its state belongs to it"
            )
        self._bind(optimizer)
        self.optimizer = optimizer

    def _bind(self, optimizer: Optimizer) -> None:
        optimizer.bind(self.layout, self.weights, self.kernels, self.copies, self.placement.held)

    def _move_optimizer(
        self, optimizer: Optimizer, old_layout: Layout, state: Mapping[str, np.ndarray | None]
    ) -> None:
        """Bind the optimizer to the new layout, with the state of the parameters that are trained in both.

        **Collective.**

        Args:
            optimizer: bound to the old layout.
            old_layout: that one.
            state: as :meth:`collect_state` gave it before.
        """
        counts = {entry.name: int(count) for entry, count in zip(old_layout.trainable, optimizer.updates)}
        optimizer.unbind()
        self._bind(optimizer)
        kept = [entry.name for entry in self.layout.trainable if entry.name in counts]
        for slot, old in state.items():
            new = None
            if old is not None:
                new = np.zeros(self.layout.trainable_size, old.dtype)
                for name in kept:
                    self.layout.view(new, name)[...] = old_layout.view(old, name)
            self.placement.hand_out(new, optimizer.state[slot])
        updates = np.array([counts.get(e.name, 0) for e in self.layout.trainable], dtype=np.int64)
        optimizer.load_state_arrays({**optimizer.state_arrays(), "updates": updates})

    def check(self, step: int, beside: Mapping[str, Any], repair: bool = False) -> DivergenceError | None:
        """Check that every rank holds the same weights, moments, counts and buffers, bit by bit. **Collective.**

        What one rank holds alone is not compared.

        Args:
            step: finished updates.
            beside: name to array of what else must be equal.
            repair: let every rank take over what most ranks hold, instead of raising.

        Returns:
            what was repaired, or None. What stands in ``beside`` is the caller's to repair.

        Raises:
            DivergenceError: see :func:`check_replicas`.
        """
        self.arrive()
        flats: dict[str, Any] = {} if self.masters is not None else {"weight": self.weights}
        if self._copies is not None:
            if self.binding.stale:
                self.refresh()  # a local fact must not change what is compared
            flats["working copy"] = self._copies.array
        arrays: dict[str, Any] = {f"buffer {name}": b.data for name, b in self.buffers.items()}
        arrays |= beside
        if self.average is not None and self.average.started and self.masters is None:
            flats["average"] = self.average.array
        if self.masters is not None:
            for name in self.parameters:
                wide = (
                    self.masters.wide(name) if self.layout[name].trainable else self.parameters[name].numpy()
                )
                if wide is not None:
                    arrays[f"weight of {name}"] = wide
        if self.optimizer is not None:
            if self.placement.held is None:  # else each number is on one rank alone
                flats |= self.optimizer.state
            arrays["update counts"] = self.optimizer.updates
        try:
            check_replicas(self.comm, self.layout, flats, arrays, step)
        except DivergenceError as error:
            if not repair:
                raise
            own = [array for name, array in arrays.items() if name not in beside]
            take_over(self.comm, [*flats.values(), *own], error.root)
            if self.optimizer is not None:
                self.optimizer.recount()
            return error
        return None


def _one_dtype(parameters: dict[str, Any]) -> np.dtype | None:
    """Return the parameters' common dtype; None for a model without any."""
    first: tuple[str, np.dtype] | None = None
    for name, parameter in parameters.items():
        if first is None:
            first = (name, np.dtype(parameter.dtype))
        elif np.dtype(parameter.dtype) != first[1]:
            raise TypeError(
                f"model: expected parameters of one dtype, got {first[1]} in {first[0]} and "
                f"{parameter.dtype} in {name}; "
                "build all layers with the same dtype="
            )
    return first[1] if first else None
