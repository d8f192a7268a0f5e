"""The loss scale: its schedule against a formula, its state, and what it refuses."""

import numpy as np
import pytest

from mpdp.optim import LossScale


def formula(finite, initial, growth, backoff, interval, smallest, largest):
    """Return (scale, skipped) after each update, from the history alone: every scale follows from the whole past."""
    results = []
    for stop in range(1, len(finite) + 1):
        value = initial
        runs = "".join("." if f else "x" for f in finite[:stop]).split("x")
        for i, run in enumerate(runs):
            for _ in range(len(run) // interval):
                value = min(value * growth, largest)
            if i + 1 < len(runs):
                value = max(value * backoff, smallest)
        results.append((value, len(runs) - 1))
    return results


@pytest.mark.parametrize("seed", range(8))
def test_the_schedule_is_the_formula(seed):
    random = np.random.default_rng(seed)
    numbers = {
        "initial": 64.0,
        "growth": float(random.choice([2.0, 4.0])),
        "backoff": float(random.choice([0.5, 0.25])),
        "interval": int(random.integers(1, 6)),
        "smallest": 1.0,
        "largest": 1024.0,
    }
    finite = (random.random(120) < random.choice([0.5, 0.9])).tolist()
    scale, found = LossScale(**numbers), []
    for f in finite:
        scale.update(f)
        found.append((scale.value, scale.skipped))
    assert found == formula(finite, **numbers)
    assert len({value for value, _ in found}) >= 3


def test_the_default_is_pytorchs():
    scale = LossScale()
    assert scale.value == 65536 and scale.state() == {"value": 65536.0, "finite": 0, "skipped": 0}
    for _ in range(1999):
        scale.update(True)
    assert scale.value == 65536
    scale.update(True)
    assert scale.value == 131072
    scale.update(False)
    assert scale.value == 65536 and scale.skipped == 1


def test_state_goes_on_to_the_same_end():
    random = np.random.default_rng(1)
    finite = (random.random(60) < 0.8).tolist()
    whole = LossScale(interval=3)
    for f in finite:
        whole.update(f)
    for cut in (1, 17, 40):
        first, second = LossScale(interval=3), LossScale(interval=3)
        for f in finite[:cut]:
            first.update(f)
        second.load_state(first.state())
        for f in finite[cut:]:
            second.update(f)
        assert second.state() == whole.state()


def test_the_bottom():
    scale = LossScale(initial=4.0, smallest=2.0)
    assert not scale.at_bottom
    scale.update(False)
    assert scale.at_bottom
    scale.update(False)
    assert scale.value == 2.0


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"growth": 1.0}, r"growth: expected a number between 1 and inf, got 1.0"),
        ({"backoff": 1.0}, r"backoff: expected a number between 0 and 1, got 1.0"),
        ({"backoff": float("nan")}, r"backoff: expected a number between 0 and 1, got nan"),
        ({"smallest": 0.0}, r"smallest: expected a number between 0 and inf, got 0.0"),
        ({"initial": 0.5}, r"initial: expected a scale in smallest..largest = 1..1.67772e\+07, got 0.5"),
        ({"largest": float("inf")}, r"initial: expected a scale in smallest..largest = 1..inf, got 65536.0"),
        ({"interval": 0}, r"interval: expected an integer of 1 or more, got 0; it counts updates"),
        ({"interval": True}, r"interval: expected an integer of 1 or more, got True"),
    ],
)
def test_bad_numbers(numbers, message):
    with pytest.raises(ValueError, match=message):
        LossScale(**numbers)
