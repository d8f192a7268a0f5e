"""Time a staged all-reduce of GPU memory against the simple way: copy out, reduce, copy in.

    mpdp run -n 2 scripts/measure_staged.py

The two alternate in one run; the time of each is the largest over ranks behind a barrier. Prints one line.
"""

import statistics
import time

import numpy as np

import mpdp

BYTES = 64 << 20
ROUNDS = 12


def main():
    world = mpdp.init(device="cuda", transport="staged")
    comm, cupy = world.axis("data"), world.device.xp
    array = cupy.ones(BYTES // 4, dtype=np.float32)

    def staged():
        comm.all_reduce(array)

    def simple():
        host = array.get()
        comm.all_reduce(host)
        array.set(host)

    times = {staged: [], simple: []}
    for turn in range(ROUNDS + 2):
        for way, kept in times.items():
            array.fill(1)
            cupy.cuda.get_current_stream().synchronize()
            comm.barrier()
            start = time.perf_counter()
            way()
            cupy.cuda.get_current_stream().synchronize()
            seconds = np.array([time.perf_counter() - start])
            comm.all_reduce(seconds, op="max", lane="urgent")
            assert float(array[0]) == float(array[-1]) == world.size
            if turn >= 2:
                kept.append(float(seconds[0]))
    if world.rank == 0:
        a, b = (statistics.median(kept) for kept in times.values())
        ratio = statistics.median(y / x for x, y in zip(*times.values()))
        print(
            f"64 MiB, {world.size} ranks: staged {a * 1e3:.1f} ms, simple {b * 1e3:.1f} ms, "
            f"median of ratios {ratio:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
