"""A launcher that does not say how many ranks a node has: BLAS threads are capped all the same."""

import os
import sys

NAMES = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
if any(name in os.environ for name in NAMES):
    environ = {name: value for name, value in os.environ.items() if name not in NAMES}
    os.execve(sys.executable, [sys.executable, *sys.argv], environ)

from launching import record  # noqa: E402

import mpdp  # noqa: E402
from mpdp import cores  # noqa: E402
from mpdp.world import blas_threads  # noqa: E402

world = mpdp.init()
record([world.local_size, blas_threads(), cores.per_rank(world.local_size)])
