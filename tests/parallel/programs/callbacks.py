"""Callbacks of which the last rank does what argv[1] says; with "all" every rank does everything but raise."""

import sys

import numpy as np
from launching import fault, record

import mpdp
from mpdp import data, nn, optim

CALL = sys.argv[1]
world = mpdp.init(timeout=20)
rank = world.rank
ALONE = CALL != "all"
last = rank == world.size - 1
random = np.random.default_rng(0)
train = data.ArrayDataset(random.standard_normal((24, 4)).astype("float32"), random.integers(0, 3, 24))
room = world.axis("data").allocate(1 << 18).array(np.float32, 1 << 16)
calls = {
    "evaluate": lambda t: t.evaluate(train),
    "predict": lambda t: t.predict(train),
    "check": lambda t: t.check_replicas(),
    "save": lambda t: t.save(),
    "barrier": lambda t: t.world.comm.barrier(),
    "data barrier": lambda t: t.world.axis("data").barrier(),
    "all-reduce": lambda t: t.world.comm.all_reduce(np.ones(3)),
    "data all-reduce": lambda t: t.world.axis("data").all_reduce(
        np.ones(1, "int64"), op="max", lane="urgent"
    ),
    "data started": lambda t: t.world.axis("data").start_all_reduce(room).wait(),
    "data numbers": lambda t: t.world.axis("data").reduce_numbers([1], [1.0]),
    "broadcast": lambda t: t.world.comm.broadcast_bytes(b"word" if rank == 0 else None),
    "pair": lambda t: pair(t.world.comm),
    "raise": lambda t: 1 / 0,
}


def pair(comm):
    """Two ranks talk; that is no collective."""
    numbers = np.arange(3)
    if rank == 0 and comm.size > 1:
        comm.send(numbers, to=1)
    elif rank == 1:
        comm.recv(numbers, source=0)


class Watch(mpdp.Callback):
    method = sys.argv[2] if len(sys.argv) > 2 else "on_step"

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "method"):
            return self.act
        return object.__getattribute__(self, name)

    def act(self, trainer, *rest):
        if trainer.step_count == 3 and (last or not ALONE):
            if ALONE:
                fault()
                calls[CALL](trainer)
            else:
                for name, call in calls.items():
                    if name != "raise":
                        call(trainer)


trainer = mpdp.Trainer(
    nn.Linear(4, 3),
    nn.cross_entropy,
    optim.SGD(lr=0.1),
    run_dir=sys.argv[3] if len(sys.argv) > 3 else None,
    callbacks=[Watch()],
)
try:
    trainer.fit(train, epochs=2, global_batch_size=8, validation=train)
except mpdp.errors.DisagreementError as error:
    record([str(error), getattr(error, "agreed", False)])
    world.comm.barrier()  # all have, before one ends the job
    raise
record(["passed", trainer.parallel.step_count, float(trainer.model.weight.data.sum())])
