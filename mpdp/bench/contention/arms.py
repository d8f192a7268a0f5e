"""Which arms a run has: those of the verdict, those of the default, and all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .targets import CALLS, Launch
from .workers import Arm, row_name

KS = (1, 2, 4, 8)
MOCK = Launch("spin", microseconds=2.5)
NULL = Launch("kernel")
OWN = Launch("kernel", own_context=True)
CUPY = Launch("cupy")
GRAPHS = {"default": (100, 1000), "full": (1, 10, 100, 1000)}
SOME_CALLS = ("event query", "event record", "allocate async", "copy pageable")  # of the default


def own_name(launch: Launch) -> str:
    """Return what is launched, in words. **Local.**"""
    if launch.kind in ("spin", "sleep"):
        locked = ", one lock" if launch.locked else ""
        return f"mock of {launch.microseconds:g} us{locked}"
    if launch.kind == "graph":
        return f"graph of {launch.nodes}"
    if launch.kind in CALLS:
        return CALLS[launch.kind]
    if launch.kind == "cupy":
        return "CuPy kernel"
    length = f"kernel of {launch.microseconds:g} us" if launch.microseconds else "null kernel"
    ways = {
        ", own contexts": launch.own_context,
        ", default stream": not launch.own_stream,
        ", full queue": not launch.every,
    }
    return length + "".join(way for way, taken in ways.items() if taken)


def verdict_rows(gpus: int, mps: bool, launch: Launch | None = None) -> tuple[str, str]:
    """Return the rows of the verdict's arms, of threads and of processes. **Local.**

    Processes that share a GPU take turns of milliseconds without MPS, so there it is those under MPS where it runs.
    """
    own = own_name(launch or (NULL if gpus else MOCK))
    processes = "processes MPS" if mps and gpus == 1 else "processes"
    return row_name("pthreads", "c", own), row_name(processes, "c", own)


def plan(extent: str, gpus: int, ks: Sequence[int], mps: bool, loops: bool, cupy: bool) -> list[Arm]:
    """Return the arms of a run.

    **Local.**

    Args:
        extent: ``"quick"``, ``"default"`` or ``"full"``.
        gpus: 0 for the form without a GPU, whose launches are mocks.
        ks: numbers of workers.
        mps: MPS runs.
        loops: there is a C compiler.
        cupy: CuPy is installed.
    """
    rows: list[tuple[str, str, Launch]] = []
    processes = ["processes", *(["processes MPS"] if mps else [])]
    launch = NULL if gpus else MOCK
    if loops:
        rows += [("pthreads", "c", launch), *((each, "c", launch) for each in processes)]
        rows += [("threads", "c", launch), ("threads", "python", launch)]
    if gpus and loops:
        rows.append(("pthreads", "c", OWN))
    if cupy and gpus:
        rows += [("threads", "python", CUPY), *((each, "python", CUPY) for each in processes)]
    if extent != "quick" and loops:
        rows += [("pthreads mutex", "c", launch), ("threads", "held", launch), ("mutex", "python", launch)]
        rows += [("submitter", "python", launch), ("one", "python", launch), ("processes", "python", launch)]
    if extent != "quick" and gpus and loops:
        for nodes in GRAPHS[extent]:
            graph = Launch("graph", nodes=nodes)
            rows += [("pthreads", "c", graph), *((each, "c", graph) for each in processes)]
    few: list[tuple[str, str, Launch]] = []  # by one worker and by the most
    if extent != "quick" and gpus and loops:
        few += [("pthreads", "c", Launch(kind)) for kind in (SOME_CALLS if extent == "default" else CALLS)]
    if extent == "full" and gpus and loops:
        longer = Launch("kernel", microseconds=20.0)
        rows += [("pthreads", "c", longer), *((each, "c", longer) for each in processes)]
        rows += [("threads", "python", Launch("graph", nodes=nodes)) for nodes in GRAPHS[extent]]
        rows.append(("pthreads", "c", Launch("kernel", own_stream=False)))
        few += [("pthreads", "c", replace(longer, every=0)), ("processes", "c", replace(longer, every=0))]
        few += [("processes", "c", Launch(kind)) for kind in CALLS]
    if extent == "full" and cupy and gpus:
        rows += [("mutex", "python", CUPY), ("submitter", "python", CUPY), ("one", "python", CUPY)]
    if extent == "full" and not gpus and loops:
        locked = Launch("spin", microseconds=2.5, locked=True)
        rows += [("pthreads", "c", locked), ("threads", "python", locked), ("processes", "c", locked)]
    arms = [Arm(workers, loop, each, k, own_name(each)) for workers, loop, each in rows for k in ks]
    ends = sorted({ks[0], ks[-1]})
    return arms + [Arm(workers, loop, each, k, own_name(each)) for workers, loop, each in few for k in ends]
