"""Placements: the same bits wherever the optimizer's state lives, its memory, and the bytes that are sent."""

import itertools

import numpy as np
import pytest
from called_again import capture

import mpdp
from mpdp import autodiff, nn, optim, threads
from mpdp.autodiff.recording import working_copies
from mpdp.bench.traffic import Traffic
from mpdp.errors import DisagreementError, DivergenceError, NonFiniteError, on_all_ranks
from mpdp.parallel import averaging
from mpdp.parallel.layout import SPAN
from mpdp.parallel.placement import PLACEMENTS
from mpdp.report.timeline import Timeline

OPTIMIZERS = {
    "sgd": lambda: optim.SGD(0.1, weight_decay=0.01),
    "momentum": lambda: optim.SGD(0.1, momentum=0.9),
    "nesterov": lambda: optim.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda: optim.Adam(0.01, weight_decay=0.01),
    "adamw": lambda: optim.AdamW(0.01, groups=[optim.Group("*.bias", weight_decay=0.0, lr_factor=2.0)]),
    "lion": lambda: optim.Lion(0.01, weight_decay=0.1),
    "lamb": lambda: optim.LAMB(
        0.02, groups=[optim.Group("*.bias", weight_decay=0.0, lr_factor=2.0)], unscaled=["norm.*"]
    ),
}
PRECISIONS = ("float32", "bfloat16", "float16", "float64")


class Net(nn.Module):
    """Several chunks, norms that read float32, a head that is used in some updates only, and a frozen layer."""

    def __init__(self, dtype="float32"):
        self.first = nn.Linear(12, 160, dtype=dtype)
        self.norm = nn.LayerNorm(160, dtype=dtype)
        self.middle = nn.Linear(160, 160, dtype=dtype)
        self.batch = nn.BatchNorm2d(160, dtype=dtype)
        self.frozen = nn.Linear(160, 160, dtype=dtype).freeze()
        self.heads = [nn.Linear(160, 4, dtype=dtype) for _ in range(2)]
        self.head = 0

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        x = self.middle(x)
        x = self.batch(x.reshape(*x.shape, 1, 1)).reshape(*x.shape).relu()
        return self.heads[self.head](self.frozen(x)) * 3.0


class Explodes(nn.Module):
    """Passes its input on, and has an infinite gradient where that is large."""

    static = True
    operation = autodiff.register(
        "explodes",
        lambda k, x: (x.copy(), x),
        lambda k, x, g, wants: (np.where(np.abs(x) > 1e6, np.float32(np.inf), g),),
    )

    def forward(self, x):
        return self.operation(x)


def samples(dtype, step, count=10):
    random = np.random.default_rng(step)
    return random.normal(size=(count, 12)).astype(dtype), random.integers(0, 4, count)


def train(
    optimizer, precision, placement, *, accumulate=1, clip_norm=None, steps=4, chunk_bytes=32768, **options
):
    """Return the trainer after some updates, in the last of which rank 0 alone has samples."""
    world = mpdp.init()
    dtype = "float64" if precision == "float64" else "float32"
    mpdp.seed(0)
    model = Net(dtype)
    trainer = mpdp.Trainer(
        model, nn.cross_entropy, OPTIMIZERS[optimizer](), precision=precision, placement=placement,
        accumulate=accumulate, clip_norm=clip_norm, chunk_bytes=chunk_bytes,
        loss_scale=optim.LossScale(initial=2.0**16, interval=2) if precision == "float16" else None,
        **options,
    )  # fmt: skip
    for step in range(steps):
        model.head = int(step == 2)
        x, y = samples(dtype, step)
        share = slice(world.rank, None, world.size)
        if step == steps - 1:
            share = slice(0, None if world.rank == 0 else 0)
        trainer.step((x[share], y[share]))
    trainer.check_replicas()
    return trainer


def bits(trainer):
    """Return all state of a trainer as bytes, on rank 0."""
    trainer.parallel.load(*trainer.parallel.collect())
    weights, slots = trainer.parallel.collect()
    average = averaging.collect(trainer.parallel._replica)
    if weights is None:
        return None
    copies = trainer.parallel._replica.copies
    buffers = [buffer.numpy().tobytes() for buffer in trainer.parallel.buffers.values()]
    return [
        weights.tobytes(),
        {name: flat.tobytes() for name, flat in slots.items()},
        None if copies is None else copies.tobytes(),
        None if average is None else average.tobytes(),
        trainer.optimizer.updates.tolist(),
        trainer.loss,
        buffers,
        None if trainer.parallel.loss_scale is None else trainer.parallel.loss_scale.state(),
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_placements_give_the_same_bits(n, precision):
    options = [{"ema": 0.75}, {"accumulate": 2, "clip_norm": 0.1, "clip_value": 0.01}]

    def body():
        return [
            [bits(train(name, precision, placement, **given)) for placement in PLACEMENTS]
            for name, given in zip(OPTIMIZERS, itertools.cycle(options))
        ]

    for replicated, root, sharded in threads.run(body, n, devices=["cpu"] * n)[0]:
        assert replicated == root and replicated == sharded


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [1, 3])
def test_the_average_takes_the_place_of_weights_that_ranks_hold_parts_of(n, precision):
    """Predictions by it, thawed and frozen, are the same in every placement; the weights come back behind it."""

    def body():
        found = []
        for placement in PLACEMENTS:
            trainer = train("lamb", precision, placement, ema=0.75)
            x, _ = samples("float32", 9)
            results = []
            for change in (None, trainer.freeze, trainer.thaw):
                if change is not None:
                    change("middle.weight", "norm.bias")
                before = trainer.predict(x).tobytes()
                results.append(trainer.predict(x, ema=True).tobytes())
                assert trainer.predict(x).tobytes() == before != results[-1]
            with pytest.raises(RuntimeError, match="agreed"), trainer.averaged():
                raise on_all_ranks(RuntimeError("agreed"))
            assert trainer.predict(x).tobytes() == before
            trainer.step((x, np.zeros(len(x), int)))
            trainer.check_replicas()
            found.append([*results, bits(trainer)])
        return found

    for replicated, root, sharded in threads.run(body, n, devices=["cpu"] * n)[:1]:
        assert replicated == root and replicated == sharded


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_captured_step_has_the_bits_of_an_eager_one(n, precision):
    """On the CPU a graph is a function that is called again."""

    def body():
        found = []
        for placement, graph in itertools.product(PLACEMENTS, (False, True)):
            mpdp.seed(1)
            model = nn.Sequential(nn.Linear(12, 160), nn.LayerNorm(160), nn.ReLU(), nn.Linear(160, 4))
            trainer = mpdp.Trainer(
                model, nn.cross_entropy, optim.LAMB(0.01), precision=precision, placement=placement,
                accumulate=2, clip_norm=0.1, chunk_bytes=16384, graph=False, ema=0.75,
            )  # fmt: skip
            if graph:
                trainer.world.axis("data").capturable = True
                capture(trainer)
            for step in range(6):
                x, y = samples("float32", step, 2 * n)
                trainer.step((x[trainer.world.rank :: n], y[trainer.world.rank :: n]))
            trainer.settle()
            found.append(bits(trainer))
            assert not graph or trainer.updates.graphs.captures == 2
        return found

    first, *others = threads.run(body, n, devices=["cpu"] * n)[0]
    for other in others:
        assert other == first


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_gradient_that_is_not_finite_is_named_on_all_ranks_and_nothing_is_updated(placement, graph):
    def body():
        model = nn.Sequential(nn.Linear(12, 400), Explodes(), nn.Linear(400, 4))
        trainer = mpdp.Trainer(
            model, nn.cross_entropy, optim.SGD(0.1), placement=placement, chunk_bytes=16384, graph=False
        )
        if graph:
            trainer.world.axis("data").capturable = True
            capture(trainer)
        x, y = samples("float32", 0, 4)
        for _ in range(4):
            trainer.step((x, y))
        trainer.settle()
        before = trainer.parallel.weights.copy()
        if trainer.world.rank == 1:
            x[:, 0] = 1e9
        with (
            np.errstate(all="ignore"),
            pytest.raises(NonFiniteError, match=r"NaN or infinity first in 0\.bias"),
        ):
            for _ in range(3):
                trainer.step((x, y))
        assert trainer.parallel.weights.tobytes() == before.tobytes() and trainer.step_count == 4
        assert not graph or trainer.updates.graphs.captures == 1
        return True

    assert all(threads.run(body, 3, devices=["cpu"] * 3))


@pytest.mark.parametrize("reduce_dtype", ["float16", "bfloat16", "float64"])
def test_gradients_of_other_dtypes(reduce_dtype):
    def body():
        return [
            bits(train("momentum", "bfloat16", p, reduce_dtype=reduce_dtype, steps=2)) for p in PLACEMENTS
        ]

    replicated, *others = threads.run(body, 3, devices=["cpu"] * 3)[0]
    assert others == [replicated] * 2


def test_frozen_and_thawed_parameters_keep_weights_and_moments():
    def body():
        found = []
        for precision, placement in itertools.product(("float32", "bfloat16"), PLACEMENTS):
            trainer = train("adamw", precision, placement, steps=2)
            trainer.freeze("middle.weight", "norm.bias")
            step(trainer, 5)
            trainer.thaw("middle.weight", "frozen.weight")
            step(trainer, 6)
            trainer.check_replicas()
            found.append(bits(trainer))
        return found

    found = threads.run(body, 3, devices=["cpu"] * 3)[0]
    for first, *others in (found[:3], found[3:]):
        assert others == [first] * 2


def step(trainer, number):
    x, y = samples("float32", number)
    trainer.step((x[trainer.world.rank :: trainer.world.size], y[trainer.world.rank :: trainer.world.size]))


def test_a_checkpoint_fits_every_placement_and_number_of_ranks(tmp_path):
    """What is saved at n = 4 goes on at 1, 2 and 3, wherever the state lies there."""

    def written(precision, folder):
        found = []
        for placement in PLACEMENTS:
            mpdp.seed(0)
            trainer = mpdp.Trainer(
                Net(), nn.cross_entropy, optim.AdamW(0.01), precision=precision, placement=placement,
                chunk_bytes=32768, run_dir=folder / placement,
            )  # fmt: skip
            step(trainer, 0)
            step(trainer, 1)
            trainer.save()
            found.append(bits(trainer)[:2] if trainer.world.rank == 0 else bits(trainer))
        return found

    def read(precision, folder):
        found = []
        for of, placement in zip(PLACEMENTS, PLACEMENTS[1:] + PLACEMENTS[:1]):
            trainer = mpdp.Trainer(
                Net(), nn.cross_entropy, optim.AdamW(0.01), precision=precision, placement=placement,
                chunk_bytes=65536, run_dir=folder / of,
            )  # fmt: skip
            assert trainer.resume() and trainer.step_count == 2
            trainer.check_replicas()
            found.append(bits(trainer)[:2] if trainer.world.rank == 0 else bits(trainer))
            step(trainer, 2)
        return found

    for precision in ("float32", "bfloat16"):
        folder = tmp_path / precision
        saved = threads.run(lambda p=precision, f=folder: written(p, f), 4, devices=["cpu"] * 4)[0]
        assert saved == [saved[0]] * 3
        for n in (1, 2, 3):
            resumed = threads.run(lambda p=precision, f=folder: read(p, f), n, devices=["cpu"] * n)[0]
            assert resumed == [saved[0]] * 3


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_optimizer_memory_and_bytes_sent_are_as_the_formulas_say(n):
    """A spy stands in the place of the communicator's collectives; the record of a step is not counted."""

    def body():
        found = {}
        for precision, placement in itertools.product(("float32", "bfloat16"), PLACEMENTS):
            trainer = train("adamw", precision, placement, steps=1, chunk_bytes=65536)
            trainer.model.head = 0
            with Traffic(trainer.parallel.comm) as traffic:
                step(trainer, 1)
            parallel = trainer.parallel
            found[precision, placement] = (
                traffic.sent["bulk"], trainer.memory()["optimizer"], parallel.layout.trainable_size,
                len(parallel.reducer.chunks),
                sum(e.stop - e.start for e in parallel.layout.trainable if len(e.shape) == 1),
            )  # fmt: skip
        return found

    ranks = threads.run(body, n, devices=["cpu"] * n)
    for (precision, placement), (_, _, elements, chunks, small) in ranks[0].items():
        sent, memory, *_ = zip(*(found[precision, placement] for found in ranks))
        gradients, copies = 4 * elements, (4 if precision == "float32" else 2) * elements
        whole, span = 8 * elements, 8 * SPAN  # two moments
        if placement == "replicated" or n == 1:
            assert memory == (whole,) * n
            assert max(abs(bytes_ - 2 * gradients * (n - 1) / n) for bytes_ in sent) <= chunks
        elif placement == "root":
            assert memory == (whole, *[0] * (n - 1))
            assert sent == ((n - 1) * 4 * elements, *[gradients] * (n - 1))
        else:
            assert sum(memory) == whole
            assert max(abs(bytes_ - whole / n) for bytes_ in memory) <= chunks * span
            beside = 2 * 4 * small * (n - 1) // n if precision == "bfloat16" else 0
            for bytes_, held in zip(sent, memory):
                own = held // 8  # elements
                scattered, gathered = gradients - 4 * own, copies // elements * own * (n - 1)
                assert bytes_ == scattered + gathered + beside
            mean = (gradients + copies) * (n - 1) / n + beside
            assert abs(sum(sent) / n - mean) < 1


def test_a_placement_that_is_none_or_differs_between_ranks_is_an_error_on_all():
    def body():
        world = mpdp.init()
        with pytest.raises(ValueError, match="placement: expected one of replicated, root, sharded, got 'x'"):
            mpdp.DataParallel(nn.Linear(2, 2), world, placement="x")
        for wrap in (
            mpdp.DataParallel,
            lambda model, **how: mpdp.Trainer(model, nn.mse, optim.SGD(0.1), **how),
        ):
            with pytest.raises(DisagreementError, match="placement"):
                wrap(nn.Linear(2, 2), world=world, placement="root" if world.rank else "sharded")
        return True

    assert all(threads.run(body, 2, devices=["cpu"] * 2))


def test_masters_in_slices_are_shown_not_given():
    def body():
        trainer = train("adamw", "bfloat16", "sharded", steps=2)
        state, model = trainer.parallel.state_dict(), trainer.model
        assert (state is None) == (trainer.world.rank > 0)
        matrix, bias, frozen = model.middle.weight, model.norm.bias, model.frozen.weight
        assert matrix.data.dtype.name == "bfloat16" and bias.data.dtype == frozen.data.dtype == "float32"
        if state is not None:
            assert {array.dtype.name for name, array in state.items() if "batch" not in name} == {"float32"}
            assert np.array_equal(state["middle.weight"].astype(matrix.data.dtype), matrix.data)
            assert np.array_equal(state["norm.bias"], bias.data)
        for parameter in (matrix, bias):
            with pytest.raises(ValueError, match="read-only"):
                parameter.data[...] = 0
            with pytest.raises(ValueError, match=r"got '.*' under placement="):
                parameter.data = np.zeros(parameter.shape, "float32")
        frozen.data[...] = 0.5  # nobody updates it, so every rank has it
        trainer.parallel(samples("float32", 0)[0])
        assert (trainer.parallel._replica.copies[frozen_range(trainer)] == 0.5).all()
        with working_copies(), pytest.raises(ValueError, match=r"one axis .* of shape \(160, 160\)"):
            matrix.astype("float32")
        with working_copies():
            assert np.array_equal(bias.astype("float32").data, bias.data)
        return True

    assert all(threads.run(body, 2, devices=["cpu"] * 2))


def frozen_range(trainer):
    entry = trainer.parallel.layout["frozen.weight"]
    return slice(entry.start, entry.stop)


def test_a_timeline_shows_both_rows_of_messages():
    def body():
        trainer = train("adamw", "bfloat16", "sharded", steps=1)
        with Timeline(trainer.parallel, steps=1) as timeline:
            step(trainer, 1)
        (spans,) = timeline.steps
        return {span.name for span in spans if span.row == "bulk"}

    for names in threads.run(body, 2, devices=["cpu"] * 2):
        for i in range(3):
            assert {f"start chunk {i}", f"wait for chunk {i}", f"start weights {i}"} <= names


@pytest.mark.parametrize(
    ("precision", "name"),
    [
        ("float32", "weight of middle.bias"),
        ("bfloat16", "weight of middle.bias"),
        ("float16", "working copy of"),
    ],
)
def test_a_flipped_bit_in_what_all_ranks_have_is_named(precision, name):
    def body():
        trainer = train("adamw", precision, "sharded", steps=1)
        if trainer.world.rank == 1:
            parameter = trainer.model.middle.weight if "copy" in name else trainer.model.middle.bias
            there = parameter._copy if "copy" in name else parameter._data
            there.reshape(-1)[:1].view(np.uint8)[0] ^= 1
        with pytest.raises(DivergenceError, match=rf"got a different {name}.* on rank 1"):
            trainer.check_replicas()
        return True

    assert all(threads.run(body, 3, devices=["cpu"] * 3))
