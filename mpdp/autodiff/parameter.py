"""Parameter and Buffer: the tensors that a model owns, and how a parameter is bound to an arena.

Who owns the arena (``parallel``) is not known here; a binding is any object with the attributes below.
"""

from __future__ import annotations

from typing import Any, Protocol

from .. import kernels
from ..device import device_of, same_device
from .recording import uses_copies
from .tensor import Array, Tensor


class Arriving(Protocol):
    """New weights that are under way from other ranks."""

    def need(self, parameter: Any) -> None:
        """Wait until a parameter can be read."""


class Binding(Protocol):
    """What a bound parameter needs of the arena that holds it.

    Attributes:
        update: number of the update in progress; a gradient contribution is the first of its update, and so
            assigns, when the parameter's last one was written under another number.
        dirty: set when ``requires_grad`` of a parameter changes, or another binding takes it over; the owner of
            the arena looks at it.
        stale: set when ``.data`` of a parameter with a working copy is handed out or assigned: the copy may no longer
            be what the weights round to.
        arriving: set while weights are under way; whoever reads a parameter asks for it first.
    """

    update: int
    dirty: bool
    stale: bool

    @property
    def arriving(self) -> Arriving | None:
        """See above."""


class Parameter(Tensor):
    """A leaf that training changes; modules find it among their attributes. **Local.**

    Args:
        data: as for :class:`Tensor`; a floating array.
        name: set by ``Module.bind_names``.
    """

    __slots__ = ("_copy", "_shown")

    _copy: Array | None  # the weights in 16 bits, for forward and backward
    _shown: Array | None  # what ``.data`` gives where other ranks hold the master

    def __init__(self, data: Any, name: str | None = None) -> None:
        self._copy = self._shown = None
        super().__init__(data, requires_grad=True, name=name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._copy = self._shown = None
        super().__setstate__(state)

    @property
    def data(self) -> Array:
        """The array itself, the float32 master where there is a working copy. As for :class:`Tensor`.

        Where ranks hold slices of the master, what all of them have of it; for reading alone.
        """
        data = self._whole()
        if self._shown is not None:
            return self._shown
        if self._copy is not None and self._binding is not None:
            self._binding.stale = True  # whoever asks may write
        return data

    @data.setter
    def data(self, value: Any) -> None:
        if self._shown is not None:
            raise ValueError(
                f'data: expected a parameter whose master is here, got {self._title()} under placement="sharded" and '
                'a 16-bit precision, where ranks hold slices; assign it before it is wrapped, or use "replicated"'
            )
        self._whole()
        if self._copy is not None and self._binding is not None:
            self._binding.stale = True
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def _read(self, master: bool) -> Array:
        if master and self._data is self._copy and self._copy is not None:
            raise ValueError(
                f"parameter: expected one with at most one axis where an operation reads float32 under placement="
                f'"sharded" and a 16-bit precision, got {self._title()} of shape {self.shape}, whose master lies in '
                'slices; use placement="replicated"'
            )
        if self._binding is not None and self._binding.arriving is not None:
            self._binding.arriving.need(self)
        return self._data if master or self._copy is None or not uses_copies() else self._copy

    def _whole(self) -> Array:
        if self._binding is not None and self._binding.arriving is not None:
            self._binding.arriving.need(self)
        return self._data

    def _arrays(self) -> list[Array]:
        return [self._data] if self._copy is None else [self._data, self._copy]

    def _takes(self, dtype: Any) -> bool:
        if self._shown is not None and self._grad is not None and dtype == self._grad.dtype:
            return True
        return bool(dtype == self._data.dtype or (self._copy is not None and dtype == self._copy.dtype))

    def bind(
        self, data_view: Array, grad_view: Array | None, binding: Binding, copy_view: Array | None = None
    ) -> None:
        """Move the parameter onto views of an arena, keeping its values, also to another device. **Local.**

        From then on ``.data`` and ``.grad`` are these views and never others. The first contribution of
        each ``binding.update`` to the gradient assigns, later ones add; the gradient view is never zeroed.

        Args:
            data_view: array of the parameter's shape; the values are copied into it.
            grad_view: array of the same shape; None for a parameter that is not trained.
            binding: see :class:`Binding`.
            copy_view: the working copy, of the same shape in 16 bits, which the caller keeps equal to the rounded
                weights; operations read it inside of ``working_copies``. None for none.

        Raises:
            ValueError: a view of another shape.
            DeviceMismatchError: views on different devices.
        """
        for what, view in (("data_view", data_view), ("grad_view", grad_view), ("copy_view", copy_view)):
            if view is not None and view.shape != self.shape:
                raise ValueError(
                    f"{what}: expected shape {self.shape} of {self._title()}, got {view.shape}; "
                    "check the layout"
                )
        if grad_view is not None:
            same_device("bind", data_view, grad_view)
        if self._binding is not None:
            self._binding.dirty = True
        data_view[...] = kernels.move(self._whole(), device_of(data_view))
        self._data = data_view
        self._copy = copy_view
        self._shown = None
        self._grad = grad_view
        self._key = 0
        self._binding = binding
        self._written = -1

    def show(self, data_view: Array | None) -> None:
        """Let a bound parameter keep no master of its own: ``.data`` only shows what there is of it.

        **Local.** Whoever has bound it keeps the masters elsewhere.

        Args:
            data_view: the master as all ranks have it, for operations that read float32; None where ranks have the
                working copy alone.
        """
        self._data = self._copy if data_view is None else data_view
        self._key = 0
        self._shown = self._data[...]
        if hasattr(self._shown, "setflags"):
            self._shown.setflags(write=False)

    def release(self, values: Array) -> None:
        """Take ``values`` as the data, bound to nothing. **Local.**"""
        self._data, self._copy, self._shown, self._binding, self._grad = values, None, None, None, None
        self._key = 0


class Buffer(Tensor):
    """A tensor that belongs to a model's state but is never differentiated, as a running mean. **Local.**"""

    __slots__ = ()

    def __init__(self, data: Any, name: str | None = None) -> None:
        super().__init__(data, name=name)

    @property
    def requires_grad(self) -> bool:
        """Always False."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value:
            raise ValueError("requires_grad: expected False for a Buffer, got True; use a Parameter")
