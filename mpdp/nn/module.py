"""Module: parameters, buffers and modules found by name among an object's attributes.

Names and their order are what ranks, optimizers and checkpoints agree on, so both come from one rule:
attributes in the order in which they were first assigned, lists and tuples by position, dicts by key.
This module knows nothing of layouts, arenas or ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from .. import autodiff, kernels
from ..autodiff import Buffer, Parameter, Tensor
from ..device import Device, as_device

_M = TypeVar("_M", bound="Module")
_NOTHING = object()


class Changes:
    """What was changed on the modules of one model since somebody has begun to watch: counters that only grow.

    Attributes:
        version: assignments of attributes other than ``training``.
        modes: assignments of ``training`` that changed it.
    """

    def __init__(self) -> None:
        self.version = self.modes = 0

    def anything(self) -> None:
        """Count a change of something else that decides what a module does."""
        self.version += 1


class Module:
    """Base of every model: assign parameters, buffers and modules to attributes, and define ``forward``.

    **Local.** Found are ``Parameter``, ``Buffer`` and ``Module``, and lists, tuples and dicts of them, nested
    or not. A tensor or module reached twice (tied) keeps its first name and is listed once. There is no need
    to call ``super().__init__()``.

    Attributes:
        training: what ``train()`` and ``eval()`` set.
        path: the module's name in the model, as in ``"blocks.2"``; set by :meth:`bind_names`.
        draws_samples: whether ``forward`` draws random numbers keyed by the position of a sample, which
            ``autodiff.current_samples().start`` gives it. Ranks find positions out for such models alone.
        communicates: whether ``forward`` in training, and its backward, exchange numbers with other replicas through
            ``peers``. Every rank then runs the model, also on a share without samples. Fixed when it is wrapped.
        peers: the other replicas, as in ``ops.batch_norm``; set by who wraps the model, None where there are none.
        averaged_buffers: names of own buffers that replicas change differently in training; they are averaged over
            ranks after each update, weighted by samples.
        recompute: whether ``forward`` runs again in backward in place of keeping its arrays; see :func:`checkpoint`.
        static: whether ``forward`` does the same operations at each call with inputs of one shape.

    Example:
        >>> from mpdp import nn
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         self.hidden = nn.Linear(4, 8)
        ...         self.heads = {"a": nn.Linear(8, 2, bias=False)}
        ...     def forward(self, x):
        ...         return self.heads["a"](self.hidden(x).relu())
        >>> [name for name, _ in Net().named_parameters()]
        ['hidden.weight', 'hidden.bias', 'heads.a.weight']
        >>> Net()
        Net(
          (hidden): Linear(inputs=4, outputs=8, bias=True)
          (heads.a): Linear(inputs=8, outputs=2, bias=False)
        )
    """

    training: bool = True
    path: str | None = None
    static: bool = False
    draws_samples: bool = False
    communicates: bool = False
    peers: Any = None
    averaged_buffers: tuple[str, ...] = ()
    recompute: bool = False

    def __setattr__(self, name: str, value: Any) -> None:
        changes = self.__dict__.get("_changes")
        if changes is not None and getattr(self, name, _NOTHING) is not value:
            if name == "training":
                changes.modes += 1
            else:
                changes.version += 1
        object.__setattr__(self, name, value)

    def report_to(self, changes: Changes) -> None:
        """Count in ``changes`` from now on what is assigned to this module's attributes.

        Contents of a list or dict that an attribute holds are not looked at: assign a new one.
        """
        self.__dict__["_changes"] = changes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.recompute:
            return autodiff.checkpoint(self.forward)(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output; a subclass defines it."""
        raise NotImplementedError(
            f"{type(self).__name__}: expected a method forward, found none; define forward(self, x)"
        )

    def extra_repr(self) -> str:
        """Return what ``repr`` shows between the brackets beside the modules; a subclass may define it.

        **Local.** Here: own parameters and buffers with their shapes.
        """
        own = [(name, value) for name, value in vars(self).items() if isinstance(value, Parameter | Buffer)]
        return ", ".join(f"{name}={tuple(value.shape)}" for name, value in own)

    def __repr__(self) -> str:
        try:
            return _shown(self)
        except (TypeError, ValueError):  # of a model that has no names; who uses it is told
            return object.__repr__(self)

    # -- names ---------------------------------------------------------------------------------------------

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """Yield (name, module), this one first under the name ``""``."""
        for name, member in _members(self):
            if isinstance(member, Module):
                yield name, member

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield (name, parameter) in registration order, frozen ones included."""
        for name, member in _members(self):
            if isinstance(member, Parameter):
                yield name, member

    def named_buffers(self) -> Iterator[tuple[str, Buffer]]:
        """Yield (name, buffer) in registration order."""
        for name, member in _members(self):
            if isinstance(member, Buffer):
                yield name, member

    def parameters(self) -> Iterator[Parameter]:
        """Yield the parameters in registration order."""
        for _, parameter in self.named_parameters():
            yield parameter

    def bind_names(self: _M) -> _M:
        """Give every module its ``path`` and every parameter and buffer its ``name`` in this model."""
        for name, member in _members(self):
            if isinstance(member, Module):
                member.path = name
            else:
                member.name = name
        return self

    # -- modes ---------------------------------------------------------------------------------------------

    def train(self: _M, mode: bool = True) -> _M:
        """Set ``training`` here and in all modules below."""
        for _, module in self.named_modules():
            if module.training is not mode:
                module.training = bool(mode)
        return self

    def eval(self: _M) -> _M:
        """Set ``training`` to False here and in all modules below."""
        return self.train(False)

    def freeze(self: _M) -> _M:
        """Stop gradients of all parameters here and below.

        On a model that an arena holds this only marks the arena: its owner decides what follows.
        """
        for parameter in self.parameters():
            parameter.requires_grad = False
        return self

    def thaw(self: _M) -> _M:
        """Undo :meth:`freeze`."""
        for parameter in self.parameters():
            parameter.requires_grad = True
        return self

    def to(self: _M, device: Device | str) -> _M:
        """Move all parameters and buffers to a device, in place.

        A trainer and ``DataParallel`` do it themselves. Tied members stay tied; gradients are dropped.
        """
        device = as_device(device)
        for _, tensor in self._tensors():
            if tensor.device != device:
                tensor.data = kernels.move(tensor.data, device)
                tensor.grad = None
        return self

    # -- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return name -> NumPy copy of every parameter and buffer, tied ones once."""
        return {name: np.array(tensor.numpy()) for name, tensor in self._tensors()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy values by name into the parameters and buffers, in place; all of them or none.

        Args:
            state: name -> array or tensor, exactly the names of :meth:`state_dict`, each of the same shape
                and dtype.

        Raises:
            ValueError: lists every missing, unexpected and mismatched name; nothing was loaded.
        """
        own = dict(self._tensors())
        values = {name: value.data if isinstance(value, Tensor) else value for name, value in state.items()}
        missing = [name for name in own if name not in values]
        unexpected = [name for name in values if name not in own]
        mismatched = [
            f"{name} (expected {tensor.dtype} {tensor.shape}, got {_kind(values[name])})"
            for name, tensor in own.items()
            if name in values and _kind(values[name]) != f"{tensor.dtype} {tensor.shape}"
        ]
        problems = [
            f"{len(names)} {what}: {', '.join(names)}"
            for what, names in (("missing", missing), ("unexpected", unexpected), ("mismatched", mismatched))
            if names
        ]
        if problems:
            raise ValueError(
                f"state: expected the {len(own)} names of {type(self).__name__}, got {'; '.join(problems)}; "
                "nothing was loaded, check that the state is of this model"
            )
        for name, tensor in own.items():
            value = values[name]
            value = value if hasattr(value, "device") else np.asarray(value)
            tensor.data[...] = kernels.move(value, tensor.device)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.named_parameters()
        yield from self.named_buffers()


def checkpoint(module: _M) -> _M:
    """Make a module keep its inputs alone, and run forward again when backward comes to it; returns the module.

    **Local.** Names of parameters stay, and gradients have the same bits. It saves the memory of what the module's
    operations keep, for one more forward pass of it. ``forward`` must return one tensor, and get every tensor that it
    uses as an argument (parameters and buffers are its own).

    Args:
        module: most often a block of a deep model.

    Raises:
        TypeError: not a module; ``autodiff.checkpoint`` takes functions.

    Example:
        >>> from mpdp import nn
        >>> model = nn.Sequential(nn.checkpoint(nn.Sequential(nn.Linear(2, 8), nn.Tanh())), nn.Linear(8, 1))
        >>> [name for name, _ in model.named_parameters()][:2]
        ['0.0.weight', '0.0.bias']
    """
    if not isinstance(module, Module):
        raise TypeError(
            f"module: expected an nn.Module, got {type(module).__name__}; use autodiff.checkpoint for a function"
        )
    module.recompute = True
    return module


def _shown(root: Module) -> str:
    """Return a module as text, with the modules below it by name, each under the module that holds it."""
    entries: list[tuple[int, str, Module]] = []
    holders: list[str] = []  # names of the modules that hold the next one
    for name, module in root.named_modules():
        while len(holders) > 1 and not name.startswith(f"{holders[-1]}."):
            holders.pop()
        short = name[len(holders[-1]) + 1 :] if len(holders) > 1 else name
        entries.append((len(holders), short, module))
        holders.append(name)
    lines = []
    for i, (depth, name, module) in enumerate(entries):
        following = entries[i + 1][0] if i + 1 < len(entries) else 0
        head = f"{'  ' * depth}{f'({name}): ' if name else ''}{type(module).__name__}("
        extra = module.extra_repr()
        if following > depth:
            lines += [head, f"{'  ' * (depth + 1)}{extra}"] if extra else [head]
        else:
            lines.append(f"{head}{extra})")
            lines += [f"{'  ' * level})" for level in range(depth - 1, following - 1, -1)]
    return "\n".join(lines)


def _kind(value: Any) -> str:
    """Describe an array's dtype and shape, as in ``float32 (3, 4)``."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype} {tuple(value.shape)}"
    return type(value).__name__


def _members(root: Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, member) of all modules, parameters and buffers, each once, depth first.

    Raises:
        TypeError: a set holds some of them, whose order would differ between ranks.
        ValueError: two members with one name.
    """
    seen: set[int] = set()
    names: set[str] = set()
    # A stack of iterators in place of recursion: a deep model must not meet the recursion limit.
    stack: list[Iterator[tuple[str, Any]]] = [iter([("", root)])]
    while stack:
        item = next(stack[-1], None)
        if item is None:
            stack.pop()
            continue
        name, value = item
        if isinstance(value, Parameter | Buffer | Module | list | tuple | dict):
            if id(value) in seen:  # tied, or a container that holds itself
                continue
            seen.add(id(value))
        if isinstance(value, Parameter | Buffer | Module):
            if name in names:
                raise ValueError(
                    f"module: expected one member a name, got two named {name!r}; rename one of them"
                )
            names.add(name)
            yield name, value
            if isinstance(value, Module):
                stack.append(_children(name, list(vars(value).items())))
        elif isinstance(value, list | tuple):
            stack.append(_children(name, list(enumerate(value))))
        elif isinstance(value, dict):
            stack.append(_children(name, list(value.items())))
        elif isinstance(value, set | frozenset) and any(
            isinstance(member, Parameter | Buffer | Module) for member in value
        ):
            raise TypeError(
                f"{name}: expected modules or parameters in a list, tuple or dict, got a "
                f"{type(value).__name__}; the order of a set differs between ranks"
            )


def _children(name: str, items: list[tuple[Any, Any]]) -> Iterator[tuple[str, Any]]:
    prefix = f"{name}." if name else ""
    return ((f"{prefix}{key}", value) for key, value in items)
