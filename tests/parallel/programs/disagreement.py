"""Ranks that differ get one error on all ranks that names the difference; argv[1] chooses how they differ."""

import sys

import numpy as np

import mpdp
from mpdp import data, nn, optim
from mpdp.errors import CommunicationError, DisagreementError

kind = sys.argv[1]
world = mpdp.init(timeout=20)
rank, size = world.rank, world.size
odd = rank == size - 1
mpdp.seed(0)


def build(hidden=32, layers=2, dtype="float32", order=(0, 1), names=("first", "second")):
    class Model(nn.Module):
        def __init__(self):
            parts = [nn.Linear(4, 4, dtype=dtype), nn.Linear(4, 4, dtype=dtype)]
            for i in order:
                setattr(self, names[i], parts[i])
            self.wide = nn.Linear(4, hidden, dtype=dtype)
            self.out = nn.Linear(hidden, 3, dtype=dtype)
            if layers > 2:
                self.extra = nn.Linear(3, 3, dtype=dtype)

        def forward(self, x):
            return self.out(self.wide(getattr(self, names[1])(getattr(self, names[0])(x))))

    return Model()


def trainer(model=None, optimizer=None, **options):
    return mpdp.Trainer(model or build(), nn.cross_entropy, optimizer or optim.SGD(lr=0.1), **options)


x, y = np.ones((12, 4), dtype="float32"), np.zeros(12, dtype="int64")
dataset = data.ArrayDataset(x, y)


def width():
    trainer(build(hidden=33 if odd else 32))


def layer():
    trainer(build(layers=3 if odd else 2))


def dtype():
    trainer(build(dtype="float64" if odd else "float32"), precision="float64" if odd else "float32")


def names():
    trainer(build(names=("one", "second") if odd else ("first", "second")))


def order():
    trainer(build(order=(1, 0) if odd else (0, 1)))


def optimizer():
    trainer(optimizer=optim.AdamW(lr=0.1) if odd else optim.SGD(lr=0.1))


def rate():
    trainer(optimizer=optim.SGD(lr=0.2 if odd else 0.1))


def clip():
    trainer(clip_norm=1.0 if odd else None)


def length():
    trainer().fit(
        data.ArrayDataset(x[: 11 if odd else 12], y[: 11 if odd else 12]), epochs=1, global_batch_size=4
    )


def batch():
    trainer().fit(dataset, epochs=1, global_batch_size=3 if odd else 4)


def epochs():
    trainer().fit(dataset, epochs=2 if odd else 1, global_batch_size=4)


def save_alone():
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        t = trainer(run_dir=folder)
        t.step((x, y))
        if rank == 0:
            t.save()
        for _ in range(5):
            t.step((x, y))


def save_alone_before_any_step():
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        t = trainer(run_dir=folder)
        if rank == 0:
            t.save()
        t.step((x, y))


def new_run_dir_alone():
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            mpdp.new_run_dir("x", base=folder)
        trainer()


def broadcast_alone():
    t = trainer()
    if rank == 0:
        t.parallel.broadcast()
    t.step((x, y))


def averaged_alone():
    t = trainer(placement="sharded", precision="bfloat16", ema=0.5)
    t.step((x, y))
    if rank == 0:
        with t.averaged():
            pass
    t.step((x, y))


def run_dir_on_one_rank():
    trainer(run_dir="x" if odd else None)


def evaluation_metrics():
    trainer().evaluate(dataset, metrics=[nn.accuracy] if odd else [])


def nominal_count():
    mpdp.DataParallel(build(), nominal_count=16 if odd else 2)


def evaluate_alone():
    t = trainer()
    t.step((x, y))
    if rank == 0:
        t.evaluate(dataset)
    for _ in range(5):
        t.step((x, y))


def fit_alone():
    t = trainer()
    if odd:
        t.step((x, y))
    t.fit(dataset, epochs=1, global_batch_size=4)


def second_trainer_alone():
    t = trainer()
    if rank == 0:
        trainer()
    t.step((x, y))


def equal_models_in_another_order():
    """As the two halves of a game, which one rank trains the other way round: nothing else tells them apart."""
    one, other = trainer(), trainer()
    for each in (one, other):
        each.step((x, y))
    for each in (other, one) if odd else (one, other):
        each.step((x, y))


def skipped_reduction():
    arena = mpdp.GradientArena({"w": (3,)})
    reducer = mpdp.Reducer(arena)
    reducer.finish(count=1)
    if odd:
        reducer.step += 1
    reducer.finish(count=1)


def reduced_by_hand_alone():
    arena = mpdp.GradientArena({"w": (3,)})
    reducer = mpdp.Reducer(arena)
    t = trainer()
    if rank == 0:
        reducer.finish(count=1)
    else:
        t.evaluate(dataset)


def large_reducer(width=50_000):
    """Return one whose first chunk carries the record over shared memory."""
    return mpdp.Reducer(mpdp.GradientArena({"w": (width,)}))


def skipped_reduction_of_a_large_arena():
    reducer = large_reducer()
    reducer.finish(count=1)
    if odd:
        reducer.step += 1
    reducer.finish(count=1)


def reducers_in_another_order():
    """Of one length, so that nothing else than the step tells them apart, and of two."""
    one, other, longer = large_reducer(), large_reducer(60_000), large_reducer(90_000)
    for each in (one, other, longer):
        each.finish()
    for first, second in ((one, other), (one, longer)):
        try:
            (second if odd else first).finish()
        except DisagreementError as error:
            assert "the reduction of a Reducer" in str(error), error
        else:
            raise AssertionError
    (longer if odd else one).finish()


def large_arena_reduced_alone(early=False):
    """While the others are in a call that begins on the other lane."""
    reducer = large_reducer()
    t = trainer()
    for _ in range(2):
        reducer.finish()
    if rank == 0:
        if early:
            reducer.ready("w")
        reducer.finish()
    else:
        t.evaluate(dataset)


def large_arena_announced_alone():
    large_arena_reduced_alone(early=True)


def arena_shapes():
    mpdp.Reducer(mpdp.GradientArena({"w": (4 if odd else 3,)}))


def weights_changed():
    t = trainer()
    t.step((x, y))
    if odd:
        t.model.out.bias.data[1] += 1e-7
    t.check_replicas()


def rate_changed_in_training():
    class Change(mpdp.Callback):
        def on_step(self, t):
            if odd and t.step_count == 3:
                t.optimizer.lr *= 2

    t = trainer(callbacks=[Change()])
    t.fit(dataset, epochs=2, global_batch_size=4)  # ends before the check of update 10


def schedule_of_a_clock_of_its_own():
    t = trainer(schedule=lambda step: 0.5 if odd and step == 2 else 1.0)
    for _ in range(4):
        t.step((x, y))


def another_collective():
    if odd:
        world.comm.broadcast(np.zeros(6))
    else:
        world.comm.all_reduce(np.zeros(4))


def another_length():
    world.comm.all_reduce(np.zeros(6 if odd else 4))


def another_dtype():
    world.comm.all_reduce(np.zeros(4, "float32" if odd else "float64"))


def barrier_alone():
    if odd:
        world.comm.barrier(lane="bulk")
    world.comm.all_reduce(np.zeros(4))


def version_of_the_code():
    from mpdp import launch
    from mpdp.comm.agreement import compare

    if odd:
        mpdp.__version__ += ".other"
    try:
        compare(world.comm, "init", launch.code())
    finally:
        mpdp.__version__ = mpdp.__version__.removesuffix(".other")


EXPECTED = {
    "width": "model: expected the same parameter wide.weight on all ranks, got float32[32, 4] on rank 0",
    "layer": "model: expected the same number of parameters on all ranks, got 8 on rank 0",
    "dtype": "model: expected the same parameter first.weight on all ranks, got float32[4, 4] on rank 0",
    "names": "model: expected the same entry 1 on all ranks, got parameter first.weight",
    "order": "model: expected the same entry 1 on all ranks, got parameter first.weight",
    "optimizer": "trainer: expected the same optimizer on all ranks, got {'class': 'SGD'",
    "rate": "trainer: expected the same optimizer on all ranks, got {'class': 'SGD', 'lr': 0.1",
    "clip": "trainer: expected the same clip_norm on all ranks, got None on rank 0",
    "length": "fit: expected the same length of the data set on all ranks, got 12 on rank 0",
    "batch": "fit: expected the same global_batch_size on all ranks, got 4 on rank 0",
    "epochs": "fit: expected the same epochs on all ranks, got 1 on rank 0",
    "save_alone": "save(): expected every rank to call it at the same step, got rank 0 in save() at step 1",
    "save_alone_before_any_step": "save(): expected every rank to call it at the same step, got rank 0 in "
    "save() at step 0",
    "new_run_dir_alone": "expected every rank to call it at the same step, got rank 0 in new_run_dir() at step 0",
    "broadcast_alone": "broadcast(): expected every rank to call it at the same step, got rank 0 in broadcast()",
    "averaged_alone": "averaged(): expected every rank to call it at the same step, got rank 0 in averaged() at step 1",
    "run_dir_on_one_rank": "trainer: expected the same run_dir on all ranks, got none on rank 0",
    "evaluation_metrics": "evaluate: expected the same metrics on all ranks, got [] on rank 0",
    "nominal_count": "model: expected the same nominal_count on all ranks, got 2 on rank 0",
    "evaluate_alone": "evaluate(): expected every rank to call it at the same step, got rank 0 in evaluate() at step 1",
    "fit_alone": "expected every rank to call it at the same step, got rank 0",
    "second_trainer_alone": "expected every rank to call it at the same step, got rank 0 in the constructor of a",
    "equal_models_in_another_order": "in the backward pass of a step at step 1 of model ",
    "skipped_reduction": "the reduction of a Reducer: expected every rank to call it at the same step",
    "reduced_by_hand_alone": "expected every rank to call it at the same step, got rank",
    "skipped_reduction_of_a_large_arena": "the reduction of a Reducer: expected every rank to call it at the same step",
    "reducers_in_another_order": "the reduction of a Reducer: expected every rank to call it at the same step",
    "large_arena_reduced_alone": "expected every rank to call it at the same step, got rank",
    "large_arena_announced_alone": "expected every rank to call it at the same step, got rank",
    "arena_shapes": "gradient arena: expected the same w on all ranks, got float32[3] on rank 0",
    "weights_changed": "expected equal bits on all ranks after step 1, got a different weight of "
    f"out.bias on rank {size - 1}",
    "rate_changed_in_training": "learning rate: expected the same on all ranks at step 3, got 0.1 on rank 0",
    "schedule_of_a_clock_of_its_own": "learning rate: expected the same on all ranks at step 2, got 0.1 on rank 0",
    "another_collective": "all_reduce: expected the same call, dtype and length on all ranks, got all_reduce (sum) ",
    "another_length": "all_reduce: expected the same call, dtype and length on all ranks, got all_reduce (sum) of 4",
    "another_dtype": "all_reduce: expected the same call, dtype and length on all ranks, got all_reduce (sum) of 4",
    "barrier_alone": "expected the same call, dtype and length on all ranks, got all_reduce (sum) of 4 float64 on rank",
    "version_of_the_code": "init: expected the same version of mpdp on all ranks, got ",
}

if kind == "list":
    print("\n".join(EXPECTED))
    sys.exit()
for name in EXPECTED if kind == "all" else [kind]:
    try:
        globals()[name]()
    except (DisagreementError, CommunicationError) as error:
        assert EXPECTED[name] in str(error), f"{name}: {error}"
        assert error.agreed
    else:
        raise AssertionError(f"{name}: no error on rank {rank}")
    world.comm.barrier()
    if rank == 0:
        print(f"passed {name}", flush=True)
