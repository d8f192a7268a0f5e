"""The training step, as the same script for ranks that are threads and for ranks that are processes.

Started by ``mpdp run``, with or without ``--threads``, with the workload, the device and the samples a rank; rank 0 is
told how many steps to do and answers with the seconds of one.
"""

from __future__ import annotations

import sys
import time

import numpy as np

import mpdp
from mpdp.bench.contention.channel import answer
from mpdp.bench.workloads import build

PATIENCE = 3600.0  # seconds that ranks wait while other jobs have their turn
WARM_UP = 12


def main(name: str, device: str, batch: int) -> None:
    """Answer until rank 0 is told None. **Collective.**"""
    world = mpdp.init(device=device, timeout=PATIENCE)
    workload = build(name, world.rank, batch, world.device.kind)
    trainer = mpdp.Trainer(workload.model, workload.loss, workload.optimizer, world=world)
    comm = world.axis("data")

    def block(steps: int) -> float:
        comm.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            trainer.step(workload.batch)
        if world.device.kind == "cuda":
            world.device.xp.cuda.get_current_stream().synchronize()
        seconds = np.array([(time.perf_counter() - start) / steps])
        comm.all_reduce(seconds, op="max", lane="urgent")
        return float(seconds[0])

    block(WARM_UP)
    parent = answer() if world.rank == 0 else None
    if parent is not None:
        parent.send({"transport": world.transport, "ranks": world.size, "device": str(world.device)})
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


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
