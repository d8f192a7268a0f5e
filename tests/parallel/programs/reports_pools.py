"""A user's script that joins the world at its top level and opens pools of every start method (I8).

Workers of "spawn" and "forkserver" import the script again, and so call init once more.
"""

import multiprocessing
import sys

import numpy as np

import mpdp
from mpdp import data, nn, optim

assert "mpi4py.MPI" not in sys.modules, "importing mpdp has initialised MPI"
world = mpdp.init(timeout=20)


def look(i):
    """Return what a worker is: it must be no rank, and must not have initialised MPI itself."""
    return i * i, world.size, "mpi4py.MPI" in sys.modules, mpdp.guard.current.announcement is None


if __name__ == "__main__":
    trainer = mpdp.Trainer(nn.Linear(4, 3), nn.cross_entropy, optim.SGD(lr=0.1))
    samples = data.ArrayDataset(np.ones((8, 4), "float32"), np.zeros(8, int))
    for number, method in enumerate(("fork", "spawn", "forkserver")):
        with multiprocessing.get_context(method).Pool(1) as pool:
            trainer.fit(samples, epochs=number + 1, global_batch_size=4)
            for i, (square, size, has_mpi, apart) in enumerate(pool.map(look, range(4))):
                assert square == i * i and apart
                if method != "fork":  # a forked worker is a copy of its rank
                    assert size == 1 and not has_mpi
    trainer.check_replicas()
    print(f"rank {world.rank} of {world.size} finished", flush=True)
