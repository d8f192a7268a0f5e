"""A rank is killed while its peers wait for it inside a collective on the GPU: argv = how (eager, graph, host, skip).

``host``: the peers' main threads wait in CUDA; otherwise they go on to the next collective. ``skip``: the rank is in
another collective instead.
"""

import os
import signal
import sys
import time

import numpy as np

import mpdp

how = sys.argv[1]
world = mpdp.init(device="cuda", transport="cuda_ipc", timeout=60)
rank, size, xp = world.rank, world.size, world.device.xp
comm = world.axis("data")
array = comm.allocate(4 << 20, world.device).array(np.float32, 1 << 20)
stream = xp.cuda.Stream(non_blocking=True)
with stream:
    comm.all_reduce(array)
    stream.synchronize()
    stream.begin_capture()
    for _ in range(3):
        comm.all_reduce(array)
    graph = stream.end_capture()
    comm.barrier()
    if rank == 0:
        print(f"begins at {time.time()}", flush=True)
    if how == "skip":
        comm.all_reduce(array[: 500_000 if rank == 1 else 600_000])
        stream.synchronize()
        comm.all_reduce(array)
        raise SystemExit("nobody noticed")
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "graph":
        graph.launch(stream)
    else:
        comm.all_reduce(array)
    if how == "host":
        stream.synchronize()
        print(f"rank {rank} came back", flush=True)
    else:
        time.sleep(1)
    comm.all_reduce(array)
    stream.synchronize()
