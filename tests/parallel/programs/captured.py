"""A step in one CUDA graph: kernels, chunks on the bulk lane beside them, a record on the urgent lane, an update.

Replayed 50 times, and mixed with the same step run eagerly and with other collectives. Runs at any n over cuda_ipc and
nccl, which argv names: a world of one would use neither.
"""

import sys

import numpy as np

import mpdp
from mpdp.comm.choose_gpu import MAKERS
from mpdp.comm.solo import SoloCommunicator

world = mpdp.init(device="cuda", transport=sys.argv[1], timeout=30)
rank, size, xp = world.rank, world.size, world.device.xp
comm = world.axis("data") if size > 1 else MAKERS[sys.argv[1]](SoloCommunicator(), world.device)
REPLAYS = 50
CHUNK = 150_001  # elements: two phases, and no multiple of a pack
total = size * (size + 1) // 2  # of what ranks give

gradients = comm.allocate(3 * CHUNK * 4, world.device).array(np.float32, 3 * CHUNK)
chunks = [gradients[i * CHUNK : (i + 1) * CHUNK] for i in range(3)]
sums, most = xp.zeros(4), xp.zeros(11, np.int64)
weights, step = xp.zeros(CHUNK, np.float32), xp.zeros(1)
of_record, number, part = xp.zeros(4), xp.zeros(1, np.int64), xp.zeros(1, np.float32)
stream = xp.cuda.Stream(non_blocking=True)


def body():
    """Each chunk i becomes the sum over ranks of (rank + 1) * (step + i); nothing is allocated here."""
    step.__iadd__(1)
    number.__iadd__(1)
    part.__iadd__(1)
    most.fill(rank)
    most.__iadd__(number)
    sums.fill(rank + 1)
    sums.__imul__(step)
    requests = []
    for i, chunk in enumerate(chunks):
        chunk.fill(i)
        chunk.__iadd__(part)
        chunk.__imul__(rank + 1)
        if i == 0:  # right before the first chunk, as a step does
            comm.all_reduce(sums, lane="urgent")
            comm.all_reduce(most, op="max", lane="urgent")
        requests.append(comm.start_all_reduce(chunk))
    of_record.__iadd__(sums)
    for request in requests:
        request.wait()
    for chunk in chunks:
        weights.__iadd__(chunk)


def check(steps):
    """The state after so many steps, by formulas in rank and size."""
    numbers = np.arange(1, steps + 1)
    assert float(step[0]) == steps
    assert xp.asnumpy(sums).tolist() == [total * steps] * 4, sums
    assert xp.asnumpy(most).tolist() == [steps + size - 1] * 11, most
    assert xp.asnumpy(of_record).tolist() == [total * int(numbers.sum())] * 4, of_record
    for i, chunk in enumerate(chunks):
        assert bool((chunk == total * (steps + i)).all()), (i, steps, chunk)
    assert bool((weights == sum(total * int((numbers + i).sum()) for i in range(3))).all()), (steps, weights)


xp.cuda.get_current_stream().synchronize()
with stream:
    body()  # compiles, connects, and gives the pool what the step needs
    check(1)
    stream.begin_capture()
    body()
    graph = stream.end_capture()
    check(1)  # a capture runs nothing
    done = 1
    for _ in range(REPLAYS):
        graph.launch(stream)
    done += REPLAYS
    check(done)
    loose = xp.zeros(1000)
    for turn in range(20):
        if turn % 3 == 1:
            body()
        else:
            graph.launch(stream)
        done += 1
        loose.fill(turn + rank)
        if turn % 2:
            comm.start_all_reduce(loose).wait()
        else:
            comm.all_reduce(loose, lane="urgent")
        check(done)
        assert bool((loose == turn * size + size * (size - 1) / 2).all()), (turn, loose)
    other = xp.cuda.Stream(non_blocking=True)
    stream.synchronize()
    with other:  # the lane's last kernel is on another stream
        comm.all_reduce(loose, lane="urgent")
        comm.all_reduce(chunks[0])
        assert bool((chunks[0] == total * done * size).all())
    other.synchronize()
    graph.launch(stream)
    check(done + 1)
print(f"all passed on rank {rank} of {size} over {comm.transport}", flush=True)
