"""The trainer on one rank: arguments, files, history, callbacks, stopping, resuming."""

import functools
import gc
import json

import numpy as np
import pytest
from on_device import host, world

import mpdp
from mpdp import autodiff, data, nn, optim
from mpdp.errors import CheckpointError, NonFiniteError

pytestmark = pytest.mark.usefixtures("device")


def dataset(n=12, dtype="float32"):
    random = np.random.default_rng(0)
    return data.ArrayDataset(random.standard_normal((n, 4)).astype(dtype), random.integers(0, 3, n))


def trainer(**options):
    mpdp.seed(0)
    options = {"loss": nn.cross_entropy, "optimizer": optim.SGD(lr=0.1), "world": world(), **options}
    model = options.pop("model", None) or nn.Linear(4, 3, dtype=options.pop("dtype", "float32"))
    return mpdp.Trainer(model, options.pop("loss"), options.pop("optimizer"), **options)


def kind(output, target):
    return 1, 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "m"}, TypeError, r"model: expected an nn.Module, got str"),
        ({"loss": 3}, TypeError, r"loss: expected a function loss\(output, target\), got int"),
        ({"optimizer": "sgd"}, TypeError, r"optimizer: expected one of mpdp.optim, got str"),
        ({"schedule": 0.1}, TypeError, r"schedule: expected a function of the update's index, got float"),
        (
            {"precision": "int8"},
            ValueError,
            r"precision: expected one of float32, float64, tf32, bfloat16, float16, got 'int8'",
        ),
        ({"placement": "x"}, ValueError, "placement: expected one of replicated, root, sharded, got 'x'"),
        ({"accumulate": 0}, ValueError, r"accumulate: expected an integer of 1 or more, got 0"),
        ({"accumulate": 1.5}, ValueError, r"accumulate: expected an integer of 1 or more, got 1.5"),
        ({"clip_norm": 0}, ValueError, r"clip_norm: expected a number above 0, or None, got 0"),
        ({"clip_value": -1.0}, ValueError, r"clip_value: expected a number above 0, or None, got -1.0"),
        ({"ema": 1.0}, ValueError, r"ema: expected a number between 0 and 1, got 1.0; 0.999 is usual"),
        ({"ema": "0.9"}, TypeError, r"ema: expected a number between 0 and 1, got '0.9'"),
        ({"save_every": 5}, ValueError, r"save_every: expected a run_dir to save in, got 5 without one"),
        (
            {"save_every": 0, "run_dir": "x"},
            ValueError,
            r"save_every: expected an integer of 1 or more, or None",
        ),
        ({"keep": 0}, ValueError, r"keep: expected an integer of 1 or more, got 0"),
        ({"seed": "a"}, ValueError, r"seed: expected an integer, got 'a'"),
        ({"graph": "always"}, ValueError, r"graph: expected \"auto\", True or False, got 'always'"),
        ({"callbacks": [print]}, TypeError, r"callbacks: expected objects with the methods of mpdp.Callback"),
        (
            {"callbacks": mpdp.Callback()},
            TypeError,
            r"callbacks: expected a list, got Callback; pass \[callback\]",
        ),
        (
            {"callbacks": [mpdp.Callback]},
            TypeError,
            r"callbacks: expected objects .* got the class Callback; call it",
        ),
        ({"run_dir": 5}, TypeError, r"run_dir: expected a path, got int; pass a str or Path"),
        (
            {"reduce_dtype": "foo"},
            ValueError,
            r"reduce_dtype: expected float16, bfloat16, float32 or float64, got 'foo'",
        ),
        ({"chunk_bytes": 0}, ValueError, r"chunk_bytes: expected a positive number of bytes, got 0"),
        (
            {"reduce_dtype": "int32"},
            ValueError,
            r"reduce_dtype: expected float16, bfloat16, float32 or float64, got 'int32'",
        ),
        (
            {"dtype": "float64"},
            TypeError,
            r"precision: expected parameters of dtype float32, got float64 in weight",
        ),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        trainer(**options)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"epochs": None}, ValueError, r"epochs: expected epochs= or updates=, got neither"),
        ({"epochs": -1}, ValueError, r"epochs: expected an integer of 0 or more, got -1"),
        ({"updates": 1.5}, ValueError, r"updates: expected an integer of 0 or more, got 1.5"),
        ({"global_batch_size": None}, ValueError, r"global_batch_size: expected an integer of 1 or more"),
        ({"global_batch_size": 0}, ValueError, r"global_batch_size: expected an integer of 1 or more"),
        ({"global_batch_size": 20, "drop_last": True}, ValueError, r"expected at most the 12 samples"),
        ({"dataset": 3}, TypeError, r"dataset: expected an object with __len__ and __getitem__, got int"),
        ({"dataset": []}, ValueError, r"dataset: expected at least one sample, got an empty data set"),
        (
            {"validation": []},
            ValueError,
            r"validation: expected at least one sample, got an empty data set; check",
        ),
        (
            {"validation": 3},
            TypeError,
            r"validation: expected an object with __len__ and __getitem__, got int",
        ),
        (
            {"metrics": ["accuracy"]},
            TypeError,
            r"metrics: expected functions metric\(output, target\), got str",
        ),
        ({"metrics": nn.accuracy}, TypeError, r"metrics: expected a list of functions .* got function; pass"),
        ({"metrics": [nn.accuracy, nn.accuracy]}, ValueError, r"metrics: expected distinct names"),
        ({"metrics": [kind]}, ValueError, r"metrics: expected distinct names other than .*, got 'kind'"),
        (
            {"metrics": [lambda o, y: 0.5]},
            TypeError,
            r"metrics: expected a pair \(sum, count\) of numbers from",
        ),
        ({"metrics": [lambda o, y: None]}, TypeError, r"metrics: expected a pair .* got NoneType"),
        ({"metrics": [lambda o, y: (y == 0, 4)]}, TypeError, r"metrics: expected a pair .* got tuple"),
        ({"epochs": True}, ValueError, r"epochs: expected an integer of 0 or more, got True"),
    ],
)
def test_bad_arguments_of_fit(arguments, error, message):
    arguments = {"dataset": dataset(), "epochs": 1, "global_batch_size": 4, **arguments}
    with pytest.raises(error, match=message):
        trainer().fit(arguments.pop("dataset"), **arguments)


def test_labels_out_of_range_are_found_before_any_update():
    bad = dataset(40)
    bad.arrays[-1][37] = 3
    t = trainer()
    before = host(t.model.weight).copy()
    with pytest.raises(ValueError, match=r"target: expected class indices in 0..2, got 3 at sample 37"):
        t.fit(bad, epochs=1, global_batch_size=4)
    assert t.step_count == 0
    assert np.array_equal(host(t.model.weight), before)
    # ignored labels are no error, also under another number
    bad.arrays[-1][37] = -7
    trainer(loss=functools.partial(nn.cross_entropy, ignore_index=-7)).fit(bad, epochs=1, global_batch_size=4)


def test_float_labels_and_wrong_shapes_are_errors():
    x = np.zeros((8, 4), "float32")
    with pytest.raises(TypeError, match=r"target: expected"):
        trainer().fit(data.ArrayDataset(x, np.zeros(8)), epochs=1, global_batch_size=4)
    with pytest.raises(ValueError, match=r"linear"):
        trainer().fit(data.ArrayDataset(x[:, :3], np.zeros(8, int)), epochs=1, global_batch_size=4)


def test_history_and_log(tmp_path):
    t = trainer(run_dir=tmp_path / "run", save_every=2)
    history = t.fit(dataset(), epochs=3, global_batch_size=5, validation=dataset(7), metrics=[nn.accuracy])
    assert [row["epoch"] for row in history] == [1, 2, 3]
    assert [row["step"] for row in history] == [3, 6, 9]
    assert all(row.keys() == {"epoch", "step", "loss", "validation_loss", "accuracy"} for row in history)
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if r["kind"] == "step"] == list(range(1, 10))
    assert [r["epoch"] for r in rows if r["kind"] == "epoch"] == [1, 2, 3]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["mpdp"] == mpdp.__version__
    assert config["world_size"] == t.world.size
    # one at the end although 9 is no multiple of 2, and no more than keep
    assert [p.name.split("-")[1] for p in sorted((tmp_path / "run" / "checkpoints").iterdir())] == [
        "0000000006",
        "0000000008",
        "0000000009",
    ]


def test_training_metrics_where_there_is_no_validation():
    history = trainer().fit(dataset(), epochs=2, global_batch_size=5, metrics=[nn.accuracy])
    assert all(0.0 <= row["accuracy"] <= 1.0 for row in history)
    assert all((row["accuracy"] * 12) == round(row["accuracy"] * 12) for row in history)


def test_a_used_folder_is_refused_by_fit_and_step_but_not_by_the_constructor(tmp_path):
    trainer(run_dir=tmp_path).fit(dataset(), epochs=1, global_batch_size=5)
    t = trainer(run_dir=tmp_path)
    with pytest.raises(
        ValueError, match=r"run_dir: expected a new or empty folder, got .* call trainer.resume\(\)"
    ):
        t.fit(dataset(), epochs=2, global_batch_size=5)
    with pytest.raises(ValueError, match=r"run_dir: expected a new or empty folder"):
        t.step((np.zeros((2, 4), "float32"), np.zeros(2, int)))
    assert t.resume() is False  # a log, but no checkpoint
    t.fit(dataset(), epochs=1, global_batch_size=5)
    rows = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(row)["kind"] for row in rows] == ["step"] * 3 + ["epoch", "ranks", "memory"]


def test_save_needs_a_folder():
    with pytest.raises(ValueError, match=r"run_dir: expected a folder for checkpoints, got None"):
        trainer().save()
    with pytest.raises(ValueError, match=r"run_dir: expected a folder for checkpoints, got None"):
        trainer().resume()


def test_a_resumed_log_holds_every_step_once(tmp_path):
    """K2: killed after step 5 with a checkpoint at 4, resumed to 9."""

    class Kill(mpdp.Callback):
        def on_step(self, t):
            if t.step_count == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(run_dir=tmp_path, save_every=4, callbacks=[Kill()]).fit(
            dataset(), epochs=3, global_batch_size=5
        )
    t = trainer(run_dir=tmp_path, save_every=4)
    assert t.resume() is True
    assert t.step_count == 4
    t.fit(dataset(), epochs=3, global_batch_size=5)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if r["kind"] == "step"] == list(range(1, 10))
    assert [r["epoch"] for r in rows if r["kind"] == "epoch"] == [1, 2, 3]


def test_a_run_that_goes_back_cuts_its_own_log_too(tmp_path):
    t = trainer(run_dir=tmp_path)
    t.fit(dataset(), updates=3, global_batch_size=5)
    saved = t.save()
    t.fit(dataset(), updates=5, global_batch_size=5)
    assert t.resume(saved) and t.step_count == 3
    t.fit(dataset(), updates=6, global_batch_size=5)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if r["kind"] == "step"] == list(range(1, 7))


def test_a_log_without_fit_is_whole_at_the_end(tmp_path):
    t = trainer(run_dir=tmp_path)
    for _ in range(5):
        t.step((np.ones((2, 4), "float32"), np.zeros(2, int)))
    del t  # or the end of the program
    gc.collect()
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 5


def test_a_checkpoint_of_another_model_lists_every_difference(tmp_path):
    path = trainer(run_dir=tmp_path / "a")
    path.step((np.zeros((2, 4), "float32"), np.zeros(2, int)))
    saved = path.save()
    other = trainer(
        model=nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)),
        optimizer=optim.Adam(lr=0.1),
        run_dir=tmp_path / "b",
    )
    before = other.model.state_dict()
    with pytest.raises(CheckpointError, match=r"got 8 differences") as caught:
        other.resume(saved)
    for text in (
        "missing parameter 0.weight",
        "unexpected parameter bias",
        "optimizer is SGD there, Adam here",
    ):
        assert text in str(caught.value)
    after = other.model.state_dict()
    assert all(np.array_equal(before[k], after[k]) for k in before)
    narrow = trainer(model=nn.Linear(3, 3), run_dir=tmp_path / "c")
    with pytest.raises(
        CheckpointError, match=r"parameter weight is float32\[3, 4\] there, float32\[3, 3\] here"
    ):
        narrow.resume(saved)


def test_updates_end_a_run_inside_an_epoch_and_fit_goes_on():
    t = trainer()
    t.fit(dataset(), updates=2, global_batch_size=5)
    assert (t.step_count, t.epoch) == (2, 0)
    t.fit(dataset(), updates=3, global_batch_size=5)
    assert (t.step_count, t.epoch) == (3, 1)
    with pytest.raises(ValueError, match=r"global_batch_size: expected 5 as before in this epoch, got 4"):
        t.fit(dataset(), updates=4, global_batch_size=5)
        t.fit(dataset(), updates=5, global_batch_size=4)
    t.fit(dataset(), epochs=2, global_batch_size=5)
    assert (t.step_count, t.epoch) == (6, 2)
    assert t.fit(dataset(), epochs=2, global_batch_size=5) == t.history
    assert t.step_count == 6


def test_callbacks_are_called_in_order(tmp_path):
    calls = []

    class Note(mpdp.Callback):
        def on_step(self, t):
            calls.append(("step", t.step_count))

        def on_epoch(self, t):
            calls.append(("epoch", t.epoch, len(t.history)))

        def on_validation(self, t, metrics):
            calls.append(("validation", sorted(metrics)))

        def on_checkpoint(self, t, path):
            calls.append(("checkpoint", path.name[:15]))

    t = trainer(run_dir=tmp_path, save_every=2, callbacks=[Note()])
    t.fit(dataset(), epochs=1, global_batch_size=6, validation=dataset(), metrics=[nn.accuracy])
    assert calls == [
        ("step", 1),
        ("step", 2),
        ("validation", ["accuracy", "loss"]),
        ("epoch", 1, 1),
        ("checkpoint", "step-0000000002"),
    ]


@pytest.mark.parametrize("call", ["fit", "resume"])
def test_a_callback_of_fit_calls_neither_fit_nor_resume(call, tmp_path):
    """Both move the place in the data under the feet of the loop that is running."""

    class Again(mpdp.Callback):
        def on_step(self, t):
            if t.step_count == 3:
                t.fit(dataset(), epochs=1, global_batch_size=4) if call == "fit" else t.resume()

    t = trainer(callbacks=[Again()], run_dir=tmp_path, save_every=2)
    with pytest.raises(ValueError, match=rf"{call}: expected a call outside fit, got one in a callback"):
        t.fit(dataset(), epochs=2, global_batch_size=4)
    t.callbacks = ()
    assert t.resume() and t.step_count == 2
    t.fit(dataset(), epochs=2, global_batch_size=4)
    assert t.step_count == 6


def test_data_that_grow_while_fit_runs_are_those_of_its_start():
    samples = [(np.full(4, i, "float32"), i % 3) for i in range(8)]

    class Collect(mpdp.Callback):
        def on_step(self, t):
            samples.append((np.full(4, len(samples), "float32"), 0))

    t = trainer(callbacks=[Collect()], optimizer=optim.SGD(lr=1e-3))
    history = t.fit(samples, epochs=2, global_batch_size=4)
    assert [row["step"] for row in history] == [2, 4]
    assert len(samples) == 12
    assert [row["step"] for row in t.fit(samples, epochs=3, global_batch_size=4)] == [2, 4, 7]


def test_should_stop_ends_after_the_step():
    class Stop(mpdp.Callback):
        def on_step(self, t):
            t.should_stop = t.step_count == 2

    t = trainer(callbacks=[Stop()])
    t.fit(dataset(), epochs=5, global_batch_size=4)
    assert (t.step_count, t.epoch) == (2, 0)


def test_an_exception_reaches_the_callbacks_and_the_caller():
    seen = []

    class Note(mpdp.Callback):
        def on_exception(self, t, error):
            seen.append(error)

    def broken(output, target):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        trainer(loss=broken, callbacks=[Note()]).fit(dataset(), epochs=1, global_batch_size=4)
    assert len(seen) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_before_anything_is_updated(value):
    t = trainer(loss=lambda o, y: o.mean() * value)
    before = host(t.model.weight).copy()
    with pytest.raises(NonFiniteError, match=r"loss: expected a finite sum at step 0, got"):
        t.step((np.ones((2, 4), "float32"), np.zeros(2, int)))
    assert np.array_equal(host(t.model.weight), before)


def test_a_gradient_that_is_not_finite_is_named():
    def root_of_zero(output, y):
        return ((output * 0.0) + 0.0).sqrt().mean()

    t = trainer(loss=root_of_zero)
    before = host(t.model.weight).copy()
    with (
        pytest.raises(
            NonFiniteError, match=r"gradient: expected finite values at step 0.* first in (bias|weight)"
        ),
        np.errstate(all="ignore"),
    ):
        t.step((np.ones((2, 4), "float32"), np.zeros(2, int)))
    assert np.array_equal(host(t.model.weight), before)
    t.eager.loss_function = nn.cross_entropy
    assert t.step((np.ones((2, 4), "float32"), np.zeros(2, int))) > 0


def test_nothing_to_train():
    model = nn.Linear(4, 3)
    model.freeze()
    t = trainer(model=model)
    assert t.evaluate(dataset())["loss"] > 0
    with pytest.raises(
        ValueError, match=r"model: expected at least one trainable parameter, got none; there is nothing"
    ):
        t.fit(dataset(), epochs=1, global_batch_size=4)


def test_a_loss_of_another_form_is_an_error():
    for loss, error, message in (
        (lambda o, y: 3.0, TypeError, r"loss: expected a scalar Tensor"),
        (lambda o, y: None, TypeError, r"loss: expected a scalar Tensor.* got NoneType"),
        (lambda o, y: o, ValueError, r"loss: expected a scalar, got shape \(4, 3\)"),
    ):
        with pytest.raises(error, match=message):
            trainer(loss=loss).fit(dataset(), epochs=1, global_batch_size=4)


def test_a_loss_without_a_value_is_an_error_in_every_update():
    x, y = np.ones((4, 4), "float32"), np.zeros(4, int)
    values = [nn.cross_entropy, lambda output, target: None]
    t = trainer(loss=lambda output, target: values[t.step_count](output, target))
    t.step((x, y))
    with pytest.raises(TypeError, match=r"loss: expected a scalar Tensor.* got NoneType"):
        t.step((x, y))
    assert t.step_count == 1


def test_a_loss_that_leads_to_no_parameter_is_an_error():
    x, y = np.ones((4, 4), "float32"), np.zeros(4, int)
    for loss in (lambda o, y: nn.cross_entropy(o.data, y), lambda o, y: autodiff.Tensor(o.data).mean()):
        t = trainer(loss=loss)
        with pytest.raises(ValueError, match=r"loss: expected one that depends on a trainable parameter"):
            t.step((x, y))
        assert t.step_count == 0
    ignored = trainer()
    assert ignored.step((x, y - 100)) == 0.0  # nothing counts, so nothing has to depend on anything


def test_a_model_without_an_output_is_an_error():
    class Forgetful(nn.Module):
        def __init__(self):
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            self.layer(x)

    with pytest.raises(TypeError, match=r"model: expected an output, got None; return it from forward"):
        trainer(model=Forgetful()).fit(dataset(), epochs=1, global_batch_size=4)


def test_a_loss_of_one_element_is_a_scalar():
    whole, kept = trainer(), trainer(loss=lambda o, y: nn.cross_entropy(o, y).reshape(1))
    for t in (whole, kept):
        t.fit(dataset(), epochs=1, global_batch_size=4)
    assert np.array_equal(host(whole.model.weight), host(kept.model.weight))
    assert kept.evaluate(dataset())["loss"] == pytest.approx(whole.evaluate(dataset())["loss"], rel=1e-6)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -1.0, None, "x"])
def test_a_learning_rate_that_is_none_stops_before_anything_is_updated(factor):
    t = trainer(schedule=lambda update: 1.0 if update == 0 else factor)
    batch = (np.ones((2, 4), "float32"), np.zeros(2, int))
    t.step(batch)
    before = host(t.model.weight).copy()
    with pytest.raises((ValueError, TypeError), match=r"(lr|schedule): expected a .*number"):
        t.step(batch)
    assert t.step_count == 1
    assert np.array_equal(host(t.model.weight), before)
    t.schedule = optim.constant()
    again = trainer()
    again.step(batch)
    assert again.step(batch) == t.step(batch)  # what was broken off left nothing behind
    assert np.array_equal(host(t.model.weight), host(again.model.weight))


def test_a_float32_model_is_widened_on_request():
    t = trainer(precision="float64")
    assert t.model.weight.data.dtype == "float64"
    t.fit(dataset(), epochs=1, global_batch_size=4)


def test_evaluation_gives_every_module_its_own_mode_back():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    model[1].eval()
    t = trainer(model=model)
    t.evaluate(dataset())
    assert [module.training for _, module in model.named_modules()] == [True, True, False, True]


def test_step_without_a_dataset_equals_fit_in_order():
    a, b = trainer(), trainer()
    items = dataset()
    a.fit(items, epochs=1, global_batch_size=4, shuffle=False)
    for i in range(0, 12, 4):
        b.step(tuple(array[i : i + 4] for array in items.arrays))
    assert np.array_equal(host(a.model.weight), host(b.model.weight))


def test_two_trainings_are_bit_equal():
    states = []
    for _ in range(2):
        mpdp.seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        trainer(model=model, optimizer=optim.AdamW(lr=0.01)).fit(dataset(), epochs=3, global_batch_size=5)
        states.append(model.state_dict())
    assert all(np.array_equal(states[0][k], states[1][k]) for k in states[0])


def test_odd_parameters_are_saved_and_loaded(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            self.scalar = autodiff.Parameter(np.array(2.0, dtype="float32"))
            self.empty = autodiff.Parameter(np.zeros((3, 0), dtype="float32"))

        def forward(self, x):
            return x * self.scalar

    def make():
        return trainer(model=Odd(), loss=nn.mse, optimizer=optim.Adam(lr=0.1), run_dir=tmp_path, save_every=1)

    x = np.ones((4, 2), "float32")
    a = make()
    a.fit(data.ArrayDataset(x, x), epochs=2, global_batch_size=4)
    b = make()
    assert b.resume()
    assert host(b.model.scalar).tobytes() == host(a.model.scalar).tobytes()
    assert b.model.scalar.shape == () and b.model.empty.shape == (3, 0)


def test_reports_name_the_update_that_comes_next(tmp_path):
    """A batch that is loaded, and a callback, belong to the step that the program counts itself."""
    steps = []

    class Note(mpdp.Callback):
        def on_step(self, t):
            steps.append((t.step_count, t.world.activity.step))

    t = trainer(callbacks=[Note()], run_dir=tmp_path, save_every=2)
    t.fit(dataset(), epochs=1, global_batch_size=5)
    assert steps == [(1, 1), (2, 2), (3, 3)]
    t.world.activity.step = 0
    other = trainer(run_dir=tmp_path)
    assert other.resume() and other.world.activity.step == 3
    parallel = mpdp.DataParallel(nn.Linear(4, 3))
    parallel.backward(nn.cross_entropy(parallel(np.ones((2, 4), "float32")), np.zeros(2, int)))
    parallel.step(optim.SGD(lr=0.1))
    assert parallel.world.activity.step == parallel.step_count == 1


def test_a_layer_replaced_after_wrapping_is_an_error():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    t = trainer(model=model)
    batch = (np.ones((2, 4), "float32"), np.zeros(2, int))
    t.step(batch)
    setattr(model, "1", nn.Linear(4, 3).to(t.world.device))
    with pytest.raises(
        mpdp.errors.DisagreementError, match=r"model: expected the parameters it had when it was wrapped"
    ):
        t.step(batch)


def test_a_model_that_was_wrapped_again_is_an_error_for_the_first_trainer():
    batch = (np.ones((2, 4), "float32"), np.zeros(2, int))
    first = trainer()
    first.step(batch)
    second = trainer(model=first.model)
    assert second.step(batch) > second.step(batch)
    with pytest.raises(
        mpdp.errors.DisagreementError,
        match=r"model: expected its parameters as they were when it was wrapped",
    ):
        first.step(batch)


def test_a_forward_pass_that_fails_leaves_nothing_of_its_update():
    x, y = dataset().arrays
    weights = []
    for labels in (y, np.append(y[:-1], 9)):
        t = trainer(accumulate=2)
        if labels is not y:
            with pytest.raises(ValueError, match=r"target: expected class indices"):
                t.step((x, labels))
        t.step((x, y))
        weights.append(host(t.model.weight).copy())
    assert np.array_equal(*weights)


def test_an_optimizer_with_other_slots_does_not_fit(tmp_path):
    t = trainer(run_dir=tmp_path)
    t.step((np.ones((2, 4), "float32"), np.zeros(2, int)))
    path = t.save()
    other = trainer(optimizer=optim.SGD(lr=0.1, momentum=0.9), run_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"optimizer keeps \[\] there, \['momentum'\] here"):
        other.resume(path)


def test_what_another_schedule_has_learnt_is_left_out(tmp_path, capsys):
    def run(schedule):
        return trainer(schedule=schedule, run_dir=tmp_path)

    first = run(optim.ReduceOnPlateau("loss", patience=0, factor=0.5, threshold=10.0))
    first.fit(dataset(), epochs=3, global_batch_size=6)
    first.save()
    assert first.schedule(0) == 0.25
    again = run(optim.ReduceOnPlateau("loss", patience=5))  # other arguments, the same state
    assert again.resume() and again.lr == 0.1 * 0.25
    other = run(optim.Product(optim.StepLR(100), optim.StepLR(200)))
    assert other.resume() and other.lr == 0.1
    assert (
        "warning resume: what the schedule had learnt is left out: schedule: expected"
        in capsys.readouterr().err
    )


def test_a_batch_may_be_lists():
    x, y = dataset().arrays
    losses = {trainer(accumulate=2).step(batch) for batch in ((x, y), [x, y], (x, y.tolist()))}
    assert len(losses) == 1


@pytest.mark.parametrize(
    ("batch", "got"),
    [
        (
            ([[1.0, 2.0]], [0]),
            r"inputs\[0\]: expected arrays as a model's inputs, got the list \[1.0, 2.0\]; pass",
        ),
        ([[[1.0, 2.0]], [0]], r"inputs\[0\]: .* got the list \[1.0, 2.0\]"),
        (([[1.0, 2.0], [3.0, 4.0]], [0, 1]), r"inputs\[0\]: .* got the list \[1.0, 2.0\]"),
        (([[1]], [2], [0]), r"inputs\[0\]: .* got the list \[\[1\]\]"),
        ([[1.0, 2.0]], r"inputs\[0\]: .* got the list \[1.0, 2.0\]"),
        ({"x": [[1.0, 2.0]], "target": [0]}, r"inputs\['x'\]: .* got the list \[\[1.0, 2.0\]\]"),
    ],
)
def test_lists_of_numbers_are_no_inputs(batch, got):
    t = trainer()
    with pytest.raises(TypeError, match=got):
        t.step(batch)
    assert t.step_count == 0


def test_a_batch_without_a_target_reaches_the_loss():
    t = trainer(loss=lambda output, target: output.mean() if target is None else None)
    t.step((np.ones((2, 4), "float32"),))
    assert t.step_count == 1


def test_losses_and_schedules_are_described_for_comparison():
    from mpdp.training.arguments import describe

    assert describe(nn.cross_entropy) == "mpdp.nn.losses.cross_entropy"
    assert describe(functools.partial(nn.cross_entropy, ignore_index=3)) != describe(
        functools.partial(nn.cross_entropy, ignore_index=4)
    )
    assert describe(optim.StepLR(2)) != describe(optim.StepLR(3))
    table = type("Table", (optim.Schedule,), {"__init__": lambda self, x: vars(self).update(x=np.array(x))})
    assert describe(table([1.0, 2.0])) == describe(table([1.0, 2.0])) != describe(table([1.0, 3.0]))
    teacher = functools.partial(nn.mse, teacher=nn.Linear(2, 2))
    assert "0x" not in str(describe(teacher))
    json.dumps([describe(f) for f in (nn.mse, len, optim.constant(), lambda t: 1.0, table([1.0]), teacher)])


def test_numbers_of_numpy_are_numbers(tmp_path):
    groups = [optim.Group("*", lr_factor=np.float32(0.5))]
    t = trainer(
        seed=np.int64(3),
        accumulate=np.int32(2),
        clip_norm=np.float32(1.0),
        save_every=np.int64(2),
        optimizer=optim.SGD(lr=np.float32(0.1), groups=groups),
        run_dir=tmp_path,
    )
    t.fit(dataset(), epochs=np.int64(1), global_batch_size=np.int64(4))
    assert t.step_count == 3 and trainer(run_dir=tmp_path, seed=3, accumulate=2).resume()
