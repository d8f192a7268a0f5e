"""Schedules: pure functions of the number of finished updates."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mpdp import optim


def test_constant():
    assert [optim.constant()(t) for t in (0, 5, 10**9)] == [1.0, 1.0, 1.0]


def test_step():
    schedule = optim.StepLR(3, gamma=0.5)
    assert [schedule(t) for t in range(8)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25]
    assert optim.StepLR(1)(2) == pytest.approx(0.01)


@pytest.mark.parametrize("final", [0.0, 0.1])
@pytest.mark.parametrize(
    "kind, shape",
    [(optim.WarmupCosine, lambda s: (1 + math.cos(math.pi * s)) / 2), (optim.WarmupLinear, lambda s: 1 - s)],
)
def test_warmup(kind, shape, final):
    schedule = kind(10, 50, final=final)
    assert [schedule(t) for t in range(10)] == [(t + 1) / 10 for t in range(10)]
    assert schedule(10) == 1.0
    for t in range(10, 50):
        assert schedule(t) == pytest.approx(final + (1 - final) * shape((t - 10) / 40), abs=1e-15)
    assert schedule(50) == schedule(1000) == pytest.approx(final, abs=1e-15)


def test_warmup_edges():
    assert optim.WarmupLinear(0, 2)(0) == 1.0
    assert optim.WarmupLinear(4, 4)(3) == 1.0
    assert optim.WarmupLinear(4, 4)(4) == 1.0


def test_describe_and_equality():
    schedule = optim.WarmupCosine(np.int64(2), 6)
    assert json.loads(json.dumps(schedule.describe())) == {
        "class": "WarmupCosine", "warmup": 2, "total": 6, "final": 0.0,
    }  # fmt: skip
    assert optim.StepLR(2).describe() == {"class": "StepLR", "step_size": 2, "gamma": 0.1}
    assert schedule == optim.WarmupCosine(2, 6) != optim.WarmupLinear(2, 6)
    assert hash(schedule) == hash(optim.WarmupCosine(2, 6))
    assert repr(optim.StepLR(2)) == "StepLR(step_size=2, gamma=0.1)"


def test_bad_counts():
    with pytest.raises(ValueError, match=r"step_size: expected 1 or more updates, got 0"):
        optim.StepLR(0)
    with pytest.raises(
        TypeError, match=r"warmup: expected a whole number of updates, got 0.1; schedules count"
    ):
        optim.WarmupCosine(0.1, 10)
    with pytest.raises(ValueError, match=r"warmup: expected at most total = 5 updates, got 6"):
        optim.WarmupLinear(6, 5)
    with pytest.raises(NotImplementedError):
        optim.Schedule()(0)


def test_sequential_parts_count_from_their_own_beginning():
    schedule = optim.Sequential(
        [optim.WarmupLinear(2, 10), optim.StepLR(3, gamma=0.5), lambda t: 0.01 * t], boundaries=[4, 9]
    )
    first, second = optim.WarmupLinear(2, 10), optim.StepLR(3, gamma=0.5)
    expected = [first(t) for t in range(4)] + [second(t) for t in range(5)] + [0.01 * t for t in range(6)]
    assert [schedule(t) for t in range(15)] == expected
    assert optim.Sequential([first], [])(3) == first(3)


def test_warmup_and_then_any_schedule():
    then = optim.StepLR(2, gamma=0.5)
    schedule = optim.Warmup(4, lambda t: 0.8 * then(t))
    assert [schedule(t) for t in range(9)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.4, 0.4, 0.2], rel=1e-15
    )
    assert [optim.Warmup(0, then)(t) for t in range(4)] == [then(t) for t in range(4)]
    cosine = optim.Warmup(10, optim.WarmupCosine(0, 40))
    assert [cosine(t) for t in range(60)] == [optim.WarmupCosine(10, 50)(t) for t in range(60)]


def test_product():
    schedule = optim.Product(optim.WarmupLinear(2, 6), optim.StepLR(4, gamma=0.5), lambda t: 3.0)
    for t in range(8):
        assert schedule(t) == optim.WarmupLinear(2, 6)(t) * optim.StepLR(4, gamma=0.5)(t) * 3.0


def halved(update):
    return 0.5**update


def test_compositions_are_described_with_their_parts():
    schedule = optim.Sequential(
        [optim.Product(optim.constant(), halved), optim.Warmup(3, optim.StepLR(2))], [5]
    )
    assert json.loads(json.dumps(schedule.describe())) == {
        "class": "Sequential",
        "boundaries": [5],
        "parts": [
            {"class": "Product", "parts": [{"class": "Constant"}, f"{__name__}.halved"]},
            {
                "class": "Warmup",
                "updates": 3,
                "parts": [{"class": "StepLR", "step_size": 2, "gamma": 0.1}],
            },
        ],
    }
    assert schedule.state() is None
    schedule.load_state(None)


def test_bad_compositions():
    with pytest.raises(
        TypeError, match=r"schedules: expected schedules or functions of the update's index, got 0.5"
    ):
        optim.Product(0.5, optim.constant())
    for boundaries in ([], [3, 3], [5, 4], [1, 2, 3]):
        with pytest.raises(
            ValueError, match=r"boundaries: expected 2 growing numbers for 3 schedules, got \["
        ):
            optim.Sequential([optim.constant()] * 3, boundaries)
    with pytest.raises(
        ValueError, match=r"boundaries: expected 0 growing numbers for 0 schedules, got \[1\]"
    ):
        optim.Sequential([], [1])
    with pytest.raises(ValueError, match=r"updates: expected 0 or more updates, got -1"):
        optim.Warmup(-1, optim.constant())
