"""ReduceOnPlateau: decisions from a sequence of results, state, and the schedules it is part of."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mpdp import optim

ARGUMENTS = [
    {},
    {"patience": 0},
    {"patience": 2, "factor": 0.5, "cooldown": 3},
    {"patience": 1, "threshold": 0.05, "relative": False},
    {"patience": 1, "threshold": 0.1, "factor": 0.3, "smallest": 0.2},
    {"patience": 3, "mode": "max", "metric": "accuracy"},
    {"patience": 1, "mode": "max", "metric": "accuracy", "threshold": 0.02, "relative": False, "cooldown": 1},
]


def factors(
    values, mode="min", factor=0.1, patience=10, threshold=1e-4, relative=True, cooldown=0, smallest=0.0
):
    """What PyTorch's documentation says, as one walk over all results."""
    best, bad, wait, current, found = None, 0, 0, 1.0, []
    for value in values:
        if mode == "min":
            better = best is None or value < (best * (1 - threshold) if relative else best - threshold)
        else:
            better = best is None or value > (best * (1 + threshold) if relative else best + threshold)
        best, bad = (value, 0) if better else (best, bad + 1)
        if wait:
            wait, bad = wait - 1, 0
        if bad > patience:
            current, wait, bad = max(current * factor, smallest), cooldown, 0
        found.append(current)
    return found


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_factors_of_a_sequence(arguments):
    rng = np.random.default_rng(0)
    values = (1 + 1 / np.arange(1, 60) + 0.1 * rng.standard_normal(59)).tolist()
    schedule = optim.ReduceOnPlateau(**arguments)
    expected = factors(values, **{k: v for k, v in arguments.items() if k != "metric"})
    found = []
    for value in values:
        schedule.observe({"epoch": 1, schedule.metric: value})
        found.append(schedule(len(found)))
    assert found == expected and len(set(found)) > (1 if arguments.get("patience", 10) < 10 else 0)


def test_a_run_goes_on_from_its_state():
    values = [1.0, 0.9, 0.95, 0.94, 0.93, 0.9, 0.9, 0.9, 0.9, 0.9]
    whole = optim.ReduceOnPlateau(patience=1, factor=0.5, cooldown=1)
    for value in values:
        whole.observe({"validation_loss": value})
    for stop in range(len(values)):
        first, second = (optim.ReduceOnPlateau(patience=1, factor=0.5, cooldown=1) for _ in range(2))
        for value in values[:stop]:
            first.observe({"validation_loss": value})
        second.load_state(json.loads(json.dumps(first.state())))
        for value in values[stop:]:
            second.observe({"validation_loss": value})
        assert second.state() == whole.state()
    whole.load_state(None)
    assert whole.state() == optim.ReduceOnPlateau().state() and whole.best is None


def test_what_is_not_a_number_is_not_better():
    schedule = optim.ReduceOnPlateau(patience=1, factor=0.5)
    for value in (math.nan, 1.0, math.nan, math.nan):
        schedule.observe({"validation_loss": value})
    assert schedule.best == 1.0 and schedule(0) == 0.5


@pytest.mark.parametrize(("mode", "value"), [("min", math.inf), ("max", math.inf), ("min", -math.inf)])
def test_what_is_infinite_is_not_better(mode, value):
    """A perplexity may overflow in the first epoch, and later ones are better then."""
    schedule = optim.ReduceOnPlateau("accuracy", patience=1, factor=0.5, mode=mode)
    for better in (value, 3.0, 2.0, 1.0) if mode == "min" else (value, 1.0, 2.0, 3.0):
        schedule.observe({"accuracy": better})
    assert schedule.best == (1.0 if mode == "min" else 3.0) and schedule(0) == 1.0


def test_it_learns_as_a_part_of_others():
    plateau = optim.ReduceOnPlateau(patience=0, factor=0.5)
    schedule = optim.Product(optim.StepLR(2, gamma=0.1), optim.Warmup(4, plateau))
    for value in (1.0, 1.0, 1.0):
        schedule.observe({"validation_loss": value})
    assert schedule(0) == 0.25 * 0.25 and schedule(5) == 0.1**2 * 0.25
    state = json.loads(json.dumps(schedule.state()))
    again = optim.Product(
        optim.StepLR(2, gamma=0.1), optim.Warmup(4, optim.ReduceOnPlateau(patience=0, factor=0.5))
    )
    again.load_state(state)
    assert again(0) == schedule(0) and again.state() == state
    assert "current" not in json.dumps(schedule.describe()) and again.describe() == schedule.describe()


def test_the_state_of_another_schedule_changes_nothing():
    plateau = optim.ReduceOnPlateau(patience=0, factor=0.5)
    for _ in range(2):
        plateau.observe({"validation_loss": 1.0})
    pair = optim.Product(plateau, optim.constant())
    before = pair.state()
    fresh = optim.ReduceOnPlateau().state()
    for schedule, state in (
        (plateau, [fresh]),
        (plateau, {"best": 1.0}),
        (pair, fresh),
        (pair, [fresh]),
        (pair, [fresh, fresh]),
        (optim.constant(), fresh),
    ):
        with pytest.raises(ValueError, match=r"schedule: expected .*, got .*; start anew"):
            schedule.load_state(state)
        assert pair.state() == before


def test_a_metric_that_is_not_there():
    with pytest.raises(
        KeyError, match=r"metric: expected one of loss in the results, got 'validation_loss'; pass it"
    ):
        optim.ReduceOnPlateau().observe({"epoch": 1, "step": 4, "loss": 0.5})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"metric": "accuracy"}, r"mode: expected \"min\" or \"max\" beside metric 'accuracy', got None"),
        ({"factor": 1.0}, r"factor: expected a number between 0 and 1, got 1.0"),
        ({"patience": -1}, r"patience: expected an integer of 0 or more, got -1; it counts epochs"),
        ({"cooldown": 1.5}, r"cooldown: expected an integer of 0 or more, got 1.5"),
        ({"threshold": -1.0}, r"threshold: expected a finite number of 0 or more, got -1.0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        optim.ReduceOnPlateau(**arguments)
