"""The choice of a transport: agreed by all ranks, with the reason for the log.

``auto`` takes shared memory for CPU ranks that are all on one node and can map each other's memory, two levels for
those of several nodes of which one has several ranks, else MPI. What it takes for GPUs is told in ``choose_gpu``;
those that are staged get below it what CPU ranks would. A transport that was asked for by name and cannot work is an
error on all ranks that says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..device import CPU, Device
from ..errors import CommunicationError, on_all_ranks
from .base import Communicator
from .choose_gpu import GPU_TRANSPORTS, MAKERS, Maker, choose_for_gpus
from .flags import unordered
from .mpi import MpiCommunicator
from .shared_memory import Log, SharedMemoryCommunicator
from .tuned import Sizes, told
from .two_level import TwoLevelCommunicator

TRANSPORTS = ("auto", "shared_memory", "two_level", "mpi", *GPU_TRANSPORTS, "mpi_device", "threads")


def choose(
    requested: str,
    mpi: MpiCommunicator,
    device: Device,
    node: int,
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
        node, num_nodes: this rank's node, and the number of nodes.
        log: writes a level and a line, once a node.
        ranks_per_device: most ranks that share a GPU.
        tuned: by transport, the sizes that take the place of its constants.

    Raises:
        CommunicationError: on all ranks, when the requested transport cannot work here.
    """
    if requested == "mpi_device":
        return mpi, "as asked for"
    if device != CPU and requested in ("auto", *GPU_TRANSPORTS):

        def stage(_: Communicator, device: Device) -> Communicator:
            return MAKERS["staged"](
                _for_host_arrays("auto", mpi, node, num_nodes, log, tuned or {})[0], device
            )

        sizes = (tuned or {}).get("cuda_ipc", {})
        makers: dict[str, Maker] = {**MAKERS, "staged": stage}
        makers["cuda_ipc"] = partial(MAKERS["cuda_ipc"], **sizes)
        comm, reason = choose_for_gpus(requested, mpi, device, num_nodes, ranks_per_device, makers=makers)
        return comm, reason + told(sizes) if comm.transport == "cuda_ipc" else reason
    if requested in GPU_TRANSPORTS:
        raise on_all_ranks(
            CommunicationError(
                f"transport: expected auto, shared_memory, two_level or mpi on CPU ranks, got {requested}; use "
                'device="cuda", or leave it out'
            )
        )
    comm, reason = _for_host_arrays(requested, mpi, node, num_nodes, log, tuned or {})
    if device != CPU:
        comm = MAKERS["staged"](comm, device)
    return comm, reason


def _for_host_arrays(
    requested: str,
    mpi: MpiCommunicator,
    node: int,
    num_nodes: int,
    log: Log,
    tuned: Mapping[str, Sizes],
) -> tuple[Communicator, str]:
    mpi.use_sizes(**tuned.get("mpi", {}))
    mpi_sizes = told(tuned.get("mpi", {}))
    if requested == "mpi":
        return mpi, f"as asked for{mpi_sizes}"
    wanted = requested
    if requested == "auto":
        wanted = "shared_memory" if num_nodes == 1 else "two_level"
        if mpi.size == num_nodes > 1:
            return mpi, f"the ranks are on {num_nodes} nodes, one on each{mpi_sizes}"
    error: CommunicationError | None = None
    try:
        if wanted == "two_level":
            two_level = TwoLevelCommunicator(mpi.duplicate(), node, log=log)
            why = f"the ranks are on {num_nodes} nodes" if requested == "auto" else "as asked for"
            return two_level, f"{why}, memory by {two_level.way}"
        reason = f"the ranks are on {num_nodes} nodes" if num_nodes > 1 else unordered()
        if reason is None:
            sizes: dict[str, Any] = dict(tuned.get("shared_memory", {}))
            comm = SharedMemoryCommunicator(mpi.duplicate(), log=log, **sizes)
            why = "all ranks are on one node" if requested == "auto" else "as asked for"
            return comm, f"{why}, by {comm.way}{told(sizes)}"
    except CommunicationError as caught:
        error, reason = caught, str(caught)
    if requested == "auto":
        return mpi, f"not {wanted}: {reason}{mpi_sizes}"
    raise on_all_ranks(
        CommunicationError(
            f'transport: expected {wanted} to work, got: {reason}; use transport="auto" or "mpi"'
        )
    ) from error


def over_mpi(comm: Communicator) -> MpiCommunicator | None:
    """Return a new MPI communicator over a world's ranks; None for a world of one. **Collective.**"""
    if isinstance(comm, (SharedMemoryCommunicator, TwoLevelCommunicator)):
        return comm.mpi.duplicate()
    return comm.duplicate() if isinstance(comm, MpiCommunicator) else None
