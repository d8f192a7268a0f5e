"""Saves in the background, parts by several ranks, the best checkpoint, state of callbacks, what a run folder says."""

import json
import math
import threading
import tracemalloc

import numpy as np
import pytest

import mpdp
import mpdp.threads
from mpdp import data, nn, optim
from mpdp.errors import CheckpointError
from mpdp.training import checkpoint, saving, snapshot

N, BATCH = 12, 4
X = np.random.default_rng(0).standard_normal((N, 4)).astype("float32")
Y = np.arange(N) % 3
DATA = data.ArrayDataset(X, Y)


def trainer(run_dir, model=None, **options):
    mpdp.seed(0)
    model = model or nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 3))
    return mpdp.Trainer(model, nn.cross_entropy, optim.Adam(lr=0.05), run_dir=run_dir, **options)


def fit(t, updates=None, epochs=None, **options):
    return t.fit(
        DATA,
        updates=updates,
        epochs=epochs,
        global_batch_size=BATCH,
        validation=DATA,
        progress=False,
        **options,
    )


def everything(t):
    state = {k: v.tobytes() for k, v in t.optimizer.state_arrays().items()}
    return state | {"weights": t.parallel.weights.tobytes(), "step": t.step_count}


def steps(run_dir):
    return sorted(c.step for c in checkpoint.found_below(run_dir / "checkpoints"))


class Held:
    """Holds every writer until it is released, or lets it fail."""

    def __init__(self, monkeypatch):
        self.go, self.error, self.own = threading.Event(), None, checkpoint.save_file
        monkeypatch.setattr(checkpoint, "save_file", self)

    def __call__(self, arrays, path):
        assert self.go.wait(20)
        if self.error is not None:
            raise self.error
        self.own(arrays, path)


class Told(mpdp.Callback):
    def __init__(self):
        self.paths = []

    def on_checkpoint(self, trainer, path):
        assert checkpoint.load(checkpoint.read(path))
        self.paths.append((trainer.step_count, path))


def test_a_background_save_holds_the_moment_it_was_asked_for(tmp_path, monkeypatch):
    held, told = Held(monkeypatch), Told()
    t = trainer(tmp_path, callbacks=[told])
    fit(t, 2)
    then = everything(t)
    path = t.save(wait=False)
    for _ in range(3):
        t.step((X[:4], Y[:4]))
    assert not path.exists() and told.paths == []
    held.go.set()
    t.saves._job._thread.join(20)
    t.step((X[:4], Y[:4]))
    assert told.paths == [(6, path)] and not t.saves.under_way
    other = trainer(tmp_path)
    assert other.resume() and everything(other) == then


def test_one_save_is_under_way_at_the_most_and_fit_ends_with_none(tmp_path, monkeypatch):
    running, most, lock = [0], [0], threading.Lock()
    own = checkpoint.save_file

    def save_file(arrays, path):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        own(arrays, path)
        with lock:
            running[0] -= 1

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    told = Told()
    t = trainer(tmp_path, save_every=1, async_save=True, callbacks=[told], keep=20)
    fit(t, 9)
    assert not t.saves.under_way and most == [1]
    assert steps(tmp_path) == list(range(1, 10))
    assert [path.name.split("-")[1] for _, path in told.paths] == [f"{i:010d}" for i in range(1, 10)]
    whole = trainer(None)
    fit(whole, 9)
    assert everything(t) == everything(whole)


@pytest.mark.parametrize("call", ["step", "save", "evaluate", "predict", "resume", "fit"])
def test_the_next_call_raises_what_the_writer_met_and_training_may_go_on(tmp_path, monkeypatch, call):
    t = trainer(tmp_path, keep=20)
    fit(t, 1)
    good = t.save()
    fit(t, 2)
    held = Held(monkeypatch)
    held.error = OSError(28, "No space left on device")
    t.save(wait=False)
    job = t.saves._job
    held.go.set()
    job._thread.join(20)
    with pytest.raises(
        CheckpointError, match=r"checkpoint: expected to write below .*No space left on device"
    ):
        {
            "step": lambda: t.step((X[:4], Y[:4])),
            "save": t.save,
            "evaluate": lambda: t.evaluate(DATA),
            "predict": lambda: t.predict(DATA),
            "resume": t.resume,
            "fit": lambda: fit(t, 3),
        }[call]()
    assert list(good.parent.iterdir()) == [good]
    monkeypatch.undo()
    if call == "step":  # the update was done, and is counted
        assert t.step_count == 3
    assert t.save().is_dir() and len(steps(tmp_path)) == 2


def test_a_failure_inside_fit_leaves_the_run_where_it_can_go_on(tmp_path, monkeypatch):
    whole = trainer(None)
    fit(whole, 9)
    own, calls = checkpoint.save_file, []

    def save_file(arrays, path):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        own(arrays, path)

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    t = trainer(tmp_path, save_every=2, async_save=True, keep=20)
    with pytest.raises(CheckpointError, match=r"No space left"):
        fit(t, 9)
    fit(t, 9)
    assert everything(t) == everything(whole)
    assert [row["loss"] for row in t.history] == [row["loss"] for row in whole.history]
    assert 9 in steps(tmp_path) and 4 not in steps(tmp_path)


def test_the_copy_is_given_back(tmp_path):
    model = nn.Linear(1000, 2000)
    t = trainer(tmp_path, model)
    t.save(wait=False)
    t.saves.finish()
    nbytes = 3 * 4 * model.weight.size
    tracemalloc.start()
    try:
        t.save(wait=False)
        held = tracemalloc.get_traced_memory()[0]
        t.saves.finish()
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert nbytes * 0.9 < held and peak < nbytes * 1.2
    assert left < nbytes * 0.02


def wide():
    return nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 3))


def split(trainer):
    """As three ranks would write that hold a third each, cut in the middle of parameters."""
    comm, size = trainer.world.axis("data"), trainer.parallel.layout.trainable_size
    if comm.size == 1:
        return [(0, size)]
    bounds = [size * r // comm.size // 7 * 7 for r in range(comm.size)] + [size]
    return [(bounds[comm.rank], bounds[comm.rank + 1])]


@pytest.mark.parametrize("wait", [True, False])
def test_any_rank_may_write_a_part(tmp_path, monkeypatch, wait):
    monkeypatch.setattr(snapshot, "written_ranges", split)

    def rank():
        t = trainer(tmp_path, wide())
        t.step((np.ones((2, 40), "float32"), np.zeros(2, int)))
        path = t.save(wait=wait)
        t.saves.finish()
        return path, everything(t)

    results = mpdp.threads.run(rank, 3)
    path = results[0][0]
    assert {result[0] for result in results} == {path}
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json"] + [
        f"part-0000{r}.safetensors" for r in range(3)
    ]
    other = trainer(tmp_path, wide())
    assert other.resume() and everything(other) == results[0][1]


def large(precision):
    model = nn.Sequential(nn.Linear(40, 400), nn.ReLU(), nn.Linear(400, 3), nn.BatchNorm1d(3))
    model[0].bias.requires_grad = False
    return model


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("placement", "other"), [("sharded", "replicated"), ("root", "sharded"), ("replicated", "sharded")]
)
def test_what_one_placement_saves_another_takes_up(tmp_path, placement, other, precision):
    def rank(where, size, resume):
        def run():
            t = trainer(
                where,
                large(precision),
                placement=other if resume else placement,
                precision=precision,
                ema=0.9,
            )
            if resume:
                assert t.resume(resume)
            else:
                for i in range(3):
                    t.step((np.full((2, 40), i, "float32"), np.arange(2)))
            path = t.save(wait=resume is None)
            t.saves.finish()
            return path, t.model.state_dict(), len(snapshot.written_ranges(t))

        return mpdp.threads.run(run, size)

    first = rank(tmp_path / "first", 3, None)
    again = rank(tmp_path / "again", 2, first[0][0])
    a, b = (checkpoint.load(checkpoint.read(results[0][0])) for results in (first, again))
    assert "average/0.weight" in a and not np.array_equal(a["average/0.weight"], a["weights/0.weight"])
    assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
    parts = {piece.file for piece in checkpoint.read(first[0][0]).pieces}
    assert len(parts) == (3 if placement == "sharded" else 1)
    if precision == "float32":
        assert all(np.array_equal(a[f"weights/{name}"], first[2][1][name]) for name in ("0.weight", "2.bias"))


@pytest.mark.parametrize("wait", [True, False])
def test_rank_0_may_have_nothing_to_write(tmp_path, wait):
    def rank():
        t = trainer(tmp_path, nn.Linear(2000, 3, bias=False), placement="sharded")  # two spans, three ranks
        path = t.save(wait=wait)
        t.saves.finish()
        return path, snapshot.written_ranges(t)

    results = mpdp.threads.run(rank, 3)
    assert results[0][1] == []
    found = checkpoint.load(checkpoint.read(results[0][0]))
    assert np.array_equal(
        found["weights/weight"], trainer(None, nn.Linear(2000, 3, bias=False)).model.weight.data
    )


@pytest.mark.parametrize("wait", [True, False])
def test_a_part_that_one_rank_cannot_write_is_an_error_on_all(tmp_path, monkeypatch, wait):
    monkeypatch.setattr(snapshot, "written_ranges", split)
    own = checkpoint.save_file

    def save_file(arrays, path):
        if path.name.startswith("part-00002"):
            raise OSError(28, "No space left on device")
        own(arrays, path)

    monkeypatch.setattr(checkpoint, "save_file", save_file)

    def rank():
        t = trainer(tmp_path, wide())
        batch = np.ones((2, 40), "float32"), np.zeros(2, int)
        t.step(batch)
        with pytest.raises(CheckpointError, match=r"No space left on device.*\(on rank 2 of 3\)"):
            t.save(wait=wait)
            for _ in range(1000):
                t.step(batch)
        return t.step_count

    assert len(set(mpdp.threads.run(rank, 3))) == 1
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_rank_0_writes_all_where_others_do_not_see_the_folder(tmp_path, monkeypatch, capfd):
    own = saving.Saves._all_see
    monkeypatch.setattr(
        saving.Saves, "_all_see",
        lambda self, folder: own(self, folder if mpdp.init().rank == 0 else folder / "not mounted here"),
    )  # fmt: skip

    def rank():
        t = trainer(tmp_path, wide(), placement="sharded", ema=0.9)
        for _ in range(2):
            t.step((np.ones((2, 40), "float32"), np.zeros(2, int)))
            path = t.save(wait=False)
        t.saves.finish()
        return path, t.parallel.weights.tobytes()

    results = mpdp.threads.run(rank, 3)
    path = results[0][0]
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "part-00000.safetensors"]
    assert capfd.readouterr().err.count("save: 2 ranks do not see the run's folder: rank 0 collects") == 1
    other = trainer(tmp_path, wide(), ema=0.9)
    assert other.resume(path) and other.parallel.weights.tobytes() == results[0][1]
    assert other.parallel._replica.average.started


class Scores:
    """A metric that says what it is told."""

    def __init__(self, values):
        self.values, self.epoch = values, 0
        self.__name__ = "score"

    def __call__(self, output, target):
        return self.values[self.epoch] * len(target), len(target)


class Next(mpdp.Callback):
    def __init__(self, scores):
        self.scores = scores

    def on_epoch(self, trainer):
        self.scores.epoch += 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_best_is_kept_beside_the_newest(tmp_path, asynchronous):
    scores = Scores([0.5, math.nan, 0.9, 0.2, 0.9, 0.3, 0.1])
    model = nn.models.mlp((4, 5, 3))
    t = trainer(
        tmp_path, model, save_every=3, keep=2, keep_best="score", best_mode="max", async_save=asynchronous,
        callbacks=[Next(scores)],
    )  # fmt: skip
    weights = {}

    class Note(mpdp.Callback):
        def on_epoch(self, trainer):
            weights[trainer.epoch] = model[0].weight.numpy().copy()

    t.callbacks = (*t.callbacks, Note())
    fit(t, epochs=7, metrics=[scores])
    best = mpdp.best_checkpoint(tmp_path)
    assert checkpoint.read(best).metrics["score"] == pytest.approx(0.9)
    assert checkpoint.read(best).step == 9  # the first of two equal ones
    assert steps(tmp_path) == [9, 18, 21]
    assert np.array_equal(mpdp.load_model(tmp_path, best=True)[0].weight.data, weights[3])
    assert np.array_equal(mpdp.load_model(tmp_path)[0].weight.data, weights[7])
    assert t.resume(best) and t.epoch == 3 and t.position.batch == 0


def test_a_best_that_cannot_be_known_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"best_mode: expected \"min\" or \"max\" beside metric 'accuracy'"):
        trainer(tmp_path, keep_best="accuracy")
    with pytest.raises(ValueError, match=r"keep_best: expected a run_dir to save in"):
        trainer(None, keep_best="loss")
    with pytest.raises(TypeError, match=r"keep_best: expected a name such as 'validation_loss', got 3"):
        trainer(tmp_path, keep_best=3)
    t = trainer(tmp_path, keep_best="perplexity")
    with pytest.raises(
        ValueError,
        match=r"keep_best: expected one of loss, validation_loss in the history, got 'perplexity'; pass",
    ):
        fit(t, epochs=1)
    assert t.step_count == 0, "before time is spent"
    with pytest.raises(
        CheckpointError, match=r"expected one below .* that was saved as the best, got none of 0"
    ):
        mpdp.best_checkpoint(tmp_path)


class Counting(mpdp.Callback):
    def __init__(self):
        self.seen, self.sums = 0, np.zeros(3, "float32")

    def on_step(self, trainer):
        self.seen += 1
        self.sums += trainer.step_count

    def state_dict(self):
        return {
            "seen": self.seen,
            "sums": self.sums,
            "odd": [math.nan, -math.inf, None, ("a", np.float32(0.5))],
        }

    def load_state_dict(self, state):
        self.seen, self.sums, self.odd = state["seen"], state["sums"], state["odd"]


class Plateau(optim.Schedule):
    """A schedule that remembers."""

    def __init__(self):
        self.factor = 1.0

    def __call__(self, step):
        return self.factor

    def describe(self):
        return {}

    def state(self):
        return {"factor": self.factor}

    def load_state(self, state):
        self.factor = 1.0 if state is None else float(state["factor"])


def test_callbacks_and_schedules_go_on_where_they_were(tmp_path):
    first, second = Counting(), Counting()
    t = trainer(tmp_path, schedule=Plateau(), callbacks=[first, mpdp.EarlyStopping(), second])
    fit(t, 4)
    second.seen, t.schedule.factor = 40, 0.25
    t.save()
    others = Counting(), Counting()
    other = trainer(tmp_path, schedule=Plateau(), callbacks=[*others, mpdp.EarlyStopping()])
    assert other.resume()
    assert [c.seen for c in others] == [4, 40] and other.schedule.factor == 0.25
    assert others[0].sums.tolist() == [10.0, 10.0, 10.0] and others[0].sums.flags.writeable
    assert math.isnan(others[0].odd[0]) and others[0].odd[1:] == [-math.inf, None, ["a", 0.5]]


def test_state_for_nobody_is_said(tmp_path, capfd):
    t = trainer(tmp_path, callbacks=[Counting()])
    t.save()
    assert trainer(tmp_path).resume()
    assert (
        "resume: the checkpoint holds state of a callback Counting that this run has not"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({"a": object()}, "expected dicts, lists, text, numbers and NumPy arrays, got object"),
        ({3: "a"}, "expected text as keys, got 3"),
        (np.array(["a"]), "expected an array of numbers, got <U1"),
        ({"__mpdp_array__": "x"}, "expected text as keys"),
    ],
)
def test_state_that_no_file_can_hold_is_an_error(tmp_path, state, what):
    callback = Counting()
    callback.state_dict = lambda: state
    t = trainer(tmp_path, callbacks=[callback])
    with pytest.raises(TypeError, match=rf"Counting.state_dict: {what}"):
        t.save()
    assert list((tmp_path / "checkpoints").iterdir() if (tmp_path / "checkpoints").exists() else []) == []


def test_config_names_hosts_command_versions_and_arguments(tmp_path):
    t = trainer(tmp_path, save_every=2)
    fit(t, 2)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["hosts"] == [config["host"]] and config["world_size"] == 1 and config["before"] == []
    assert (
        config["numpy"] == np.__version__
        and config["command"]
        and config["fit"]["global_batch_size"] == BATCH
    )
    other = trainer(tmp_path, save_every=2)
    assert other.resume()
    fit(other, 4)
    again = json.loads((tmp_path / "config.json").read_text())
    assert again["fit"]["updates"] == 4 and [start["fit"]["updates"] for start in again["before"]] == [2]


def test_a_checkpoint_of_no_update_is_as_good_as_none(tmp_path):
    """The scale of gradients follows from the first batch, also behind resume()."""
    first = trainer(tmp_path)
    first.save()
    fit(first, updates=3)
    again = trainer(tmp_path)
    assert again.resume(sorted((tmp_path / "checkpoints").iterdir())[0])
    fit(again, updates=3)
    assert again.parallel.exponent == first.parallel.exponent == 2
    assert everything(again) == everything(first)


def test_a_first_batch_without_samples_scales_no_gradients():
    empty, usual = trainer(None), trainer(None)
    empty.step((X[:0], Y[:0]))
    for t in (empty, usual):
        t.step((X, Y))
    assert empty.parallel.exponent == usual.parallel.exponent > 0


def test_a_callback_may_save_when_it_is_told_of_a_save(tmp_path):
    """Then two saves in the background come after one another."""

    class Again(mpdp.Callback):
        def __init__(self):
            self.told = []

        def on_checkpoint(self, t, path):
            assert path.is_dir()
            self.told.append(path.name)
            if len(self.told) == 1:
                t.save(wait=False)

    def rank():
        callback = Again()
        t = trainer(tmp_path, placement="sharded", callbacks=[callback])
        for _ in range(2):
            t.step((X, Y))
            t.save(wait=False)
        t.saves.finish()
        return callback.told

    told = [f"step-{step:010d}-{serial:06d}" for serial, step in enumerate((1, 2, 2), start=1)]
    assert mpdp.threads.run(rank, 2) == [told, told]
    for found in checkpoint.found_below(tmp_path / "checkpoints"):
        checkpoint.load(found)


class Always(mpdp.Callback):
    """Saves whenever it is told of a save, up to a level."""

    def __init__(self, wait, levels):
        self.wait, self.levels, self.level, self.paths = wait, levels, 0, []

    def on_checkpoint(self, t, path):
        assert len(self.paths) < 20, "an endless row of saves"
        self.paths.append(path)
        self.level += 1
        if self.level <= self.levels:
            t.save(wait=self.wait)
        else:
            self.level = 0


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_saves_that_bring_saves_for_ever_are_an_error_on_all_ranks(tmp_path, wait, n):
    def rank():
        t = trainer(tmp_path / "always", callbacks=[Always(wait, 99)], keep=20)
        t.step((X, Y))
        with pytest.raises(
            ValueError, match=r"save: expected no call in on_checkpoint of a save that was itself"
        ) as caught:
            t.save(wait=wait)
            while True:
                t.step((X, Y))
        assert n == 1 or caught.value.agreed
        assert len(t.callbacks[0].paths) == 2 and not t.saves.under_way
        t.callbacks = ()
        assert t.save().is_dir()  # and the trainer goes on
        return len(steps(tmp_path / "always"))

    assert mpdp.threads.run(rank, n) == [3] * n


@pytest.mark.parametrize("wait", [True, False])
def test_one_save_for_each_save_works_and_fit_ends_with_none_under_way(tmp_path, wait):
    callback = Always(wait, 1)
    t = trainer(tmp_path, callbacks=[callback], save_every=2, async_save=not wait, keep=20)
    fit(t, 5)
    assert not t.saves.under_way
    assert len(callback.paths) == len(set(callback.paths)) == len(steps(tmp_path)) == 2 * 3
    assert all(path.is_dir() for path in callback.paths)
