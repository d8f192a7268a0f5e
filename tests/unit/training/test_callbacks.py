"""Callbacks on one rank: early stopping, and what is said of one that raises."""

import numpy as np
import pytest
from on_device import world

import mpdp
from mpdp import data, nn, optim
from mpdp.training.calling import call_back

pytestmark = pytest.mark.usefixtures("device")


def trainer(callbacks, **options):
    mpdp.seed(0)
    return mpdp.Trainer(
        nn.Linear(4, 3), nn.cross_entropy, optim.SGD(lr=0.1), world=world(), callbacks=callbacks, **options
    )


def dataset(n=12):
    random = np.random.default_rng(0)
    return data.ArrayDataset(random.standard_normal((n, 4)).astype("float32"), random.integers(0, 3, n))


def stopped_after(values, metric="validation_loss", **options):
    """Return the epochs after which a run whose metric takes these values stops."""
    callback = mpdp.EarlyStopping(metric, **options)
    t = trainer([callback])
    for epoch, value in enumerate(values, 1):
        t.position.history.append({"epoch": epoch, "step": epoch, metric: value})
        call_back(t, "on_epoch")
        if t.should_stop:
            return epoch, callback.best, callback.best_epoch
    return None, callback.best, callback.best_epoch


def test_early_stopping_counts_epochs_without_a_better_value():
    nan = float("nan")
    assert stopped_after([3.0, 2.0, 2.5, 2.0, 2.1, 1.0], patience=3) == (5, 2.0, 2)
    assert stopped_after([3.0, 2.0, 2.5, 2.0, 1.9], patience=3) == (None, 1.9, 5)
    assert stopped_after([3.0, 2.9, 2.85, 2.0], patience=2, min_delta=0.2) == (3, 3.0, 1)
    assert stopped_after([0.1, 0.3, 0.2, 0.3], "accuracy", patience=2, mode="max") == (4, 0.3, 2)
    assert stopped_after([nan, nan], patience=2) == (2, None, 0)
    assert stopped_after([2.0, nan, 1.0], patience=2) == (None, 1.0, 3)


def test_early_stopping_ends_fit():

    def rising(output, target):
        rising.value += 1
        return rising.value, 1

    rising.value = 0
    t = trainer([mpdp.EarlyStopping("rising", patience=2, mode="min")])
    t.fit(dataset(), epochs=50, global_batch_size=6, validation=dataset(), metrics=[rising])
    assert t.epoch == 3 and t.should_stop


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"metric": "accuracy"},
            r"mode: expected \"min\" or \"max\" beside metric 'accuracy', got None; say which",
        ),
        ({"patience": 0}, r"patience: expected an integer of 1 or more, got 0; it counts epochs"),
        ({"min_delta": -1.0}, r"min_delta: expected a number of 0 or more, got -1.0"),
    ],
)
def test_early_stopping_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        mpdp.EarlyStopping(**options)


def test_early_stopping_needs_its_metric():
    t = trainer([mpdp.Callback(), mpdp.EarlyStopping()])
    known = r"metric: expected one of loss, accuracy in the history, got 'validation_loss' for EarlyStopping; pass"
    with pytest.raises(ValueError, match=known):
        t.fit(dataset(), epochs=2, global_batch_size=6, metrics=[nn.accuracy])
    assert t.step_count == 0, "before time is spent"
    t.fit(dataset(), epochs=2, global_batch_size=6, validation=dataset())
    assert t.epoch == 2


@pytest.mark.parametrize("whole", [False, True])
def test_a_schedule_needs_its_metric(whole):
    plateau = optim.ReduceOnPlateau("score", mode="max")
    if whole:
        plateau = optim.Product(optim.StepLR(5), optim.Warmup(2, plateau))
    t = trainer([], schedule=plateau)
    with pytest.raises(ValueError, match=r"metric: expected one of loss in the history, got 'score' for"):
        t.fit(dataset(), epochs=2, global_batch_size=6)
    assert t.step_count == 0, "before time is spent"
    t.fit(dataset(), epochs=1, global_batch_size=6, metrics=[nn.mean(lambda o, t: o[:, 0], name="score")])


def test_a_callback_of_a_program_may_say_what_it_looks_at_or_add_it():
    class Follows(mpdp.EarlyStopping):
        pass

    class Adds(mpdp.Callback):
        def on_epoch(self, t):
            t.history[-1]["score"] = 1.0

    class FollowsWhatIsAdded(Follows):
        def looks_at(self):
            return ()

    class Plain:  # with the methods, and derived from nothing
        on_step = on_epoch = on_validation = on_checkpoint = on_exception = lambda *given: None

    with pytest.raises(ValueError, match=r"got 'score' for Follows; pass it"):
        trainer([Plain(), Follows("score", mode="max")]).fit(dataset(), epochs=1, global_batch_size=6)
    t = trainer([Adds(), FollowsWhatIsAdded("score", patience=2, mode="max")])
    t.fit(dataset(), epochs=9, global_batch_size=6)
    assert t.epoch == 3


def test_an_error_says_which_callback_it_comes_from():
    class Broken(mpdp.Callback):
        def on_step(self, t):
            if t.step_count == 2:
                raise ZeroDivisionError("mine")

        def on_exception(self, t, error):
            raise OSError("no room to tell it")

    seen = []

    class Note(mpdp.Callback):
        def on_exception(self, t, error):
            seen.append(error)

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        trainer([Broken(), Note()]).fit(dataset(), epochs=1, global_batch_size=4)
    notes = "\n".join(caught.value.__notes__)
    assert "in the callback Broken.on_step, called on rank 0 after 2 updates" in notes
    assert "the callback Broken.on_exception raised OSError: no room to tell it" in notes
    assert seen == [caught.value], "later callbacks are told all the same"
