"""Steps as graphs against eager steps, at any n: equal bits, whatever the shares.

``graphs.py cuda`` captures for real; ``graphs.py cpu`` calls functions again in place of graphs, with chunks reduced by
the host, and ``graphs.py inside`` does so as if the transport could be captured.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from called_again import capture, equal_bits

import mpdp
from mpdp import nn, optim
from mpdp.errors import DisagreementError, NonFiniteError
from mpdp.nn.models import GPT

mode = sys.argv[1]
world = mpdp.init(device="cuda" if mode == "cuda" else "cpu", timeout=60)
rank, size = world.rank, world.size
UPDATES = 20
CASES = []


def case(function):
    CASES.append(function)
    return function


def trainer_of(build, optimizer, loss=nn.cross_entropy, graph=True, required=True, **options):
    mpdp.seed(3)
    how = (True if required else "auto") if graph and mode == "cuda" else False
    trainer = mpdp.Trainer(build(), loss, optimizer(), world=world, graph=how, **options)
    if graph and mode != "cuda":
        if mode == "inside":
            world.axis("data").capturable = True
        capture(trainer, required)
    return trainer


def state_of(trainer):
    trainer.settle()
    state = [trainer.parallel.weights, *trainer.optimizer.state_arrays().values()]
    state += [buffer.data for buffer in trainer.parallel.buffers.values()]
    if trainer.parallel._replica.average is not None:
        state.append(trainer.parallel._replica.average.array)
    return [array if isinstance(array, np.ndarray) else array.get() for array in state]


def share(batch, count=None):
    """This rank's part; rank r has r samples more than rank 0 where there is a remainder."""
    total = len(batch[-1]) if count is None else count
    a, b = total * rank // size, total * (rank + 1) // size
    return tuple(array[a:b] for array in batch)


def class_batches(samples=11, features=6, classes=4):
    rng = np.random.default_rng(7)
    for _ in range(UPDATES):
        x = rng.normal(size=(samples, features)).astype("float32")
        yield x, (np.abs(x).argmax(axis=1) % classes).astype("int64")


def both(build, optimizer, batches, loss=nn.cross_entropy, **options):
    """Train eagerly and as graphs; return the second trainer."""
    trainers = [trainer_of(build, optimizer, loss, graph, **options) for graph in (False, True)]
    batches = list(batches)
    losses = [[trainer.step(share(batch)) for batch in batches] for trainer in trainers]
    for trainer in trainers:
        trainer.check_replicas()
    for a, b in zip(*map(state_of, trainers), strict=True):
        assert equal_bits(a, b)
    assert [float(loss) for loss in losses[0]] == [float(loss) for loss in losses[1]]
    assert trainers[1].updates.graphs.captures > 0, trainers[1].updates.graphs._said
    return trainers[1]


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def dropping():
    return nn.Sequential(nn.Linear(6, 300), nn.Dropout(0.3), nn.ReLU(), nn.Linear(300, 4))


def sgd():
    return optim.SGD(lr=0.1, momentum=0.9)


def adamw():
    return optim.AdamW(lr=0.01, weight_decay=0.1, groups=[optim.Group("*.bias", weight_decay=0.0)])


@case
def accumulation_and_clipping():
    for accumulate in (1, 3):
        captured = both(mlp, sgd, class_batches(6 * size + 1), accumulate=accumulate, clip_norm=0.5)
        assert captured.updates.graphs.captures == min(accumulate, 3)


@case
def dropout():
    both(dropping, adamw, class_batches(), chunk_bytes=4096)


@case
def norms_of_parameters_and_an_average_of_weights():
    def lamb():
        return optim.LAMB(lr=0.02, weight_decay=0.1, groups=[optim.Group("*.bias", weight_decay=0.0)])

    schedule = optim.Warmup(5, optim.StepLR(4, gamma=0.5))
    both(mlp, lamb, class_batches(), schedule=schedule, ema=0.9, clip_norm=1.0)
    options = {"ema": 0.5, "clip_value": 0.02, "precision": "bfloat16", "accumulate": 2}
    both(mlp, lambda: optim.Lion(lr=0.01, weight_decay=0.1), class_batches(6 * size), **options)


@case
def float16():
    def scale():
        return optim.LossScale(initial=2.0**18, interval=4)

    both(mlp, sgd, class_batches(), precision="float16", loss_scale=scale(), clip_norm=1.0)


@case
def shares_that_change_and_are_empty():
    batches = list(class_batches(4 * size))
    for i, (x, y) in enumerate(batches):
        if i % 5 == 4:
            batches[i] = x[: size - 1], y[: size - 1]  # rank 0 has none
    both(mlp, adamw, batches)


@case
def forms_that_ranks_meet_at_different_updates():
    """Share lengths that one rank has had before while another has to capture its graph."""
    totals = [(4, 3)] * 4 + [(4, 4)] * 4 + [(5, 4), (4, 3)] * 4 + [(4, 4)] * 4
    batches = [batch for batch, _ in zip(class_batches(5), totals)]
    trainers = [trainer_of(mlp, sgd, graph=graph) for graph in (False, True)]
    for trainer in trainers:
        for (x, y), (first, other) in zip(batches, totals, strict=True):
            count = first if rank == 0 else other
            trainer.step((x[:count], y[:count]))
    for a, b in zip(*map(state_of, trainers), strict=True):
        assert equal_bits(a, b)
    assert trainers[1].updates.graphs.captures == (2 if size == 1 else 3)


@case
def statistics_of_the_global_batch():
    def normed():
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    if world.axis("data").capturable or size == 1:
        both(normed, sgd, class_batches())
    else:
        trainer = trainer_of(normed, sgd, required=False)
        for batch in class_batches():
            trainer.step(share(batch))
        assert trainer.updates.graphs.captures == 0


@case
def statistics_of_each_rank():
    def normed():
        return nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16, global_stats=False), nn.ReLU(), nn.Linear(16, 4)
        )

    both(normed, sgd, class_batches())


@case
def a_small_gpt():
    def build():
        return GPT(layers=2, width=16, heads=2, context=8, vocabulary=13, dropout=0.1)

    def batches():
        rng = np.random.default_rng(3)
        for _ in range(UPDATES):
            tokens = rng.integers(0, 13, size=(2 * size, 9))
            yield tokens[:, :-1].copy(), tokens[:, 1:].copy()

    both(build, adamw, batches(), clip_norm=1.0, accumulate=2)


@case
def not_finite_on_one_rank():
    trainer = trainer_of(mlp, sgd)
    batches = list(class_batches(4 * size))
    for batch in batches[:6]:
        trainer.step(share(batch))
    before = state_of(trainer)
    x, y = share(batches[6])
    if rank == size - 1:
        x[0, 0] = np.nan
    try:
        for _ in range(3):
            loss = trainer.step((x, y))
            if rank == 0:
                assert size == 1 or np.isnan(float(loss))  # one rank alone looks, and goes on
    except NonFiniteError as error:
        assert f"loss: expected a finite sum at step 6, got nan (from rank {size - 1})" in str(error), error
    else:
        raise AssertionError("nothing was raised")
    assert trainer.step_count == 6
    for a, b in zip(before, state_of(trainer), strict=True):
        assert equal_bits(a, b)


@case
def a_learning_rate_that_differs():
    """An error on all ranks before the launch; the run goes on once it is mended."""
    trainer = trainer_of(mlp, sgd)
    batches = [share(batch) for batch in class_batches(4 * size)]
    for batch in batches[:6]:
        trainer.step(batch)
    if size == 1:
        return
    rate = trainer.optimizer.lr
    before = state_of(trainer)
    trainer.optimizer.lr = 2 * rate if rank == size - 1 else rate
    try:
        trainer.step(batches[6])
    except DisagreementError as error:
        assert f"learning rate: expected the same on all ranks at step 6, got {rate} on" in str(error), error
    else:
        raise AssertionError("nothing was raised")
    for a, b in zip(before, state_of(trainer), strict=True):
        assert equal_bits(a, b)
    trainer.optimizer.lr = rate
    captures = trainer.updates.graphs.captures
    for batch in batches[6:]:
        trainer.step(batch)
    trainer.check_replicas()
    assert trainer.updates.graphs.captures == captures


@case
def one_rank_that_saves():
    """Last: what comes after it finds ranks in different calls."""
    trainer = trainer_of(mlp, sgd)
    batches = list(class_batches(4 * size))
    for batch in batches[:6]:
        trainer.step(share(batch))
    if size == 1:
        return
    try:
        if rank == size - 1:
            trainer.check_replicas()
        else:
            trainer.step(share(batches[6]))
    except DisagreementError as error:
        assert "at step 6" in str(error), error
    else:
        raise AssertionError("nothing was raised")


wanted = sys.argv[2:]
for function in CASES:
    if not wanted or function.__name__ in wanted:
        function()
        if rank == 0:
            print(f"{function.__name__}: ok", flush=True)
print(f"all passed on rank {rank} of {size} over {world.transport}", flush=True)
