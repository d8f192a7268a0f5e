"""The choice of a transport: agreed by all ranks, with the reason for the log.

``auto`` takes shared memory for CPU ranks that are all on one node and can map each other's memory, else MPI; what it
takes for GPUs is told in ``choose_gpu``. A transport that was asked for by name and cannot work is an error on all
ranks that says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..device import CPU, Device
from ..errors import CommunicationError, on_all_ranks
from .base import Communicator
from .choose_gpu import GPU_TRANSPORTS, choose_for_gpus
from .flags import unordered
from .mpi import MpiCommunicator
from .shared_memory import Log, SharedMemoryCommunicator
from .tuned import Sizes, told

TRANSPORTS = ("auto", "shared_memory", "mpi", *GPU_TRANSPORTS, "mpi_device")


def choose(
    requested: str,
    mpi: MpiCommunicator,
    device: Device,
    num_nodes: int,
    log: Log,
    ranks_per_device: int = 1,
    tuned: Mapping[str, Sizes] | None = None,
) -> tuple[Communicator, str]:
    """Return the communicator of a world, and why it is this one.

    **Collective.** Every rank requests the same.

    Args:
        requested: one of ``TRANSPORTS``.
        mpi: the ranks; the communicator belongs to the result from then on.
        device: of this rank.
        num_nodes: nodes the ranks are on.
        log: writes a level and a line, once for the job.
        ranks_per_device: most ranks that share a GPU.
        tuned: by transport, the sizes that take the place of its constants.

    Raises:
        CommunicationError: on all ranks, when the requested transport cannot work here.
    """
    if requested == "mpi_device":
        return mpi, "as asked for"
    if device != CPU and requested in ("auto", *GPU_TRANSPORTS):
        return choose_for_gpus(requested, mpi, device, num_nodes, ranks_per_device)
    if requested in GPU_TRANSPORTS:
        raise on_all_ranks(
            CommunicationError(
                f"transport: expected auto, shared_memory or mpi on CPU ranks, got {requested}; use "
                'device="cuda", or leave it out'
            )
        )
    comm, reason = _for_host_arrays(requested, mpi, num_nodes, log, tuned or {})
    if device != CPU:
        from .staged import StagedCommunicator

        comm = StagedCommunicator(comm, device)
    return comm, reason


def _for_host_arrays(
    requested: str,
    mpi: MpiCommunicator,
    num_nodes: int,
    log: Log,
    tuned: Mapping[str, Sizes],
) -> tuple[Communicator, str]:
    mpi.use_sizes(**tuned.get("mpi", {}))
    mpi_sizes = told(tuned.get("mpi", {}))
    if requested == "mpi":
        return mpi, f"as asked for{mpi_sizes}"
    reason = f"the ranks are on {num_nodes} nodes" if num_nodes > 1 else unordered()
    error: CommunicationError | None = None
    if reason is None:
        try:
            sizes: dict[str, Any] = dict(tuned.get("shared_memory", {}))
            comm = SharedMemoryCommunicator(mpi.duplicate(), log=log, **sizes)
            why = "all ranks are on one node" if requested == "auto" else "as asked for"
            return comm, f"{why}, by {comm.way}{told(sizes)}"
        except CommunicationError as caught:
            error, reason = caught, str(caught)
    if requested == "auto":
        return mpi, f"not shared_memory: {reason}{mpi_sizes}"
    raise on_all_ranks(
        CommunicationError(
            f'transport: expected shared_memory to work, got: {reason}; use transport="auto" or "mpi"'
        )
    ) from error


def over_mpi(comm: Communicator) -> MpiCommunicator | None:
    """Return a new MPI communicator over a world's ranks; None for a world of one. **Collective.**"""
    if isinstance(comm, SharedMemoryCommunicator):
        return comm.mpi.duplicate()
    return comm.duplicate() if isinstance(comm, MpiCommunicator) else None
