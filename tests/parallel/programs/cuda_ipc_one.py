"""A world of one and GPU transports: cuda_ipc over itself, NCCL where it is installed, and its refusal otherwise."""

import numpy as np

import mpdp
from mpdp.comm.cuda_ipc import CudaIpcCommunicator
from mpdp.comm.nccl import NcclCommunicator
from mpdp.comm.solo import SoloCommunicator
from mpdp.errors import MissingDependencyError

world = mpdp.init(device="cuda")
xp = world.device.xp


def check(comm):
    for length in (0, 1, 3, 1025, 100_000):
        for mapped in (True, False):
            data = np.arange(length, dtype=np.float32)
            array = xp.asarray(data)
            if mapped:
                array = comm.allocate(data.nbytes, world.device).array(np.float32, length)
                array[...] = xp.asarray(data)
            for lane in ("bulk", "urgent"):
                comm.start_all_reduce(array, lane=lane).wait()
                comm.all_reduce(array, op="max", lane=lane)
                comm.reduce(array, lane=lane)
                comm.broadcast(array, lane=lane)
                comm.reduce_scatter(array, [0, length], lane=lane)
                comm.all_gather(array, [0, length], lane=lane)
            assert np.array_equal(xp.asnumpy(array), data)
    half = xp.asarray(np.array([1, np.nan, -2], np.float16))
    comm.all_reduce(half, op="max")
    assert np.array_equal(xp.asnumpy(half), np.array([1, np.nan, -2], np.float16), equal_nan=True)
    other = comm.duplicate()
    other.all_reduce(xp.ones(5))
    other.close()
    stream = xp.cuda.Stream(non_blocking=True)
    value = xp.ones(7, np.float32)
    with stream:
        comm.all_reduce(value)
        stream.begin_capture()
        comm.start_all_reduce(value).wait()
        comm.all_reduce(value, lane="urgent")
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert float(value[0]) == 1
    assert comm.error() is None if hasattr(comm, "error") else comm.family.error() is None
    del graph
    comm.close()
    comm.release()


check(CudaIpcCommunicator(SoloCommunicator(), world.device))
print("cuda_ipc passed", flush=True)
try:
    nccl = NcclCommunicator(SoloCommunicator(), world.device)
except MissingDependencyError as error:
    print(f"nccl missing: {error}", flush=True)
else:
    check(nccl)
    print("nccl passed", flush=True)
