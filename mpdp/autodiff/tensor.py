"""Tensor: an array and how it was computed.

A tensor knows its array, its node in the graph and, for leaves, where its gradient goes. What can be
computed with it lives in ``ops``, how gradients are computed in ``tape``, and what a model owns in
``parameter``.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import kernels
from ..device import Device, as_device, device_of, same_device
from ..kernels.precision import is_floating
from .recording import Node
from .tape import Tape

if TYPE_CHECKING:
    from .parameter import Binding

Array = Any  # a NumPy or CuPy array


class Tensor:
    """An array with, where needed, the graph that computed it. **Local.**

    Comparison and hash go by identity. Operations never change a tensor in place.

    Args:
        data: NumPy or CuPy array, or anything ``numpy.asarray`` takes; an array is not copied.
        requires_grad: whether backward computes :attr:`grad` for it (floats only).
        name: how errors and the tape's signature call it.

    Raises:
        TypeError: ``requires_grad`` for a dtype that is not a float.

    Example:
        >>> x = Tensor([[1.0, 2.0]], requires_grad=True)
        >>> (x * x).sum().backward()
        >>> x.grad
        array([[2., 4.]])
    """

    __slots__ = (
        "__weakref__",
        "_binding",
        "_data",
        "_grad",
        "_key",
        "_name",
        "_node",
        "_requires_grad",
        "_written",
    )
    __array_ufunc__ = None  # array + tensor asks the tensor, not NumPy

    _data: Array
    _grad: Array
    _node: Node | None
    _requires_grad: bool
    _binding: Binding | None
    _written: int
    _name: str | None
    _key: int  # of name, shape and dtype, for the tape's signature; 0 until it is asked for

    def __init__(self, data: Any, requires_grad: bool = False, name: str | None = None) -> None:
        self._data = _as_array(data)
        self._grad = None
        self._node = None
        self._binding = None
        self._written = -1
        self._requires_grad = False
        self._name = name
        self._key = 0
        if requires_grad:
            self.requires_grad = True

    # -- what it holds -------------------------------------------------------------------------------------

    @property
    def data(self) -> Array:
        """The array itself. Assigning replaces it; of a bound parameter, it copies into the view in place."""
        return self._data

    @data.setter
    def data(self, value: Any) -> None:
        value = _as_array(value)
        if self._binding is None:
            self._data = value
            self._key = 0
        else:
            self._data[...] = self._fitting("data", value)

    @property
    def grad(self) -> Array | None:
        """The gradient of a leaf: ``None`` before any, and for a bound parameter always the arena's view."""
        return self._grad

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None:
            value = self._fitting("grad", _as_array(value))
        if self._binding is None:
            self._grad = value
        elif self._grad is None:
            if value is not None:
                raise ValueError(
                    f"grad: expected None for the frozen {self._title()}, got an array; thaw it first"
                )
        elif value is None:
            self._grad.fill(0)
            self._written = -1
        else:
            self._grad[...] = value
            self._written = self._binding.update

    def _fitting(self, what: str, value: Array) -> Array:
        """Return ``value`` if it fits this tensor's array without broadcasting, loss or a move."""
        same_device(what, self._data, value)
        if value.shape != self._data.shape:
            raise ValueError(
                f"{what}: expected shape {self._data.shape} of {self._title()}, got {value.shape}; reshape it"
            )
        if value.dtype != self._data.dtype and not np.can_cast(value.dtype, self._data.dtype, "safe"):
            raise TypeError(
                f"{what}: expected {self._data.dtype} of {self._title()} or a dtype that casts to it safely, "
                f"got {value.dtype}; convert it with .astype(...)"
            )
        return value

    def _read(self, master: bool) -> Array:
        """Return the array that an operation reads."""
        return self._data

    def _whole(self) -> Array:
        """Return the array, once it can be read."""
        return self._data

    def _arrays(self) -> list[Array]:
        """Return the arrays whose memory the tensor keeps, without its gradient."""
        return [self._data]

    def _takes(self, dtype: Any) -> bool:
        """Return whether a backward rule may return a gradient of ``dtype`` for this leaf."""
        return bool(dtype == self._data.dtype)

    def _title(self) -> str:
        return repr(self.name) if self.name else type(self).__name__

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient flows to, or through, this tensor; assignable for leaves."""
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        value = bool(value)
        if value and not is_floating(self._data.dtype):
            raise TypeError(
                f"requires_grad: expected a floating dtype, got {self._data.dtype}; use .astype(...)"
            )
        if self._node is not None:
            raise ValueError(
                "requires_grad: expected a leaf, got the result of an operation; .detach() stops a gradient"
            )
        if self._binding is not None and value != self._requires_grad:
            self._binding.dirty = True
        self._requires_grad = value

    @property
    def name(self) -> str | None:
        """What errors and the tape's signature call it."""
        return self._name

    @name.setter
    def name(self, value: str | None) -> None:
        self._name = value
        self._key = 0

    def _describe(self) -> int:
        """Return, and remember, a positive number that is a function of name, dtype and shape alone."""
        text = f"{self._name or ''} {self.dtype} {self.shape}".encode()
        self._key = hash(int.from_bytes(text, "little"))  # an integer's hash does not depend on the process
        return self._key

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        return self._data.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the array."""
        return self._data.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._data.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._data.size

    @property
    def device(self) -> Device:
        """Where the array lives."""
        return device_of(self._data)

    # -- leaving the graph ---------------------------------------------------------------------------------

    def detach(self) -> Tensor:
        """Return a tensor on the same array that no gradient flows through."""
        return Tensor(self._whole(), name=self.name)

    def numpy(self) -> np.ndarray:
        """Return the array for reading with NumPy: the same memory on the CPU, a copy from a GPU (waits)."""
        return kernels.of(self._data).to_numpy(self._whole())

    def item(self) -> Any:
        """Return the only element as a Python number; waits for a GPU."""
        return self._whole().item()

    def to(self, device: Device | str) -> Tensor:
        """Return the tensor on ``device``, itself when it is there already; a gradient goes the way back."""
        return ops.to(self, as_device(device))

    def __float__(self) -> float:
        return float(self._whole().item())

    def __int__(self) -> int:
        return int(self._whole().item())

    def __bool__(self) -> bool:
        raise TypeError("tensor: expected an array or a number where a truth value is needed, got a Tensor; "
                        "compare float(tensor) or tensor.data")  # fmt: skip

    def __repr__(self) -> str:
        body = np.array2string(self.numpy(), separator=", ", threshold=20, precision=5)
        name = f", name={self.name!r}" if self.name else ""
        grad = ", requires_grad=True" if self._requires_grad else ""
        return f"{type(self).__name__}({body}, dtype={self.dtype}{name}{grad})"

    # -- backward ------------------------------------------------------------------------------------------

    def backward(self, seed: Any = None) -> None:
        """Add the gradient of sum(seed * self) to ``.grad`` of every leaf, and consume the graph. **Local.**

        Args:
            seed: number or array of this tensor's shape; 1 for a scalar when left out.

        Raises:
            TapeError: the graph was consumed by an earlier backward.
            ValueError: nothing here requires a gradient, or a seed is missing.
        """
        if not self._requires_grad:
            raise ValueError(
                "backward: expected a tensor computed from one that requires a gradient, got one that is "
                "not; check requires_grad of the parameters, and that no_grad is not in force"
            )
        if seed is None:
            if self.size != 1:
                raise ValueError(
                    f"backward: expected a seed for a tensor that is no scalar, got none for shape "
                    f"{self.shape}; pass an array of that shape, or sum first"
                )
            seed = 1.0
        Tape(self).backward(seed)

    # -- arithmetic ----------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Tensor:
        return ops.add(self, other)

    def __radd__(self, other: Any) -> Tensor:
        return ops.add(other, self)

    def __sub__(self, other: Any) -> Tensor:
        return ops.subtract(self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return ops.subtract(other, self)

    def __mul__(self, other: Any) -> Tensor:
        return ops.multiply(self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return ops.multiply(other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return ops.divide(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return ops.divide(other, self)

    def __pow__(self, other: Any) -> Tensor:
        return ops.power(self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return ops.power(other, self)

    def __matmul__(self, other: Any) -> Tensor:
        return ops.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return ops.matmul(other, self)

    def __neg__(self) -> Tensor:
        return ops.negative(self)

    def __abs__(self) -> Tensor:
        return ops.absolute(self)

    # -- shape ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Any:
        if self.ndim == 0:
            raise TypeError("tensor: expected one axis or more to iterate, got a scalar; use float(tensor)")
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Tensor:
        return ops.getitem(self, index)

    def reshape(self, *shape: Any) -> Tensor:
        """Return the elements in another shape; one length may be -1."""
        return ops.reshape(self, *shape)

    def transpose(self, *axes: Any) -> Tensor:
        """Return the axes in another order; reversed when none is given."""
        return ops.transpose(self, *axes)

    @property
    def T(self) -> Tensor:
        """The axes in reverse order."""
        return ops.transpose(self)

    def astype(self, dtype: Any) -> Tensor:
        """Return the elements as another dtype; the gradient is cast back."""
        return ops.astype(self, dtype)

    # -- reductions and functions --------------------------------------------------------------------------

    def sum(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """Return the sum over ``axis`` (an integer, a tuple, or all)."""
        return ops.sum(self, axis, keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """Return the mean over ``axis``; 0 where there is nothing to average."""
        return ops.mean(self, axis, keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """Return the maximum over ``axis``; the gradient is shared equally by equal maxima."""
        return ops.max(self, axis, keepdims)

    def exp(self) -> Tensor:
        """Return e to the power of each element."""
        return ops.exp(self)

    def log(self) -> Tensor:
        """Return the natural logarithm."""
        return ops.log(self)

    def sqrt(self) -> Tensor:
        """Return the square root."""
        return ops.sqrt(self)

    def tanh(self) -> Tensor:
        """Return the hyperbolic tangent."""
        return ops.tanh(self)

    def sigmoid(self) -> Tensor:
        """Return 1 / (1 + exp(-x))."""
        return ops.sigmoid(self)

    def relu(self) -> Tensor:
        """Return max(x, 0)."""
        return ops.relu(self)

    def gelu(self) -> Tensor:
        """Return the tanh form of GELU."""
        return ops.gelu(self)

    # -- copies --------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        twin = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        if self._node is not None:
            raise ValueError("copy: expected a leaf, got the result of an operation; copy .detach() instead")
        # Neither the gradient nor the arena travels: a copy is free until something binds it again.
        return {"data": self._whole(), "requires_grad": self._requires_grad, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Tensor.__init__(self, state["data"], name=state["name"])
        self._requires_grad = state["requires_grad"]


def make(data: Array, node: Node | None) -> Tensor:
    """Return the tensor of an operation's result; the constructor without its checks."""
    tensor = Tensor.__new__(Tensor)
    tensor._data = data
    tensor._grad = None
    tensor._node = node
    tensor._binding = None
    tensor._written = -1
    tensor._requires_grad = node is not None
    tensor._name = None
    tensor._key = 0
    return tensor


def unwrap(value: Any) -> Any:
    """Return the array of a tensor, and anything else as it is. **Local.**"""
    return value._whole() if isinstance(value, Tensor) else value


def _as_array(value: Any) -> Array:
    value = unwrap(value)
    if hasattr(value, "dtype") and not isinstance(value, np.generic):
        return value
    array = np.asarray(value)
    if array.dtype == object:
        raise TypeError(f"data: expected an array or numbers, got {type(value).__name__}; build an array")
    return array


# Methods above call operations, and operations return tensors: the one import that has to come last.
from . import ops  # noqa: E402
