"""Nodes: which ranks share a host, or are declared to.

A node is what MPI says can share memory. ``MPDP_NODES=k`` declares that the ranks are on k nodes instead, in contiguous
groups that differ by at most one rank, so that what happens between nodes can be tried on one host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import DisagreementError, LaunchError, on_all_ranks
from .mpi import MpiCommunicator

VARIABLE = "MPDP_NODES"


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        local_rank, local_size: among the ranks of its node.
        node, num_nodes: index of its node, in the order of lowest ranks, and the number of nodes.
        on_host: ranks on its host, which share its cores; ``local_size`` unless nodes are declared.
    """

    local_rank: int
    local_size: int
    node: int
    num_nodes: int
    on_host: int


def place(mpi: MpiCommunicator, declared: str | None) -> Place:
    """Return where this rank is.

    **Collective.**

    Args:
        mpi: all ranks.
        declared: the value of ``MPDP_NODES``, or None.

    Raises:
        ValueError: on all ranks, when it is no number of nodes.
        DisagreementError: on all ranks, when it differs between ranks.
        LaunchError: on all ranks, when ranks of different hosts would be one node.
    """
    number = _number(mpi, declared)
    host = mpi.split()
    members = mpi.split(mpi.rank * number // mpi.size) if number else host
    if number:
        inside = members.split()
        apart = np.array([inside.size < members.size], dtype=np.int64)
        inside.close()
        mpi.all_reduce(apart, op="max", lane="urgent")
        if apart[0]:
            raise on_all_ranks(
                LaunchError(
                    f"{VARIABLE}: expected groups of ranks that are each on one host, got {number} groups of "
                    f"{mpi.size} ranks with one that is not; unset it"
                )
            )
    leads = int(members.rank == 0)
    total, node = np.array([leads]), np.array([mpi.exclusive_sum(leads)])
    mpi.all_reduce(total, lane="urgent")
    members.broadcast(node, lane="urgent")
    found = Place(members.rank, members.size, int(node[0]), int(total[0]), host.size)
    for comm in {id(comm): comm for comm in (members, host)}.values():
        comm.close()
    return found


def _number(mpi: MpiCommunicator, declared: str | None) -> int:
    """Return the declared number of nodes, 0 for none, or raise on all ranks."""
    number = 0
    if declared is not None:
        ok = declared.isascii() and declared.isdigit() and 1 <= int(declared) <= mpi.size
        number = int(declared) if ok else -1
    extremes = np.array([number, -number])
    mpi.all_reduce(extremes, op="max", lane="urgent")
    if extremes[0] != -extremes[1]:
        raise on_all_ranks(
            DisagreementError(
                f"{VARIABLE}: expected the same value on all ranks, got {declared!r} on rank {mpi.rank} and another "
                "elsewhere; set it for the whole job, or unset it"
            )
        )
    if number < 0:
        raise on_all_ranks(
            ValueError(
                f"{VARIABLE}: expected a whole number in 1..{mpi.size}, the number of ranks, got {declared!r}; unset it"
            )
        )
    return number
