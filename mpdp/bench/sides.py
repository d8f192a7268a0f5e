"""The sides of a comparison of training steps: our own, and other systems' processes.

A side prepares once, then runs a block of steps whenever it is told to, and does nothing in between. Each block starts
behind a barrier of the side's own ranks, and the device has finished before each reading of the clock.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .. import __version__, kernels
from ..comm.agreement import together
from ..device import Device
from ..training import Trainer
from ..world import World
from .peer_process import PeerProcess, find_python
from .silence import WithoutCollectives
from .workloads import batch_of, build

WARM_UP = 12  # steps
WARM_UP_SECONDS = 6.0  # fewer steps where they would take longer: the same number on all ranks


@dataclass(frozen=True)
class Setting:
    """What every side of a comparison does.

    Attributes:
        workload: one of ``bench.WORKLOADS``.
        batch: samples of a rank.
        precision: one of ``bench.PRECISIONS``.
        graph: whether our step is captured: True, False or ``"auto"``.
        clip_norm: of our step; None does not clip.
        peers_clip: whether the peers clip as well.
        global_stats: whether our batch norms take the statistics of all ranks.
        plans: ``"suggested"`` or ``"timed"``, of our products' libraries; see :class:`mpdp.Trainer`.
        placement: of our optimizer; see :class:`mpdp.Trainer`.
    """

    workload: str
    batch: int
    precision: str
    graph: str | bool = "auto"
    clip_norm: float | None = 1.0
    peers_clip: bool = False
    global_stats: bool = False
    plans: str = "suggested"
    placement: str = "replicated"


def setting(workload: str, device: str, **options: Any) -> Setting:
    """Return a setting with the workload's own batch where none is given. **Local.**

    Example:
        >>> setting("chargpt", "cpu", precision="float32").batch
        4
    """
    batch = options.pop("batch", None) or batch_of(workload, device)
    return Setting(workload, batch, **options)


class Side(Protocol):
    """One system that runs the workload. Its calls are **collective**."""

    name: str
    version: str
    peak_bytes: int

    def prepare(self) -> None:
        """Build the model, and warm up."""

    def block(self, warm_up: int, steps: int) -> float:
        """Return this rank's seconds a step of ``steps`` steps, behind ``warm_up`` that do not count."""

    def kernels(self, steps: int) -> dict[str, float] | None:
        """Return the GPU's seconds a step in each kernel, by name; None where that cannot be known."""


class OwnSide:
    """The step of :class:`mpdp.Trainer`.

    Args:
        world: the ranks.
        setting: what to run.
        silent: leave the collectives out of the steps of :meth:`block`.

    Attributes:
        trainer: once prepared.
        peak_bytes: most bytes of arrays at once since :meth:`prepare` began: on a GPU those of CuPy's allocations,
            whichever pool they come from, and of the communicator's; on the CPU the growth of the process's largest
            resident size.
    """

    version = __version__

    def __init__(self, world: World, setting: Setting, *, silent: bool = False) -> None:
        self.name = "mpdp without collectives" if silent else "mpdp"
        self.peak_bytes = 0
        self.trainer: Any = None
        self._world, self._setting, self._silent = world, setting, silent
        self._comm = world.axis("data")

    def prepare(self) -> None:
        """Build the model, and warm up. **Collective.**"""
        setting, device = self._setting, self._world.device
        before = resident_bytes()
        peak = peak_of(device)
        with peak or nullcontext():
            workload = build(
                setting.workload,
                self._world.rank,
                setting.batch,
                device.kind,
                setting.global_stats,
            )
            self.items, self.unit = workload.items, workload.unit
            x, y = (kernels.move(array, device) for array in workload.batch)
            self._batch = x, y
            self.trainer = Trainer(
                workload.model,
                workload.loss,
                workload.optimizer,
                world=self._world,
                precision=setting.precision,
                clip_norm=setting.clip_norm,
                graph=setting.graph,
                plans=setting.plans,
                placement=setting.placement,
            )
            self._first_step()
            once = largest(self._comm, self.block(0, 1))
            with self._kind_of_step():
                self._steps(max(1, min(WARM_UP, int(WARM_UP_SECONDS / once))))
            finish(device)
        if peak is None:
            self.peak_bytes = resident_bytes() - before
        else:
            self.peak_bytes = peak.most + self._comm.device_bytes

    def _first_step(self) -> None:
        """Do the first step, which is eager everywhere. **Collective.**"""
        self.trainer.step(self._batch)

    def block(self, warm_up: int, steps: int) -> float:
        """Return the seconds a step. **Collective.**"""
        if self._silent:
            self._comm.barrier()
        with self._kind_of_step():
            self._steps(warm_up)
            if not self._silent:
                self._comm.barrier()
            finish(self._world.device)
            start = time.perf_counter()
            self._steps(steps)
            finish(self._world.device)
            return (time.perf_counter() - start) / steps

    def kernels(self, steps: int) -> dict[str, float] | None:
        """Return the GPU's seconds a step by kernel; None on the CPU. **Collective.**"""
        if self._world.device.kind == "cpu":
            return None
        from .cupti import KernelTimes

        self._steps(1)
        finish(self._world.device)
        with KernelTimes() as times:
            self._steps(steps)
            finish(self._world.device)
        return {name: seconds / steps for name, seconds in times.seconds.items()}

    def _kind_of_step(self) -> AbstractContextManager[None]:
        return WithoutCollectives(self._comm) if self._silent else nullcontext()

    def _steps(self, count: int) -> None:
        step, batch = self.trainer.step, self._batch
        for _ in range(count):
            step(batch)


class PeerSide:
    """Another system's step, in a process of its own.

    Args:
        world: the ranks.
        name: one of ``bench.PEERS``.
        setting: what to run.
        python: the interpreter that has it.
    """

    def __init__(self, world: World, name: str, setting: Setting, python: str) -> None:
        self.name = name
        self.version = ""
        self.peak_bytes = 0
        module, _, mode = name.partition("-")
        words: list[Any] = ["--workload", setting.workload, "--batch", setting.batch]
        words += ["--precision", setting.precision]
        if module == "torch":
            words += ["--mode", mode or "eager"]
        if setting.peers_clip and setting.clip_norm is not None:
            words += ["--clip-norm", setting.clip_norm]
        self._world, self._module = world, module
        self.process = PeerProcess(
            world,
            python,
            f"{module}_train.py",
            words,
            module=module,
            flag="--peer-python",
            leave_out=f"leave {name} out of --peers",
        )

    def start(self) -> None:
        """Start the processes; several sides import their modules at the same time. **Collective.**"""
        self.process.start()

    def prepare(self) -> None:
        """Build the model, compile or capture, and warm up. **Collective.**"""
        if not self.version:
            self.meet()
        self.peak_bytes = int(together(self._world.comm, lambda: self.process.ask("prepare"))["peak_bytes"])

    def meet(self) -> None:
        """Wait for the processes. **Collective.**"""
        self.process.meet()
        self.version = f"{self._module}-{self.process.version}"

    def block(self, warm_up: int, steps: int) -> float:
        """Return the seconds a step. **Collective.**"""
        return float(self._ask("block", warm_up=warm_up, steps=steps)["seconds"])

    def kernels(self, steps: int) -> dict[str, float] | None:
        """Return the GPU's seconds a step by kernel, of torch's profiler. **Collective.**"""
        if self._module != "torch" or self._world.device.kind == "cpu":
            return None
        return dict(self._ask("profile", steps=steps)["kernels"])

    def losses(self, count: int, path: str) -> list[float]:
        """Write weights and data to a file, and return the losses of ``count`` updates from there. **Collective.**"""
        if not self.version:
            self.meet()
        return [float(loss) for loss in self._ask("losses", count=count, path=path)["losses"]]

    def close(self) -> None:
        """End the process. **Local.**"""
        self.process.close()

    def _ask(self, call: str, **arguments: Any) -> dict[str, Any]:
        return together(self._world.comm, lambda: self.process.ask(call, **arguments))


def start_peers(world: World, what: Setting, names: Sequence[str], peer_python: str | None) -> list[PeerSide]:
    """Start the processes of some peers, so that they import their modules at the same time. **Collective.**

    Args:
        world: the ranks.
        what: to run.
        names: some of ``bench.PEERS``.
        peer_python: an interpreter that has them (default: this one).

    Raises:
        ValueError: a CUDA graph on the CPU.
        MissingDependencyError, CommunicationError: a peer does not work here.
    """
    sides = []
    for name in names:
        if world.device.kind == "cpu" and "graph" in name:
            raise ValueError(f"peers: expected no {name} on the CPU, got it; CUDA graphs need --device cuda")
        module = name.partition("-")[0]
        python = find_python(world, module, peer_python, True, "--peer-python")
        sides.append(PeerSide(world, name, what, str(python)))
    try:
        for side in sides:
            side.start()
        for side in sides:
            side.meet()
    except BaseException:
        for side in sides:
            side.close()
        raise
    return sides


def largest(comm: Any, value: float) -> float:
    """Return the largest value of all ranks. **Collective.**"""
    numbers = np.array([value])
    comm.all_reduce(numbers, op="max", lane="urgent")
    return float(numbers[0])


def finish(device: Device) -> None:
    """Wait until the device has done what it was given. **Local.**"""
    if device.kind == "cuda":
        device.xp.cuda.runtime.deviceSynchronize()


def free_bytes(device: Device) -> int | None:
    """Return what is free of a GPU's memory, over all processes; None on the CPU. **Local.**"""
    if device.kind == "cpu":
        return None
    with device.xp.cuda.Device(device.ordinal):
        return int(device.xp.cuda.runtime.memGetInfo()[0])


def resident_bytes() -> int:
    """Return the most memory that this process has had so far. **Local.**"""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def peak_of(device: Device) -> Any:
    """Return a context that notes the ``most`` bytes of CuPy's live allocations; None on the CPU. **Local.**"""
    return None if device.kind == "cpu" else _peak_class(device.xp)()


def _peak_class(xp: Any) -> Callable[[], Any]:
    class Peak(xp.cuda.MemoryHook):
        name = "mpdp peak"

        def __init__(self) -> None:
            self.live = self.most = 0

        def malloc_postprocess(self, **words: Any) -> None:
            self.live += words["mem_size"]
            self.most = max(self.most, self.live)

        def free_postprocess(self, **words: Any) -> None:
            self.live -= words["mem_size"]

    return Peak
