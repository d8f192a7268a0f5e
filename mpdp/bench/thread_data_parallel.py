"""Data parallelism in threads as ``torch.nn.DataParallel`` means it: a baseline to measure against, not a part of mpdp.

Every forward pass cuts the batch along one axis, copies the model to each device, runs one thread a replica, and
gathers the outputs on one device; backward sums the gradients of all replicas into the original, which one optimizer
updates. So all parameters go out and all gradients come in at the first device in each step.

Source: PyTorch, ``torch/nn/parallel/data_parallel.py`` and its scatter, replicate, parallel_apply and gather.
Deviations: backward is a call here (:meth:`DataParallel.backward`), since a graph of mpdp runs in one thread;
inputs get no gradient; and replicas on one device share the original's parameters instead of copies.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

from .. import kernels, nn
from ..autodiff import Buffer, Parameter, Tensor
from ..autodiff.tape import Tape
from ..device import Device, as_device
from ..device_memory import DeviceInfo
from ..device_memory import devices as visible

BALANCE = 0.75  # of the largest device's memory, and multiprocessors; below that a device is warned about


class DataParallel:
    """Run a module on several devices in threads.

    **Local.**

    Args:
        module: the original; its parameters and buffers lie on the first device.
        devices: default: all GPUs that this process sees; with none, or one, the module is called as it is. A device
            may be named several times, so NumPy replicas are ``["cpu"] * k``.
        output_device: where outputs are gathered; default: the first.
        dim: the axis of the batch in inputs and outputs.

    Raises:
        ValueError: a negative axis.

    Example:
        >>> import numpy as np
        >>> from mpdp import nn
        >>> parallel = DataParallel(nn.Linear(2, 3), ["cpu", "cpu"])
        >>> output = parallel(np.ones((5, 2), np.float32))
        >>> parallel.backward(output.sum())
        >>> parallel.module.weight.grad[0]
        array([5., 5.], dtype=float32)
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[Device | str] | None = None,
        output_device: Device | str | None = None,
        dim: int = 0,
    ) -> None:
        if dim < 0:
            raise ValueError(f"dim: expected an axis of 0 or more, got {dim}; count from the front")
        self.module, self.dim = module, dim
        infos = visible() if devices is None or any(as_device(d).kind == "cuda" for d in devices) else []
        self.devices = [info.device for info in infos] if devices is None else [as_device(d) for d in devices]
        self.output_device = (
            as_device(output_device)
            if output_device is not None
            else (self.devices[0] if self.devices else None)
        )
        used = [info for info in infos if info.device in self.devices]
        check_balance(used, [_multiprocessors(info.device) for info in used])
        self._passes: list[tuple[Tensor, list[tuple[Tensor, Device]], list[nn.Module]]] = []

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Return the module's output for the whole batch; scalars become a vector of one a replica. **Local.**

        Raises:
            ValueError: a parameter or buffer lies elsewhere than on the first device.
        """
        self._passes = []
        if not self.devices:
            return self.module(*inputs, **keywords)
        self._check()
        shares = scatter((inputs, keywords), len(self.devices), self.dim)
        devices = self.devices[: len(shares)]
        shares = [_moved(share, device) for share, device in zip(shares, devices)]
        if len(shares) == 1:
            return self.module(*shares[0][0], **shares[0][1])
        replicas = [self.module, *(replicate(self.module, device) for device in devices[1:])]

        def call(i: int) -> Any:
            return replicas[i](*shares[i][0], **shares[i][1])

        return self._gather(_parallel(call, devices), devices, replicas)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss of the gathered outputs to the original's parameters.

        **Local.** The gradients of the replicas are summed in the order of devices, not divided: a loss that is the
        mean over the gathered batch has the right scale.
        """
        loss.backward()
        passes, self._passes = self._passes, []
        if not passes:
            return
        parts: list[list[tuple[Tensor, Any]]] = [[] for _ in passes[0][1]]
        for whole, outputs, _ in passes:
            if whole.grad is None:
                continue
            start = 0
            for i, (output, device) in enumerate(outputs):
                length = output.shape[self.dim] if output.shape else 1
                index = (slice(None),) * (self.dim if output.shape else 0) + (slice(start, start + length),)
                g = kernels.move(whole.grad[index], device)
                parts[i].append((output, g if output.shape else g[0]))
                start += length

        def run(i: int) -> None:
            own = [(output, g) for output, g in parts[i] if output.requires_grad]
            if len(own) == 1:
                Tape(own[0][0]).backward(own[0][1])
            elif own:  # they may share a part of the graph, and a tape runs once
                total = (own[0][0] * own[0][1]).sum()
                for output, g in own[1:]:
                    total = total + (output * g).sum()
                Tape(total).backward(1.0)

        replicas = passes[0][2]
        _parallel(run, [device for _, device in passes[0][1]])
        originals = list(self.module.parameters())
        for replica in replicas[1:]:
            for original, twin in zip(originals, replica.parameters()):
                if twin.grad is not None:
                    g = kernels.move(twin.grad, original.device)
                    with kernels.for_device(original.device).active():
                        original.grad = g if original.grad is None else original.grad + g

    def _check(self) -> None:
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            if tensor.device != self.devices[0]:
                raise ValueError(
                    f"module: expected all parameters and buffers on {self.devices[0]}, the first device, got {name} "
                    f"on {tensor.device}; call module.to({str(self.devices[0])!r})"
                )

    def _gather(self, outputs: list[Any], devices: Sequence[Device], replicas: list[nn.Module]) -> Any:
        """Return outputs of one structure as one, on the output device; tensors of replicas become leaves."""
        first = outputs[0]
        if isinstance(first, dict):
            return {
                key: self._gather([output[key] for output in outputs], devices, replicas) for key in first
            }
        if isinstance(first, list | tuple):
            return type(first)(self._gather(list(parts), devices, replicas) for parts in zip(*outputs))
        if not isinstance(first, Tensor):
            return first
        assert self.output_device is not None
        moved = [kernels.move(output.data, self.output_device) for output in outputs]
        k = kernels.for_device(self.output_device)
        with k.active():
            if not first.shape:
                moved = [part.reshape(1) for part in moved]
            joined = k.xp.concatenate(moved, axis=self.dim if first.shape else 0)
        whole = Tensor(joined, requires_grad=any(output.requires_grad for output in outputs))
        self._passes.append((whole, list(zip(outputs, devices)), replicas))
        return whole


def scatter(inputs: Any, count: int, dim: int) -> list[Any]:
    """Cut arrays and tensors into at most ``count`` chunks along an axis, as ``torch.chunk`` does.

    **Local.** Tuples, lists and dicts are gone through; anything else is shared by all. Fewer chunks than asked for
    come out where the batch is too small: all but the last have equal length.

    Example:
        >>> import numpy as np
        >>> [len(chunk) for chunk in scatter(np.arange(5), 3, 0)]
        [2, 2, 1]
    """
    chunks = min((len(_chunks(array, count, dim)) for array in _arrays(inputs)), default=1)
    return [_part(inputs, i, count, dim) for i in range(chunks)]


def _arrays(inputs: Any) -> list[Any]:
    if isinstance(inputs, dict):
        return [array for value in inputs.values() for array in _arrays(value)]
    if isinstance(inputs, list | tuple):
        return [array for value in inputs for array in _arrays(value)]
    return [inputs] if _is_array(inputs) else []


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        hasattr(value, "shape") and hasattr(value, "dtype") and value.ndim > 0
    )


def _chunks(array: Any, count: int, dim: int) -> list[slice]:
    length = array.shape[dim]
    each = max(1, -(-length // count))
    return [slice(start, start + each) for start in range(0, length, each)] or [slice(0, 0)]


def _part(inputs: Any, i: int, count: int, dim: int) -> Any:
    if isinstance(inputs, dict):
        return {key: _part(value, i, count, dim) for key, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return type(inputs)(_part(value, i, count, dim) for value in inputs)
    if not _is_array(inputs):
        return inputs
    array = inputs.data if isinstance(inputs, Tensor) else inputs
    part = array[(slice(None),) * dim + (_chunks(array, count, dim)[i],)]
    return Tensor(part) if isinstance(inputs, Tensor) else part


def _moved(inputs: Any, device: Device) -> Any:
    if isinstance(inputs, dict):
        return {key: _moved(value, device) for key, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return type(inputs)(_moved(value, device) for value in inputs)
    if isinstance(inputs, Tensor):
        return Tensor(kernels.move(inputs.data, device))
    return kernels.move(inputs, device) if _is_array(inputs) else inputs


def replicate(module: nn.Module, device: Device) -> nn.Module:
    """Return a copy of a module on a device.

    **Local.** Parameters on the same device share the original's arrays; buffers are copies, so what a replica writes
    into them is lost.
    """
    memo: dict[int, Any] = {}
    for _, parameter in module.named_parameters():
        twin = Parameter(kernels.move(parameter.data, device), name=parameter.name)
        twin.requires_grad = parameter.requires_grad
        memo[id(parameter)] = twin
    for _, buffer in module.named_buffers():
        memo[id(buffer)] = Buffer(kernels.move(buffer.data, device).copy(), name=buffer.name)
    return copy.deepcopy(module, memo)


def _parallel(call: Callable[[int], Any], devices: Sequence[Device]) -> list[Any]:
    """Return ``call(i)`` for each device, each in a thread; raise the first error, which names the replica."""
    results: list[Any] = [None] * len(devices)
    errors: list[BaseException | None] = [None] * len(devices)

    def work(i: int) -> None:
        try:
            kernels.hold(-1 - i)
            devices[i].use()
            results[i] = call(i)
            if devices[i].kind == "cuda":
                devices[i].xp.cuda.get_current_stream().synchronize()
        except BaseException as error:
            error.add_note(f"in replica {i} on {devices[i]}")
            errors[i] = error

    threads = [
        threading.Thread(target=copy_context().run, args=(work, i), daemon=True) for i in range(len(devices))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if error is not None:
            raise error
    return results


def check_balance(infos: Sequence[DeviceInfo], processors: Sequence[int] = ()) -> None:
    """Warn of devices much smaller than the largest: each gets an equal share of the batch.

    **Local.**

    Args:
        infos: of the devices.
        processors: how many multiprocessors each has; none given: not looked at.
    """
    sizes = {"memory": ([info.total for info in infos], "bytes")}
    if processors:
        sizes["multiprocessors"] = list(processors), "in number"
    for what, (found, unit) in sizes.items():
        largest = max(found, default=0)
        for info, size in zip(infos, found):
            if size < BALANCE * largest:
                warnings.warn(
                    f"{info.device}: expected {what} of at least {BALANCE:.0%} of the largest device's {largest} "
                    f"{unit}, got {size}; leave it out of devices",
                    stacklevel=3,
                )


def _multiprocessors(device: Device) -> int:
    return int(device.xp.cuda.runtime.getDeviceProperties(device.ordinal)["multiProcessorCount"])
