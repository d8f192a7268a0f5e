"""The training step, as the same script for ranks that are threads and for ranks that are processes.

Started by ``mpdp run``, with or without ``--threads``, with the workload, the device, the samples a rank, and what
steps: ``eager`` or ``graph``, and a transport if not what ``init`` chooses; PyTorch's DDP: ``torch`` and a Python that
has it; or, in one process, ``data-parallel`` and a number of replicas. Rank 0 is told how many steps to do and answers
with the seconds of one.
"""

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

import mpdp
from mpdp import World, kernels, optim
from mpdp.bench.contention.channel import answer
from mpdp.bench.thread_data_parallel import DataParallel
from mpdp.bench.workloads import build

PATIENCE = 3600.0  # seconds that ranks wait while other jobs have their turn
WARM_UP = 12


def main(name: str, device: str, batch: int, how: str, more: str = "") -> None:
    """Answer until rank 0 is told None. **Collective.**"""
    transport = more if more and how in ("eager", "graph") else "auto"
    world = mpdp.init(device=device, transport=transport, timeout=PATIENCE)
    comm = world.axis("data")
    if how == "torch":
        run = _torch(world, name, batch, more)
    elif how == "data-parallel":
        run = _data_parallel(world, name, batch, int(more))
    else:
        run = _own(world, name, batch, how)

    def block(steps: int) -> float:
        comm.barrier()
        seconds = np.array([run(steps)])
        comm.all_reduce(seconds, op="max", lane="urgent")
        return float(seconds[0])

    block(WARM_UP)
    parent = answer() if world.rank == 0 else None
    peak = np.array([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0])
    if world.transport == "threads" or threading.current_thread() is not threading.main_thread():
        peak /= world.size  # each says what all have
    comm.all_reduce(peak, lane="urgent")
    if parent is not None:
        about = {"transport": world.transport, "ranks": world.size, "device": str(world.device)}
        parent.send({**about, "host_bytes": int(peak[0])})
    while True:
        steps = np.zeros(1, dtype=np.int64)
        if parent is not None:
            try:
                steps[0] = parent.recv() or 0
            except EOFError:
                steps[0] = 0
        comm.broadcast(steps, root=0, lane="urgent")
        if not steps[0]:
            return
        seconds = block(int(steps[0]))
        if parent is not None:
            parent.send(seconds)


def _own(world: World, name: str, batch: int, how: str) -> Callable[[int], float]:
    """Return what does so many of our own steps, and says the seconds of one. **Collective.**"""
    workload = build(name, world.rank, batch, world.device.kind)
    x, y = (kernels.move(array, world.device) for array in workload.batch)
    trainer = mpdp.Trainer(
        workload.model, workload.loss, workload.optimizer, world=world, graph=how == "graph"
    )

    def run(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            trainer.step((x, y))
        if world.device.kind == "cuda":
            world.device.xp.cuda.get_current_stream().synchronize()
            float(trainer.loss)
        return (time.perf_counter() - start) / steps

    return run


def _data_parallel(world: World, name: str, batch: int, replicas: int) -> Callable[[int], float]:
    """Return what does so many steps as ``torch.nn.DataParallel`` does them, SGD by hand. **Local.**"""
    workload = build(name, 0, batch, world.device.kind)
    workload.model.to(world.device)
    gpus = len(mpdp.devices()) if world.device.kind == "cuda" else 0
    devices = [f"cuda:{i % gpus}" for i in range(replicas)] if gpus else ["cpu"] * replicas
    parallel = DataParallel(workload.model, devices)
    x, y = (kernels.move(array, world.device) for array in workload.batch)
    rule = workload.optimizer
    assert isinstance(rule, optim.SGD)
    xp, parameters = world.device.xp, list(workload.model.parameters())
    speeds = [xp.zeros_like(parameter.data) for parameter in parameters]

    def run(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            loss = workload.loss(parallel(x), y)
            parallel.backward(loss)
            for parameter, speed in zip(parameters, speeds):
                speed *= rule.momentum
                speed += parameter.grad
                parameter.data[...] -= rule.lr * speed
                parameter.grad = None
        if world.device.kind == "cuda":
            xp.cuda.get_current_stream().synchronize()
        float(loss)
        return (time.perf_counter() - start) / steps

    return run


def _torch(world: World, name: str, batch: int, python: str) -> Callable[[int], float]:
    """Return what does so many of PyTorch's steps, in a process of its own a rank. **Collective.**"""
    from mpdp.bench.sides import PeerSide, setting

    side = PeerSide(
        world, "torch", setting(name, world.device.kind, batch=batch, precision="float32"), python
    )
    side.start()
    side.prepare()
    return lambda steps: side.block(0, steps)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
