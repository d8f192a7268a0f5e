"""Steps as graphs against eager steps: equal bits. On the CPU a graph is a function that is called again."""

from __future__ import annotations

import gc
import json
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from called_again import capture, equal_bits
from on_device import host, put, world, xp

import mpdp
from mpdp import autodiff, data, kernels, nn, optim
from mpdp.comm.activity import Activity
from mpdp.errors import CommunicationError, NonFiniteError
from mpdp.kernels.board import Report, Status
from mpdp.parallel.late_loss import LateLoss
from mpdp.training.updates import Updates, _close

UPDATES = 20


@pytest.fixture(autouse=True)
def _seed():
    """Leave other tests the default initial weights."""
    yield
    mpdp.seed(0)


RNG = np.random.default_rng(5)


class Net(nn.Module):
    """A static model of the user's own, with dropout and a layer norm."""

    static = True

    def __init__(self):
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 4)
        self.norm, self.dropout = nn.LayerNorm(16), nn.Dropout(0.25)

    def forward(self, x):
        return self.second(self.dropout(self.norm(self.first(x)).relu()))


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def normed():
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def sgd():
    return optim.SGD(lr=0.1, momentum=0.9)


def adamw():
    return optim.AdamW(
        lr=0.01, weight_decay=0.1, groups=[optim.Group("*.bias", lr_factor=2.0, weight_decay=0.0)]
    )


def lamb():
    return optim.LAMB(
        lr=0.05, weight_decay=0.1, groups=[optim.Group("*.bias", weight_decay=0.0)], unscaled=["*.bias"]
    )


def lion():
    return optim.Lion(lr=0.01, weight_decay=0.5)


def samples(count=52):
    x = np.random.default_rng(1).normal(size=(count, 6)).astype("float32")
    return x, (np.abs(x).argmax(axis=1) % 4).astype("int64")


def trainer_of(model=mlp, optimizer=sgd, loss=nn.cross_entropy, graph=True, **options):
    mpdp.seed(3)  # the same initial weights each time
    trainer = mpdp.Trainer(
        model(), loss, optimizer(), world=world(), schedule=optim.WarmupCosine(3, 40), graph=False, **options
    )
    if graph and trainer.world.device.kind == "cpu":
        capture(trainer)
    elif graph:
        trainer.updates = Updates(trainer, True)
    return trainer


def state_of(trainer):
    """Everything that training changes, as NumPy arrays."""
    trainer.settle()
    arrays = [host(trainer.parallel.weights), *map(host, trainer.optimizer.state_arrays().values())]
    average = trainer.parallel._replica.average
    if average is not None:
        arrays.append(host(average.array))
    return arrays + [host(buffer.data) for buffer in trainer.parallel.buffers.values()]


def same(one, other):
    return all(equal_bits(a, b) for a, b in zip(state_of(one), state_of(other), strict=True))


CASES = [
    (mlp, sgd, {"clip_norm": 0.5}),
    (mlp, adamw, {"accumulate": 3}),
    (Net, adamw, {"clip_norm": 0.1, "accumulate": 3}),
    (Net, sgd, {}),
    (normed, sgd, {"accumulate": 2}),
    (mlp, lambda: optim.Adam(lr=0.01, weight_decay=0.1), {"precision": "bfloat16"}),
    (
        mlp,
        sgd,
        {
            "precision": "float16",
            "loss_scale": optim.LossScale(initial=2.0**18, interval=4),
            "clip_norm": 1.0,
        },
    ),
    (mlp, sgd, {"precision": "float64"}),
    (mlp, lamb, {"clip_norm": 0.5, "ema": 0.9}),
    (normed, lamb, {"precision": "bfloat16", "clip_value": 0.01}),
    (Net, lion, {"accumulate": 3, "clip_value": 0.02}),
    (mlp, sgd, {"clip_value": 0.01, "clip_norm": 1.0, "ema": 0.75, "precision": "bfloat16"}),
    (
        mlp,
        lambda: optim.LAMB(lr=0.05),
        {"precision": "float16", "loss_scale": optim.LossScale(initial=2.0**18, interval=4), "ema": 0.9},
    ),
]


@pytest.mark.parametrize(("model", "optimizer", "options"), CASES)
def test_graphs_have_the_bits_of_eager_steps(device, model, optimizer, options):
    runs = []
    for graph in (False, True):
        trainer = trainer_of(model, optimizer, graph=graph, **options)
        dataset = data.ArrayDataset(*samples())
        history = trainer.fit(dataset, updates=UPDATES, global_batch_size=15)
        runs.append((trainer, history))
    (eager, expected), (captured, history) = runs
    assert same(eager, captured) and history == expected and captured.loss == eager.loss
    assert captured.updates.graphs.captures > 0 and captured.step_count == eager.step_count == UPDATES
    assert captured.parallel.last_count == eager.parallel.last_count


@pytest.mark.parametrize("graph", [False, True])
def test_nothing_but_the_loss_holds_the_output_in_backward(device, graph, monkeypatch):
    owned = []
    kind = type(kernels.for_device(world().device))
    forward, backward = kind.cross_entropy, kind.cross_entropy_backward
    on_cpu = world().device.kind == "cpu"

    def with_logits(self, logits, *others):  # there backward needs other arrays
        total, saved = forward(self, logits, *others)
        return total, (logits, saved)

    def watched(self, g, saved, own=False):
        owned.append(own)
        return backward(self, g, saved[1] if on_cpu else saved, own)

    if on_cpu:
        monkeypatch.setattr(kind, "cross_entropy", with_logits)
    monkeypatch.setattr(kind, "cross_entropy_backward", watched)
    trainer = trainer_of(graph=graph)
    x, y = samples(12)
    for _ in range(6):
        trainer.step((x, y))
    trainer.settle()
    assert owned and all(owned)
    assert not graph or trainer.updates.graphs.captures > 0


def test_mse_and_losses_of_a_program(device):
    def plain(output, target):
        return ((output - target) ** 2).sum(axis=1).mean()

    def pair(output, target):
        return ((output - target) ** 2).sum(), 2.0 * len(target)

    x, _ = samples(30)
    y = RNG.normal(size=(30, 4)).astype("float32")
    for loss in (nn.mse, plain, pair):
        trainers = [trainer_of(loss=loss, graph=graph) for graph in (False, True)]
        for trainer in trainers:
            losses = [float(trainer.step((put(x), put(y)))) for _ in range(8)]
            assert losses[-1] < losses[0]
        assert same(*trainers) and trainers[1].updates.graphs.captures == 1


def test_a_step_returns_before_its_loss_is_asked_for(device):
    trainer = trainer_of()
    batch = tuple(map(put, samples(16)))
    losses = [trainer.step(batch) for _ in range(6)]
    assert all(type(loss) is float for loss in losses[:2])
    assert not any(type(loss) is float for loss in losses[2:])
    assert [float(loss) for loss in losses] == sorted(losses, reverse=True)
    assert trainer.loss == losses[-1] and losses[-1] > 0 and f"{losses[3]:.3f}" == f"{float(losses[3]):.3f}"
    assert trainer.optimizer.updates.tolist() == [6] * 4


def test_inputs_of_every_form(device):
    class Two(nn.Module):
        static = True

        def __init__(self):
            self.a, self.b = nn.Linear(3, 4), nn.Linear(2, 4)

        def forward(self, left, right, scale=None):
            out = self.a(left) + self.b(right)
            return out if scale is None else out * scale

    x, y = samples(24)
    left, right, scale = x[:, :3].copy(), x[:, 3:5], np.abs(x[:, 5:]).copy()  # the second is no row of bytes
    for batch in [
        (left, right, y),
        ((left, right), y),
        {"left": left, "right": right, "scale": scale, "target": y},
    ]:
        batch = {k: put(v) for k, v in batch.items()} if isinstance(batch, dict) else batch
        trainers = [trainer_of(Two, graph=graph) for graph in (False, True)]
        for trainer in trainers:
            for _ in range(5):
                trainer.step(batch)
        assert same(*trainers) and trainers[1].updates.graphs.captures == 1


def _spoilt_forward(k, x):
    return x.copy(), x


def _spoilt_backward(k, x, g, wants):
    return (k.xp.where(x > 1e3, x.dtype.type(np.nan), g),)


spoilt = autodiff.register("spoilt", _spoilt_forward, _spoilt_backward)


class Spoilt(nn.Module):
    """Gives a gradient that is not finite where its input is large."""

    static = True

    def forward(self, x):
        return spoilt(x)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_number_that_is_not_finite_is_an_error_two_steps_later(device, what):
    def model():
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), Spoilt(), nn.Linear(16, 4))

    x, y = samples(16)
    bad = x.copy()
    bad[3, 2] = np.nan if what == "loss" else 1e6
    eager, captured = trainer_of(model, adamw, graph=False), trainer_of(model, adamw)
    for trainer in (eager, captured):
        for _ in range(5):
            trainer.step((put(x), put(y)))
    with pytest.raises(NonFiniteError, match=f"{what}: expected .* at step 5") as first:
        eager.step((put(bad), put(y)))
    with pytest.raises(NonFiniteError, match="at step 5") as second:
        for batch in (bad, x, x):
            captured.step((put(batch), put(y)))
    assert str(first.value) == str(second.value)
    assert same(eager, captured) and captured.step_count == 5
    for trainer in (eager, captured):
        for _ in range(5):
            trainer.step((put(x), put(y)))
    assert same(eager, captured) and captured.updates.graphs.captures == 2


def test_the_error_comes_with_the_loss_when_it_is_asked_for(device):
    trainer = trainer_of()
    x, y = samples(16)
    for _ in range(4):
        trainer.step((put(x), put(y)))
    x[0] = np.nan
    loss = trainer.step((put(x), put(y)))
    with pytest.raises(
        NonFiniteError, match=r"loss: expected a finite sum at step 4, got nan \(from rank 0\)"
    ):
        float(loss)
    assert trainer.step_count == 4


def test_a_bad_label_in_a_graph(device):
    if device.kind == "cpu":
        pytest.skip("a CPU checks labels before it computes anything")
    eager, captured = trainer_of(graph=False), trainer_of()
    x, y = samples(16)
    for trainer in (eager, captured):
        for _ in range(5):
            trainer.step((put(x), put(y)))
    wrong = y.copy()
    wrong[7] = 12
    with pytest.raises(ValueError, match=r"expected class indices in 0\.\.3, got 12 at sample 7.*in step 5"):
        for labels in (wrong, y, y):
            captured.step((put(x), put(labels)))
    assert captured.step_count == 5 and same(eager, captured)
    for trainer in (eager, captured):
        for _ in range(4):
            trainer.step((put(x), put(y)))
    assert same(eager, captured)


def test_the_log_is_whole_at_the_end_of_a_loop_of_ones_own(device, tmp_path):
    for end in ("forgotten", "closed"):
        trainer = trainer_of(run_dir=tmp_path / end)
        batch = tuple(map(put, samples(16)))
        for _ in range(7):
            trainer.step(batch)
        assert trainer.updates.graphs.under_way
        if end == "closed":  # as at the end of the program
            _close(weakref.ref(trainer.updates))
        else:
            del trainer
            gc.collect()
        rows = [json.loads(line) for line in (tmp_path / end / "log.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, 8))


def test_an_update_that_has_failed_is_not_in_the_log(device, tmp_path):
    trainer = trainer_of(run_dir=tmp_path)
    x, y = samples(16)
    for _ in range(4):
        trainer.step((put(x), put(y)))
    trainer.step((put(np.full_like(x, np.nan)), put(y)))
    trainer.updates.close()
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 4


def test_what_a_check_finds_belongs_to_an_update_under_way():
    """On the CPU a check raises at once, so a stand-in finds something as a GPU does: while others are under way."""
    trainer = trainer_of()
    batch = samples(16)
    for _ in range(5):
        trainer.step(batch)
    graphs = trainer.updates.graphs
    found = iter([None, ValueError("embedding: found")])
    graphs._kernels = SimpleNamespace(pending_error=lambda: next(found, None), xp=np)
    trainer.step(batch)
    under_way = graphs.under_way
    assert under_way == 2
    trainer.step(batch)  # here it is found, in one of those that are under way
    with pytest.raises(ValueError, match="embedding: found"):
        trainer.settle()
    trainer.settle()
    assert trainer.optimizer.updates.tolist() == [7] * 4


def test_the_loss_of_an_update_that_has_failed_with_other_ranks(monkeypatch):
    """A mean, and the error later; no number at all where a sum was broken off, as a rank that is left may see it."""
    trainer = trainer_of()
    for _ in range(5):
        trainer.step(samples(16))
    graphs, report = trainer.updates.graphs, Report(Status.GRADIENT_LOST, 8.0, 16.0, 8.0, 0.0, 3, 5)
    monkeypatch.setattr(graphs, "_comm", SimpleNamespace(size=2, activity=Activity()))
    monkeypatch.setattr(graphs, "_wait", lambda update: report)
    assert trainer.loss == 0.5
    report = report._replace(status=Status.BROKEN)
    trainer.late_loss = LateLoss(graphs._settle_upto, graphs._pending[-1].update)
    with pytest.raises(CommunicationError, match=r"step: expected a sum .* broken off"):
        trainer.loss  # noqa: B018


def test_an_update_without_anything_to_count_changes_nothing(device):
    x, y = samples(16)
    nothing = np.full_like(y, -100)
    eager, captured = trainer_of(graph=False, optimizer=adamw), trainer_of(optimizer=adamw)
    for trainer in (eager, captured):
        for labels in (y, y, y, nothing, nothing, y, y, nothing, y):
            trainer.step((put(x), put(labels)))
    assert same(eager, captured) and captured.optimizer.updates.tolist() == [6] * 4
    assert captured.updates.graphs.captures == 1


def test_resumed_equals_not_stopped(device, tmp_path):
    dataset = data.ArrayDataset(*samples())
    whole = trainer_of(Net, adamw)
    whole.fit(dataset, updates=UPDATES, global_batch_size=15)
    first = trainer_of(Net, adamw, run_dir=tmp_path, save_every=9)
    first.fit(dataset, updates=11, global_batch_size=15)
    second = trainer_of(Net, adamw, run_dir=tmp_path)
    assert second.resume()
    second.fit(dataset, updates=UPDATES, global_batch_size=15)
    assert same(whole, second) and second.updates.graphs.captures > 0


def test_what_is_assigned_to_a_module_is_seen(device):
    eager, captured = trainer_of(Net, graph=False), trainer_of(Net)
    x, y = map(put, samples(16))
    for trainer in (eager, captured):
        for step in range(14):
            if step == 6:
                trainer.model.dropout.p = 0.5
            trainer.step((x, y))
    assert same(eager, captured) and captured.updates.graphs.captures == 2


def test_evaluation_between_steps_needs_no_new_capture(device):
    dataset = data.ArrayDataset(*samples())
    trainers = [trainer_of(Net, graph=graph) for graph in (False, True)]
    histories = [
        t.fit(dataset, epochs=6, global_batch_size=13, validation=dataset, metrics=[nn.accuracy])
        for t in trainers
    ]
    assert histories[0] == histories[1] and same(*trainers)
    assert trainers[1].updates.graphs.captures == 1


def test_metrics_of_training_batches(device):
    dataset = data.ArrayDataset(*samples())
    histories = [
        trainer_of(Net, graph=graph).fit(dataset, epochs=6, global_batch_size=13, metrics=[nn.accuracy])
        for graph in (False, True)
    ]
    assert histories[0] == histories[1]


def test_freezing_between_steps(device):
    trainers = [trainer_of(graph=graph, optimizer=sgd) for graph in (False, True)]
    batch = tuple(map(put, samples(16)))
    for trainer in trainers:
        for step in range(16):
            if step == 5:
                trainer.freeze("0.weight")
            if step == 11:
                trainer.thaw("0.weight")
            trainer.step(batch)
    assert same(*trainers) and trainers[1].updates.graphs.captures >= 2


def test_a_model_that_is_not_static_runs_eagerly_or_not_at_all(device, capsys):
    class Loose(nn.Module):
        def __init__(self):
            self.layer = nn.Linear(6, 4)

        def forward(self, x):
            return self.layer(x)

    trainer = trainer_of(Loose)
    batch = tuple(map(put, samples(16)))
    with pytest.raises(
        ValueError, match=r"graph: expected a step that can be captured.*the model \(Loose\) does not"
    ):
        trainer.step(batch)
    trainer.updates.graphs._required = False
    trainer.updates.graphs._off = False
    for _ in range(4):
        trainer.step(batch)
    assert trainer.updates.graphs.captures == 0 and trainer.step_count == 4


def test_what_cannot_be_captured_runs_eagerly():
    class Refuses:
        held_bytes = 0

        def make_room(self):
            pass

        def record(self, body):
            raise RuntimeError("operation not permitted when stream is capturing")

    eager, trainer = trainer_of(graph=False), trainer_of(graph=False)
    capture(trainer, required=False, recorder=Refuses())
    for each in (eager, trainer):
        for _ in range(6):
            each.step(samples(16))
    assert same(eager, trainer) and trainer.updates.graphs._off
    strict = trainer_of(graph=False)
    capture(strict, recorder=Refuses())
    for _ in range(2):
        strict.step(samples(16))
    with pytest.raises(RuntimeError, match="not permitted"):
        strict.step(samples(16))


def test_a_gpu_is_needed():
    with pytest.raises(ValueError, match=r'graph: expected "auto" or False on a CPU, got True; a GPU alone'):
        mpdp.Trainer(mlp(), nn.cross_entropy, sgd(), graph=True)
    assert mpdp.Trainer(mlp(), nn.cross_entropy, sgd()).updates.graphs is None


def test_arrays_of_a_batch_are_free_after_the_step(device):
    trainers = [trainer_of(graph=graph) for graph in (False, True)]
    x, y = samples(16)
    for trainer in trainers:
        for i in range(8):
            own = put(x + np.float32(i)), put(y)
            trainer.step(own)
            if device.kind == "cuda":
                own[0].fill(np.nan)  # behind the step, on the same stream
            del own
            xp.zeros((16, 6), np.float32).fill(7)
    assert same(*trainers)
