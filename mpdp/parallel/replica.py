"""Replica: the model copy that one rank holds, on the arenas of one layout.

It owns memory and names: which parameter lies where, whose optimizer state belongs to it, and what happens when
parameters are frozen or thawed. When gradients are computed and reduced is the business of ``data_parallel``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .. import kernels
from ..autodiff import Buffer, Parameter
from ..comm.agreement import compare, together
from ..comm.base import Communicator
from ..device import Device
from ..errors import DisagreementError
from ..nn import Module
from ..optim import Optimizer, WeightAverage
from .arena import Arena, GradientArena
from .averaging import refuse_averaged
from .layout import Layout
from .precision import Precision, reduced_dtype
from .reducer import Reducer
from .replica_check import check_replicas


class Binding:
    """What bound parameters share: the update in progress, and what was changed, or may have been, behind our back."""

    def __init__(self) -> None:
        self.update = 1
        self.dirty = False
        self.stale = False


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

    Attributes:
        parameters: name to parameter in registration order; a tied one stands once.
        buffers: name to buffer.
        layout: the index space of this generation.
        arena: the gradients over it. ``weights``: the flat weights. ``copies``: the flat working copies, or None.
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
    ) -> None:
        self.device = device
        self.comm = comm
        self.optimizer: Optimizer | None = None
        self.average: WeightAverage | None = None
        self._chunk_bytes = chunk_bytes
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
        }

    def _build(self, generation: int) -> None:
        """Lay the parameters out and bind them to fresh arenas."""
        shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        frozen = [name for name, p in self.parameters.items() if not p.requires_grad]
        self.layout = Layout(shapes, frozen, generation)
        self._weights = Arena(self.layout, self.dtype, self.device, self.comm)
        self._copies: Arena | None = None
        if self.precision.copies is not None:
            self._copies = Arena(self.layout, self.precision.copies, self.device, self.comm)
        self.arena = GradientArena.over(self.layout, self.reduce_dtype, self.device, self.comm)
        self.reducer = Reducer(self.arena, self.comm, self._chunk_bytes)
        self.binding = Binding()
        self.index = {entry.name: i for i, entry in enumerate(self.layout.trainable)}
        self._name_of: dict[Any, str] = {}
        self._known = set(self.parameters.values())
        for buffer in self.buffers.values():
            buffer.data = kernels.move(buffer.data, self.device)
        for name, parameter in self.parameters.items():
            gradient = self.arena[name] if parameter.requires_grad else None
            copy = None if self._copies is None else self._copies[name]
            parameter.bind(self._weights[name], gradient, self.binding, copy)
            if parameter.requires_grad:
                self._name_of[parameter] = name
        self.refresh()

    @property
    def weights(self) -> Any:
        """The flat weights over ``layout``."""
        return self._weights.array

    @property
    def copies(self) -> Any:
        """The flat working copies over ``layout``, or None."""
        return None if self._copies is None else self._copies.array

    def refresh(self) -> None:
        """Round the weights to the working copies again, after something else than the optimizer wrote them."""
        if self._copies is not None:
            kernels.for_device(self.device).store(self.weights, self._copies.array)
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
        self.comm.broadcast(self.weights, root=root)
        if self.average is not None and self.average.started:
            self.comm.broadcast(self.average.array, root=root)
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
        old_layout = self.layout
        old_average = None if self.average is None or not self.average.started else self.average.array
        for name, flag in flags.items():
            self.parameters[name].requires_grad = flag
        self._build(old_layout.generation + 1)
        if self.average is not None:
            self.keep_average(self.average)
            if old_average is not None:
                self.load_average({name: old_layout.view(old_average, name) for name in self.parameters})
        if self.optimizer is not None:
            self._move_optimizer(self.optimizer, old_layout)

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
        optimizer.bind(self.layout, self.weights, kernels.for_device(self.device), self.copies)
        self.optimizer = optimizer

    def keep_average(self, average: WeightAverage) -> None:
        """Keep a moving average of the weights from the next update on. **Local.**"""
        average.bind(self.weights, kernels.for_device(self.device))
        self.average = average

    def load_average(self, values: Mapping[str, Any]) -> None:
        """Take up the average of parameters: name to array on the device. **Local.**"""
        if self.average is not None:
            views = {name: self.layout.view(self.average.array, name) for name in self.parameters}
            self.average.load(values, views)

    def start_average(self) -> None:
        """Let the average begin, where there is one, before an update. **Local.**"""
        refuse_averaged(self, "step")
        if self.average is not None:
            self.average.start()

    def move_average(self, when: Any = None) -> None:
        """Move the average, where there is one, towards the updated weights; see ``WeightAverage``. **Local.**"""
        if self.average is not None:
            self.average.update(when=when)

    def _move_optimizer(self, optimizer: Optimizer, old_layout: Layout) -> None:
        """Bind the optimizer to the new layout, with the state of the parameters that are trained in both."""
        old = optimizer.state_arrays()
        counts = {entry.name: int(count) for entry, count in zip(old_layout.trainable, old["updates"])}
        optimizer.unbind()
        optimizer.bind(self.layout, self.weights, kernels.for_device(self.device), self.copies)
        new = optimizer.state_arrays()
        kept = [entry.name for entry in self.layout.trainable if entry.name in counts]
        for slot in optimizer.slots:
            for name in kept:
                self.layout.view(new[slot], name)[...] = old_layout.view(old[slot], name)
        updates = np.array([counts.get(e.name, 0) for e in self.layout.trainable], dtype=np.int64)
        optimizer.load_state_arrays({**new, "updates": updates})

    def check(self, step: int, beside: Mapping[str, Any]) -> None:
        """Check that every rank holds the same weights, moments, counts and buffers, bit by bit. **Collective.**

        Args:
            step: finished updates.
            beside: name to array of what else must be equal.
        """
        flats: dict[str, Any] = {"weight": self.weights}
        if self._copies is not None:
            if self.binding.stale:
                self.refresh()  # a local fact must not change what is compared
            flats["working copy"] = self._copies.array
        arrays: dict[str, Any] = {f"buffer {name}": b.data for name, b in self.buffers.items()}
        arrays |= beside
        if self.average is not None and self.average.started:
            flats["average"] = self.average.array
        if self.optimizer is not None:
            flats |= self.optimizer.state
            arrays["update counts"] = self.optimizer.updates
        check_replicas(self.comm, self.layout, flats, arrays, step)


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
