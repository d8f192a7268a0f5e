"""Say what a rank may run on (I7)."""

import os

from launching import record
from threadpoolctl import threadpool_info

import mpdp

world = mpdp.init()
record(
    {
        "cores": mpdp.cores.cores(),
        "bound": len(os.sched_getaffinity(0)),
        "threads": max(pool["num_threads"] for pool in threadpool_info()),
        "node": os.cpu_count(),
    }
)
