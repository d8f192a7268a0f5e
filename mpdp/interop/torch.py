"""PyTorch modules as replicas: every parameter's ``.grad`` is a view of a gradient arena, by DLPack.

Owns the views, and the hooks that tell the reducer which gradient is final; knows nothing of mpdp's tapes, modules or
optimizers. PyTorch is imported when a :class:`DataParallel` is made, and is no dependency. Read ``parallel.reducer``
next.
"""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import Any

from ..comm.agreement import compare, together
from ..errors import MissingDependencyError
from ..parallel import GradientArena, Reducer
from ..parallel.replica_check import check_replicas
from ..world import World, init

_DTYPES = ("float16", "float32", "float64")


class DataParallel:
    """Hold one replica of a PyTorch module and reduce its gradients over the world's data axis.

    **Collective** to construct: modules are compared, then rank 0's parameters and buffers are broadcast.

    Gradients are those of a loss *sum*; :meth:`finish` divides by the number of samples over all ranks, so shares may
    differ in size and n ranks compute what one computes. A chunk is reduced as soon as backward has written it, from
    PyTorch's own hooks. Data, optimizer and files stay PyTorch's and yours.

    Args:
        module: a ``torch.nn.Module`` on the world's device, whose trainable parameters share one dtype: float16,
            float32 or float64. Its ``requires_grad`` flags must not change later.
        world: the ranks (default: ``mpdp.init()``).
        chunk_bytes: size of a middle chunk in bytes (default: the transport's).

    Attributes:
        module, world: as given.
        arena: the gradients, a view a trainable parameter; ``reducer``: what sums them.

    Raises:
        MissingDependencyError: PyTorch is not installed.
        TypeError, ValueError: on all ranks: no module, nothing to train, several dtypes, or another device.
        DisagreementError: on all ranks, when their modules differ.

    A parameter that no rank uses has a gradient of zeros, not None. Buffers (running statistics) stay each rank's own
    until :meth:`broadcast`. Deviation from PyTorch's ``DistributedDataParallel``: that averages the ranks' means.

    Example, which needs PyTorch::

        parallel = DataParallel(torch.nn.Linear(8, 2))
        optimizer = torch.optim.SGD(parallel.module.parameters(), lr=0.1)
        loss = F.cross_entropy(parallel.module(x), y, reduction="sum")
        parallel.backward(loss, count=len(y))
        parallel.finish()
        optimizer.step()
    """

    def __init__(self, module: Any, world: World | None = None, chunk_bytes: int | None = None) -> None:
        self.world = world if world is not None else init()
        self.comm = self.world.axis("data")
        self._torch = together(self.comm, library)
        self.module = module
        trainable, dtype = together(self.comm, partial(self._look_at, module))
        state = [*module.named_parameters(), *module.named_buffers()]
        compare(self.comm, "module", {name: f"{t.dtype}{list(t.shape)}" for name, t in state})
        self.arena = GradientArena(
            {name: tuple(p.shape) for name, p in trainable.items()}, dtype, self.world.device, self.comm
        )
        self.reducer = Reducer(self.arena, self.comm, chunk_bytes)
        self._views: dict[str, tuple[Any, Any]] = {}
        for name, parameter in trainable.items():
            view = self._torch.from_dlpack(self.arena[name])
            parameter.grad = view
            self._views[name] = parameter, view
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name, view))
        self._count = 0.0
        self._begun = False  # some backward pass of this update has run
        self._final = False  # the one that runs is the last of its update
        self.broadcast()

    def _look_at(self, module: Any) -> tuple[dict[str, Any], str]:
        """Return the trainable parameters of a module by name, and their dtype."""
        torch = self._torch
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trainable:
            raise ValueError(
                "module: expected a parameter that requires a gradient, got none; there is nothing to train"
            )
        where = self.world.device
        wanted = torch.device(*(("cpu",) if where.kind == "cpu" else ("cuda", where.ordinal)))
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.device != wanted:
                raise ValueError(
                    f'module: expected it on {wanted}, got {name} on {tensor.device}; call module.to("{wanted}")'
                )
        dtypes = {name: str(p.dtype).removeprefix("torch.") for name, p in trainable.items()}
        dtype = next(iter(dtypes.values()))
        for name, other in dtypes.items():
            if other != dtype or other not in _DTYPES:
                raise ValueError(
                    f"module: expected parameters of one dtype of {', '.join(_DTYPES)}, got {name} of {other} beside "
                    f"{dtype}; use torch.autocast for 16-bit products"
                )
        return trainable, dtype

    def backward(self, loss: Any, count: float, final: bool = True) -> None:
        """Add the gradients of this rank's samples to the arena.

        **Collective** where ``final``: chunks are reduced while it runs. Call it once a micro-batch, with
        ``final=False`` for all but the last of an update.

        Args:
            loss: scalar tensor, the *sum* over this rank's samples; None where this rank has none.
            count: how many samples (or tokens) it is the sum over.
            final: whether the update has no further micro-batch.

        Raises:
            ValueError: no scalar, or a ``.grad`` that is no longer the view.
        """
        if loss is not None and (loss.numel() != 1 or not loss.requires_grad):
            raise ValueError(
                f"loss: expected a scalar that depends on the parameters, got shape {tuple(loss.shape)}; "
                'sum over samples, as by reduction="sum"'
            )
        if not (count >= 0 and math.isfinite(count)):
            raise ValueError(f"count: expected a number of samples of 0 or more, got {count}")
        with self._on_stream():
            if not self._begun:
                self.arena.array.fill(0)
                for parameter, view in self._views.values():
                    if parameter.grad is None:  # by zero_grad(), which is not needed
                        parameter.grad = view
            for name, (parameter, view) in self._views.items():
                if parameter.grad is not view:
                    raise _moved(name)
            self._begun, self._final = True, final
            self._count += count
            if loss is not None:
                # In the calling thread also on a GPU: a communicator belongs to the thread that made it.
                try:
                    with self._torch.autograd.set_multithreading_enabled(False):
                        loss.backward()
                except BaseException:
                    self.reducer.abandon()
                    self._count, self._begun = 0.0, False
                    raise

    def _accumulated(self, name: str, view: Any, parameter: Any) -> None:
        """Take note that a backward pass has added all it has to one gradient; PyTorch calls it."""
        if parameter.grad is not view:
            raise _moved(name)
        if self._final and self._begun:
            self.reducer.ready(name)

    def finish(self) -> float:
        """Return once every gradient is the mean over the samples of all ranks; returns their number.

        **Collective.** Ends an update: clipping and the optimizer come after it, on every rank alike.

        Raises:
            ValueError: on all ranks: no rank had a sample.
            DisagreementError: on all ranks, when one skipped a step or is in another call.
        """
        count, self._count = self._count, 0.0
        self._begun = self._final = False
        with self._on_stream():
            total = self.reducer.finish(count)
        assert total is not None
        return total

    def broadcast(self, *, root: int = 0) -> None:
        """Give every rank the parameters and buffers of ``root``. **Collective.**"""
        with self._torch.no_grad(), self._on_stream():
            for _, tensor in self._state():
                content = tensor.detach().reshape(-1).view(self._torch.uint8).clone()
                if content.numel():
                    self.comm.broadcast(self._array(content), root=root)
                    tensor.copy_(content.view(tensor.dtype).view(tensor.shape))

    def check_replicas(self) -> None:
        """Check that parameters hold the same bits on every rank. **Collective.**

        Raises:
            DivergenceError: on all ranks, naming the rank and the parameter.
        """
        with self._on_stream():
            arrays = {
                f"parameter {name}": self._array(p.detach().reshape(-1).view(self._torch.uint8))
                for name, p in self.module.named_parameters()
                if p.numel()
            }
            check_replicas(self.comm, self.arena.layout, {}, arrays, self.reducer.step)

    def _state(self) -> list[tuple[str, Any]]:
        return [*self.module.named_parameters(), *self.module.named_buffers()]

    def _array(self, tensor: Any) -> Any:
        """Return the array over a tensor's memory."""
        return tensor.numpy() if self.world.device.kind == "cpu" else self.world.device.xp.from_dlpack(tensor)

    def _on_stream(self) -> Any:
        """Make CuPy launch where PyTorch does."""
        if self.world.device.kind == "cpu":
            return contextlib.nullcontext()
        cuda = self.world.device.xp.cuda
        pointer = self._torch.cuda.current_stream(self.world.device.ordinal).cuda_stream
        return cuda.ExternalStream(pointer) if pointer else cuda.Stream.null


def _moved(name: str) -> ValueError:
    return ValueError(
        f"module: expected the gradient of {name} to stay the view it was given, got another tensor; do not assign "
        ".grad, and call zero_grad() only between finish() and the next backward()"
    )


def library() -> Any:
    """Return the module ``torch``. **Local.**

    Raises:
        MissingDependencyError: it is not installed; the message holds the install line.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(
            "PyTorch: expected it for mpdp.interop.torch, found none; install it with: pip install torch"
        ) from error
    return torch
