"""What ``mpdp doctor`` says about transports: what links the GPUs of this node, and what ``auto`` would take.

Nothing is started and nothing is mapped, so this foresees; a job finds out, and says what it took in the first line of
its log. Read ``comm.choose`` and ``comm.choose_gpu`` for the rules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..comm.flags import unordered
from ..comm.nccl import load
from ..errors import MissingDependencyError

_MPS_ENABLED = 133  # cudaDevAttrMpsEnabled: contexts of this device go through MPS; since CUDA 12.2
_PIPES = "/tmp/nvidia-mps"  # where MPS is, unless CUDA_MPS_PIPE_DIRECTORY says so


def links(cupy: Any, count: int, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return what links this node's GPUs. **Local.**

    Args:
        cupy: the module.
        count: GPUs that this process sees.
        environ: where the directory of MPS is looked up.

    Returns:
        ``peer_access``: for each GPU a list by GPU, whether it can address the other's memory; ``mps``: whether
        processes share a GPU through CUDA's multi-process service; ``nccl``: its version or None.
    """
    runtime = cupy.cuda.runtime
    peers = [
        [one == other or bool(runtime.deviceCanAccessPeer(one, other)) for other in range(count)]
        for one in range(count)
    ]
    return {
        "peer_access": peers,
        "mps": bool(count) and _mps_runs(runtime, environ),
        "nccl": nccl_version(),
    }


def _mps_runs(runtime: Any, environ: Mapping[str, str]) -> bool:
    try:
        return bool(runtime.deviceGetAttribute(_MPS_ENABLED, 0))
    except runtime.CUDARuntimeError:  # an older driver does not know the question
        path = Path(environ.get("CUDA_MPS_PIPE_DIRECTORY", _PIPES), "nvidia-cuda-mps-control.pid")
        try:
            return Path("/proc", path.read_text().strip() or "none").exists()
        except OSError:
            return False


def nccl_version(find: Callable[[], Any] = load) -> str | None:
    """Return the version of the NCCL that CuPy has found, such as ``"2.28.9"``, or None. **Local.**"""
    try:
        number = int(find().get_version())
    except MissingDependencyError:
        return None
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def foresee(
    gpus: Mapping[str, Any],
    nodes: int,
    environ: Mapping[str, str],
    *,
    ranks: int | None = None,
    ranks_per_gpu: int = 1,
) -> dict[str, Any]:
    """Return what ``transport="auto"`` would take for CPU ranks and for GPU ranks (None without a GPU), and why.

    **Local.**

    Args:
        gpus: what :func:`links` returned, if there are GPUs.
        nodes: that the ranks are on.
        environ: where ``MPDP_TRANSPORT`` is looked up.
        ranks: of the job (default: more than nodes).
        ranks_per_gpu: most ranks of the job that share a GPU.
    """
    cpu = _for_cpu(nodes, nodes + 1 if ranks is None else ranks)
    gpu = _for_gpu(gpus, nodes, ranks_per_gpu, cpu["transport"]) if gpus.get("peer_access") else None
    said = environ.get("MPDP_TRANSPORT", "auto")
    if said != "auto":
        cpu = {"transport": said, "reason": "MPDP_TRANSPORT says so"}
        gpu = gpu and dict(cpu)
    return {"cpu": cpu, "gpu": gpu}


def _for_cpu(nodes: int, ranks: int) -> dict[str, str]:
    if 1 < nodes == ranks:
        return {"transport": "mpi", "reason": f"the ranks are on {nodes} nodes, one on each"}
    transport = "shared_memory" if nodes == 1 else "two_level"
    reason = unordered()
    if reason is not None:
        return {"transport": "mpi", "reason": f"not {transport}: {reason}"}
    return {
        "transport": transport,
        "reason": f"the ranks are on {nodes} nodes" if nodes > 1 else "all ranks are on one node",
    }


def _for_gpu(gpus: Mapping[str, Any], nodes: int, ranks_per_gpu: int, below: str) -> dict[str, str]:
    apart = missing_peers(gpus["peer_access"])
    if nodes > 1:
        why = f"the ranks are on {nodes} nodes"
    elif apart:
        why = "no peer access between GPUs " + ", ".join(f"{one} and {other}" for one, other in apart)
    else:
        return {"transport": "cuda_ipc", "reason": "all ranks are on one node, whose GPUs have peer access"}
    missing = f"{ranks_per_gpu} ranks share a GPU" if ranks_per_gpu > 1 else "it is not installed"
    if gpus["nccl"] is None or ranks_per_gpu > 1:
        return {"transport": f"staged({below})", "reason": f"not cuda_ipc: {why}; not nccl: {missing}"}
    return {"transport": "nccl", "reason": f"not cuda_ipc: {why}; staged where ranks share a GPU"}


def missing_peers(peer_access: list[list[bool]]) -> list[tuple[int, int]]:
    """Return the pairs of GPUs of which one cannot address the other's memory. **Local.**"""
    count = len(peer_access)
    return [
        (one, other)
        for one in range(count)
        for other in range(one + 1, count)
        if not (peer_access[one][other] and peer_access[other][one])
    ]


def lines(gpus: Mapping[str, Any], auto: Mapping[str, Any]) -> list[str]:
    """Return both as lines for people. **Local.**"""
    found = []
    if gpus.get("peer_access"):
        apart = missing_peers(gpus["peer_access"])
        pairs = ", ".join(f"{one} and {other}" for one, other in apart)
        count = len(gpus["peer_access"])
        peers = f"none between GPUs {pairs}" if apart else "one GPU" if count == 1 else "between all GPUs"
        found.append(
            f"peer access: {peers}; CUDA MPS: {'runs' if gpus['mps'] else 'does not run'}; "
            f"NCCL: {gpus['nccl'] or 'none'}"
        )
    for kind, choice in auto.items():
        if choice is not None:
            found.append(
                f'transport "auto" for {kind.upper()} ranks: {choice["transport"]} ({choice["reason"]})'
            )
    return found
