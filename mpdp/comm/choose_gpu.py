"""The choice of a transport between GPUs: agreed by all ranks, with the reason for the log.

``auto`` takes ``cuda_ipc`` where all ranks are on one node and can map each other's GPU memory (peer access, or the
same GPU), else ``nccl`` where no two ranks share a GPU, else ``staged``. Whether memory can be mapped is found
out by mapping it. A transport that was asked for by name and cannot work is an error on all ranks that says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..device import Device
from ..errors import CommunicationError, MpdpError, on_all_ranks
from .base import Communicator

GPU_TRANSPORTS = ("cuda_ipc", "nccl", "staged")
Maker = Callable[..., Communicator]


def _cuda_ipc(host: Communicator, device: Device, **sizes: Any) -> Communicator:
    from .cuda_ipc import CudaIpcCommunicator

    return CudaIpcCommunicator(host, device, **sizes)


def _nccl(host: Communicator, device: Device) -> Communicator:
    from .nccl import NcclCommunicator

    return NcclCommunicator(host, device)


def _staged(host: Communicator, device: Device) -> Communicator:
    from .staged import StagedCommunicator

    return StagedCommunicator(host, device)


def _name_shared_gpus(host: Communicator, device: Device) -> None:
    from ..device_memory import identity
    from .nccl import refuse_shared_gpus

    refuse_shared_gpus(host, identity(device))


MAKERS: dict[str, Maker] = {"cuda_ipc": _cuda_ipc, "nccl": _nccl, "staged": _staged}
_REASONS = {
    "cuda_ipc": "all ranks are on one node and have each other's GPU memory mapped",
    "nccl": "no two ranks share a GPU",
    "staged": "GPU arrays travel through host memory",
}


def choose_for_gpus(
    requested: str,
    host: Communicator,
    device: Device,
    num_nodes: int,
    ranks_per_device: int,
    *,
    makers: dict[str, Maker] | None = None,
    name_shared: Callable[[Communicator, Device], Any] = _name_shared_gpus,
) -> tuple[Communicator, str]:
    """Return the communicator of a world of GPUs, and why it is this one.

    **Collective.** Every rank requests the same.

    Args:
        requested: ``"auto"`` or one of ``GPU_TRANSPORTS``.
        host: the ranks; the communicator belongs to the result from then on.
        device: the GPU of this rank.
        num_nodes: nodes that the ranks are on.
        ranks_per_device: most ranks that share a GPU.
        makers: how to make each transport.
        name_shared: raises an error that names the ranks which share a GPU.

    Raises:
        CommunicationError: on all ranks, when the requested transport cannot work here.
    """
    makers = MAKERS if makers is None else makers
    wanted = GPU_TRANSPORTS if requested == "auto" else (requested,)
    refusals: list[str] = []
    for transport in wanted:
        cause: MpdpError | None = None
        if transport == "cuda_ipc" and num_nodes > 1:
            why = f"the ranks are on {num_nodes} nodes, and memory is mapped inside one"
        else:
            try:
                if transport == "nccl" and ranks_per_device > 1:
                    name_shared(host, device)
                comm = makers[transport](host, device)
            except MpdpError as error:
                if not error.agreed and host.size > 1:
                    raise
                cause, why = error, str(error).removeprefix(f"{transport}: ")
            else:
                reason = _REASONS[transport] if requested == "auto" else "as asked for"
                return comm, "; ".join([reason, *refusals])
        if requested != "auto":
            raise on_all_ranks(
                CommunicationError(
                    f'transport: expected {transport} to work, got: {why}; use transport="auto", or "staged" '
                    "(through host memory)"
                )
            ) from cause
        refusals.append(f"not {transport}: {why}")
    raise AssertionError("staging always works")


def host_of(comm: Communicator) -> Communicator:
    """Return the communicator that carries the host arrays of one between GPUs; any other itself. **Local.**"""
    while comm.transport.partition("(")[0] in GPU_TRANSPORTS:
        comm = getattr(comm, "host", None) or comm.inner  # type: ignore[attr-defined]
    return comm
