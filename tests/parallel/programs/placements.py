"""Placements over a real transport: against the replicated one, by checkpoint, and ranks that come to them differently.

``placements.py cpu`` runs eagerly, ``cuda`` captures where the transport can be. Sums over a fixed-order transport have
the same bits in every placement; over others they agree to rounding.
"""

import itertools
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from called_again import equal_bits

import mpdp
from mpdp import data, nn, optim
from mpdp.errors import DisagreementError
from mpdp.parallel import averaging, capture

mode, folder = sys.argv[1], Path(sys.argv[2])
world = mpdp.init(device=mode, timeout=60)
rank, size = world.rank, world.size
ordered = size == 1 or world.transport in ("shared_memory", "cuda_ipc", "threads")
PLACEMENTS = ("replicated", "root", "sharded")
PRECISIONS = ("float32", "bfloat16", "float16")


class Net(nn.Module):
    """Chunks of several spans, norms that read float32, and a frozen layer."""

    static = True

    def __init__(self):
        self.first, self.norm = nn.Linear(12, 250), nn.LayerNorm(250)
        self.middle, self.frozen = nn.Linear(250, 250), nn.Linear(250, 250).freeze()
        self.last = nn.Linear(250, 4)

    def forward(self, x):
        return self.last(self.frozen(self.middle(self.norm(self.first(x)).relu()).relu()))


def trainer_of(placement, precision="float32", optimizer=optim.AdamW, graph="auto", **options):
    mpdp.seed(3)
    return mpdp.Trainer(
        Net(), nn.cross_entropy, optimizer(0.01), world=world, placement=placement, precision=precision,
        chunk_bytes=131072, graph=graph if mode == "cuda" else "auto", **options,
    )  # fmt: skip


def share(step):
    random = np.random.default_rng(step)
    x, y = random.normal(size=(4 * size, 12)).astype("float32"), random.integers(0, 4, 4 * size)
    return x[rank::size], y[rank::size]


def state_of(trainer):
    """All weights, slots and buffers, on rank 0; fewer elsewhere."""
    trainer.settle()
    weights, slots = trainer.parallel.collect()
    copies = trainer.parallel._replica.copies
    arrays = [] if weights is None else [weights.copy(), *[slot.copy() for slot in slots.values()]]
    average = averaging.collect(trainer.parallel._replica)
    arrays += [] if average is None else [average.copy()]
    return arrays + ([] if copies is None else [copies if mode == "cpu" else copies.view("uint16").get()])


def equal(one, other):
    for a, b in zip(one, other, strict=True):
        if ordered:
            assert equal_bits(a, b)
        elif a.dtype.kind == "f":
            np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-3)


def the_same_bits():
    cases = [(precision, optim.AdamW, {"clip_norm": 0.1}) for precision in PRECISIONS]
    cases.append(("float32", _momentum, {"accumulate": 2}))
    cases += [
        (precision, optim.LAMB, {"clip_norm": 1.0, "ema": 0.75}) for precision in ("float32", "bfloat16")
    ]
    for precision, optimizer, options in cases:
        first = None
        graphs = (False, "auto") if mode == "cuda" else (False,)
        for placement, graph in itertools.product(PLACEMENTS, graphs):
            trainer = trainer_of(placement, precision, optimizer, graph, **options)
            losses = [trainer.step(share(step)) for step in range(5)]
            trainer.check_replicas()
            found = state_of(trainer), [float(loss) for loss in losses]
            first = first or found
            equal(found[0], first[0])
            np.testing.assert_allclose(found[1], first[1], rtol=0 if ordered else 1e-2)
            engine = trainer.updates.graphs
            captured = mode == "cuda" and graph and (size == 1 or trainer.parallel.comm.capturable)
            assert not captured or engine.captures == options.get("accumulate", 1), engine._said
        if rank == 0:
            print(precision, *options, "ok", flush=True)


def _momentum(lr):
    return optim.SGD(lr, momentum=0.9, nesterov=True, weight_decay=0.01)


def checkpoints():
    for precision in ("float32", "bfloat16"):
        whole = trainer_of("replicated", precision)
        for step in range(3):
            whole.step(share(step))
        for placement in PLACEMENTS:
            run = folder / f"{precision}-{placement}"
            trainer = trainer_of(placement, precision, run_dir=run)
            for step in range(2):
                trainer.step(share(step))
            path = trainer.save()
            other = trainer_of(PLACEMENTS[PLACEMENTS.index(placement) - 1], precision)
            assert other.resume(path) and other.step_count == 2
            other.step(share(2))
            other.check_replicas()
            equal(state_of(other), state_of(whole))


def late_weights():
    """Inside ``fit`` updates of ``sharded`` end while weights are under way, on GPUs; the bits are the same."""
    capture.LATE_BYTES = 1
    comm = world.axis("data")
    comm.independent = comm.independent or comm.capturable  # also where ranks share a GPU
    x, y = np.concatenate([share(step)[0] for step in range(6)]), np.arange(24) % 4
    for precision in ("float32", "bfloat16"):
        found = []
        for placement, graph in (("replicated", False), ("sharded", False), ("sharded", "auto")):
            trainer = trainer_of(placement, precision, graph=graph)
            left = note_what_forward_finds(trainer)
            trainer.fit(data.ArrayDataset(x, y), epochs=3, global_batch_size=4, progress=False)
            found.append(state_of(trainer))
            late = placement == "sharded" and trainer.parallel.comm.independent and size > 1
            assert late == trainer.parallel._replica.can_give_late and late == (max(left) > 1), left
            equal(found[-1], found[0])


def note_what_forward_finds(trainer):
    left, forward = [], trainer.model.forward

    def noting(x):
        arriving = trainer.parallel._replica.binding.arriving
        left.append(0 if arriving is None else arriving.left)
        return forward(x)

    trainer.model.forward = noting
    return left


def the_state_of_a_model():
    trainer = trainer_of("sharded", "bfloat16")
    trainer.step(share(0))
    state = trainer.parallel.state_dict()
    assert (state is None) == (rank > 0)
    if state is not None:
        assert all(array.dtype == np.float32 for array in state.values())
    parameter = trainer.model.middle.weight
    if size > 1:
        assert parameter.data.dtype != np.float32
        for write in (
            lambda: setattr(parameter, "data", np.zeros((250, 250), "float32")),
            lambda: _read(parameter),
        ):
            try:
                write()
            except ValueError as error:
                assert 'placement="sharded" and a 16-bit precision' in str(error), error
            else:
                raise AssertionError("nothing was raised")


def _read(parameter):
    from mpdp.autodiff.recording import working_copies

    with working_copies():
        parameter.astype("float32")


def one_rank_in_another_call():
    """Last: rank 0 goes on to the next backward while the others update."""
    parallel = mpdp.DataParallel(Net(), world, placement="sharded", chunk_bytes=131072)
    optimizer = optim.SGD(0.1)
    x, y = (world.device.xp.asarray(array) for array in share(0))
    for _ in range(2):
        parallel.backward(nn.cross_entropy(parallel(x), y))
        parallel.step(optimizer)
    parallel.backward(nn.cross_entropy(parallel(x), y))
    if size == 1:
        return
    try:
        if rank == 0:
            parallel.check_replicas()
        else:
            parallel.step(optimizer)
    except DisagreementError as error:
        assert "check_replicas()" in str(error) and "the update of a step" in str(error), error
    else:
        raise AssertionError("nothing was raised")


for function in (the_same_bits, checkpoints, late_weights, the_state_of_a_model, one_rank_in_another_call):
    function()
    if rank == 0:
        print(f"{function.__name__}: ok", flush=True)
print(f"all passed on rank {rank} of {size} over {world.transport}", flush=True)
