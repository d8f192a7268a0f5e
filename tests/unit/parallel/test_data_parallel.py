"""DataParallel on one rank: updates, forms of losses, generations, plans, and what a broken update leaves behind."""

import gc

import numpy as np
import pytest

import mpdp
from mpdp import autodiff, nn, optim
from mpdp.autodiff import Tape
from mpdp.parallel.forms import leading_length, split_loss

X = np.random.default_rng(0).standard_normal((6, 4)).astype("float32")
Y = np.array([0, 1, 2, 0, 1, 2])


def wrapped(**options):
    mpdp.seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return mpdp.DataParallel(model, **options)


@pytest.mark.parametrize("world", [2, "comm"])
def test_a_world_is_no_communicator(world):
    world = mpdp.init().comm if world == "comm" else world
    for wrap in (
        mpdp.DataParallel,
        lambda model, world: mpdp.Trainer(model, nn.cross_entropy, optim.SGD(lr=0.1), world=world),
    ):
        with pytest.raises(
            TypeError, match=r"world: expected what mpdp.init\(\) returns, got .*; leave it out"
        ):
            wrap(nn.Linear(2, 2), world)


def test_parameters_are_views_that_never_move():
    parallel = wrapped()
    optimizer = optim.SGD(lr=0.1, momentum=0.9)
    places = {n: (p.data.ctypes.data, p.grad.ctypes.data) for n, p in parallel.parameters.items()}
    for _ in range(3):
        parallel.backward(nn.cross_entropy(parallel(X), Y))
        parallel.step(optimizer)
    assert places == {n: (p.data.ctypes.data, p.grad.ctypes.data) for n, p in parallel.parameters.items()}
    for name, parameter in parallel.parameters.items():
        assert np.shares_memory(parameter.data, parallel.weights), name
        assert np.shares_memory(parameter.grad, parallel.arena.array), name


def test_a_value_set_from_outside_lands_in_the_arena():
    parallel = wrapped()
    parallel.parameters["0.weight"].data = np.full((5, 4), 2.0, dtype="float32")
    assert np.all(parallel.layout.view(parallel.weights, "0.weight") == 2.0)


def test_micro_batches_add_up_to_the_whole():
    whole, parts = wrapped(), wrapped()
    a, b = optim.SGD(lr=0.1), optim.SGD(lr=0.1)
    whole.backward(nn.cross_entropy(whole(X), Y))
    loss = whole.step(a)
    for start, stop in ((0, 1), (1, 4), (4, 6)):
        parts.backward(nn.cross_entropy(parts(X[start:stop]), Y[start:stop]), final=stop == 6)
    assert parts.step(b) == pytest.approx(loss, rel=1e-6)
    for p, q in zip(whole.parameters.values(), parts.parameters.values()):
        np.testing.assert_allclose(p.data, q.data, rtol=1e-6, atol=1e-7)


def test_a_chunk_starts_right_after_the_operation_that_finishes_it(monkeypatch):
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(90, 90), nn.Tanh())])
    parallel = mpdp.DataParallel(model, chunk_bytes=1)
    reducer, done, started = parallel.reducer, [], []
    run, start = Tape._run, parallel.comm.start_all_reduce

    def running(tape, i, *arguments):
        run(tape, i, *arguments)
        done.append(i)

    def starting(array, **options):
        started.append(done[-1])
        return start(array, **options)

    x = np.ones((3, 90), "float32")
    tape = Tape(parallel(x).sum())
    position = {leaf.name: at for leaf, at in tape.last_write.items()}
    monkeypatch.setattr(Tape, "_run", running)
    monkeypatch.setattr(parallel.comm, "start_all_reduce", starting, raising=False)
    parallel.backward(parallel(x).sum(), count=3)
    expected = [
        max(position[e.name] for e in parallel.layout.trainable if e.start < stop)
        for _, stop in reducer.chunks
    ]
    assert started == expected
    assert len(set(expected)) == 6 and expected[0] < len(done) // 3  # long before the end


def test_the_power_of_two_changes_no_bits():
    results = []
    for nominal in (1, 6, 1000):
        parallel = wrapped(nominal_count=nominal)
        parallel.backward(nn.cross_entropy(parallel(X), Y))
        parallel.step(optim.SGD(lr=0.1))
        results.append(parallel.weights.tobytes())
    assert len(set(results)) == 1


def test_parameters_without_elements_make_an_update_too():
    class Empty(nn.Module):
        def __init__(self):
            self.weight = nn.Parameter(np.zeros((0,), "float32"))

        def forward(self, x):
            return x.sum() + self.weight.sum()

    parallel = mpdp.DataParallel(Empty())
    parallel.backward(parallel(autodiff.Tensor(X)))
    assert parallel.step(optim.SGD(lr=0.1)) == pytest.approx(X.sum(), rel=1e-6)
    assert parallel.step_count == 1


def test_forms_of_losses():
    parallel = wrapped()
    output = parallel(X)
    loss = nn.cross_entropy(output, Y)
    assert split_loss(loss, None)[1:] == (1.0, 6.0)
    assert split_loss((loss.sum, 6), None)[1:] == (1.0, 6.0)
    assert split_loss(output.mean(), 6)[1:] == (6.0, 6.0)
    with pytest.raises(ValueError, match=r"loss: expected a count beside a plain scalar, got none"):
        split_loss(output.mean(), None)
    with pytest.raises(ValueError, match=r"loss: expected a scalar, got shape \(6, 3\)"):
        split_loss(output, 6)
    for bad in (1.0, None, (1.0, 2), "x"):
        with pytest.raises(TypeError, match=r"loss: expected a scalar Tensor, a loss of mpdp.nn or a pair"):
            split_loss(bad, 6)
    for count in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"count: expected a finite number of 0 or more, got"):
            split_loss((loss.sum, count), None)
    assert leading_length((X,), {}) == leading_length((), {"x": X}) == 6
    with pytest.raises(
        ValueError, match=r"inputs: expected an array with a leading sample dimension, got none"
    ):
        leading_length((3,), {})


def test_step_needs_a_backward():
    with pytest.raises(
        ValueError,
        match=r"step: expected a backward\(\) with final=True before it, .*loss.backward\(\) reduces nothing",
    ):
        wrapped().step(optim.SGD(lr=0.1))


def test_one_optimizer_for_the_whole_run():
    parallel = wrapped()
    parallel.bind_optimizer(optim.SGD(lr=0.1))
    with pytest.raises(ValueError, match=r"optimizer: expected the one of the first step, got another"):
        parallel.bind_optimizer(optim.SGD(lr=0.1))


def test_a_broken_update_leaves_nothing_behind():
    """An exception inside backward: the next update is the one that would have come."""
    parallel, clean = wrapped(), wrapped()
    broken = nn.cross_entropy(parallel(X), Y)
    parallel.backward(broken, final=False)
    with pytest.raises(TypeError):
        parallel.backward("nonsense")
    optimizer, other = optim.SGD(lr=0.1, momentum=0.9), optim.SGD(lr=0.1, momentum=0.9)
    for p, o in ((parallel, optimizer), (clean, other)):
        for _ in range(2):
            p.backward(nn.cross_entropy(p(X), Y))
            p.step(o)
    assert parallel.weights.tobytes() == clean.weights.tobytes()


def test_a_model_of_two_dtypes_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype="float64"))
    with pytest.raises(
        TypeError, match=r"model: expected parameters of one dtype, got float32 in 0.weight and float64"
    ):
        mpdp.DataParallel(model)


def test_freeze_names_must_exist():
    with pytest.raises(ValueError, match=r"name: expected a parameter of the model, got 'nobody'"):
        wrapped().freeze("nobody")


def test_generations_keep_weights_and_the_moments_of_what_stays_trained():
    parallel = wrapped()
    optimizer = optim.Adam(lr=0.01)
    for _ in range(3):
        parallel.backward(nn.cross_entropy(parallel(X), Y))
        parallel.step(optimizer)
    weights = {n: p.data.copy() for n, p in parallel.parameters.items()}
    moment = parallel.layout.view(optimizer.state["mean"], "2.weight").copy()
    parallel.freeze("0.weight", "0.bias")
    assert parallel.layout.generation == 1
    assert [e.name for e in parallel.layout.trainable] == ["2.bias", "2.weight"]
    for name, value in weights.items():
        assert np.array_equal(parallel.parameters[name].data, value)
    assert np.array_equal(parallel.layout.view(optimizer.state["mean"], "2.weight"), moment)
    assert optimizer.updates.tolist() == [3, 3]
    parallel.backward(nn.cross_entropy(parallel(X), Y))
    parallel.step(optimizer)
    assert np.array_equal(parallel.parameters["0.weight"].data, weights["0.weight"])
    parallel.thaw("0.weight")
    assert dict(zip([e.name for e in parallel.layout.trainable], optimizer.updates.tolist())) == {
        "2.bias": 4,
        "2.weight": 4,
        "0.weight": 0,
    }


def test_plans_are_made_once_for_each_graph():
    class Branch(nn.Module):
        def __init__(self):
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)
            self.flag = True

        def forward(self, x):
            return self.a(x) if self.flag else self.b(x)

    model = Branch()
    parallel = mpdp.DataParallel(model)
    optimizer = optim.SGD(lr=0.1)
    for step in range(8):
        model.flag = step % 2 == 0
        parallel.backward(nn.cross_entropy(parallel(X), Y))
        parallel.step(optimizer)
    assert len(parallel._plans) == 2


def test_no_step_leaves_cycles_or_tapes_behind():
    parallel = wrapped()
    optimizer = optim.SGD(lr=0.1)

    def step():
        parallel.backward(nn.cross_entropy(parallel(X), Y))
        parallel.step(optimizer)

    step()
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            step()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_float16_gradients_are_gathered_in_float32():
    model = nn.Linear(4, 3, dtype="float16")
    parallel = mpdp.DataParallel(model)
    assert parallel.arena.array.dtype == "float32"
    parallel.backward(nn.cross_entropy(parallel(X.astype("float16")), Y))
    assert parallel.step(optim.SGD(lr=0.1)) > 0
    assert model.weight.data.dtype == "float16"


def test_positions_are_found_out_only_for_models_that_say_they_draw():
    class Noisy(nn.Module):
        def __init__(self):
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            context = autodiff.current_samples()
            seen.append((context.step, context.start, context.count))
            return self.linear(x)

    class Declared(Noisy):
        draws_samples = True

    seen = []
    with pytest.raises(ValueError, match=r"samples: expected a module that draws random numbers to say so"):
        mpdp.DataParallel(Noisy())(X)
    parallel = mpdp.DataParallel(Declared())
    parallel.backward(nn.cross_entropy(parallel(X), Y), final=False)
    parallel.backward(nn.cross_entropy(parallel(X), Y))
    parallel.step(optim.SGD(lr=0.1))
    parallel(X)
    assert seen == [(0, 0, 6), (0, 6, 6), (1, 0, 6)]
