"""The loss of an update under way: a number as soon as somebody looks at it."""

import math

import pytest

from mpdp.parallel.late_loss import LateLoss


def late(value=2.5):
    asked = []
    loss = LateLoss(lambda update: (asked.append(update), loss.settle(value)), 7)
    return loss, asked


def test_it_asks_once_and_only_when_it_must():
    loss, asked = late()
    assert not asked
    assert float(loss) == 2.5 and float(loss) == 2.5 and asked == [7]
    loss, asked = late()
    loss.settle(1.0)
    assert float(loss) == 1.0 and not asked


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        (lambda x: x + 1, 3.5),
        (lambda x: 1 + x, 3.5),
        (lambda x: x - 1, 1.5),
        (lambda x: 1 - x, -1.5),
        (lambda x: x * 2, 5.0),
        (lambda x: 2 * x, 5.0),
        (lambda x: x / 2, 1.25),
        (lambda x: 5 / x, 2.0),
        (lambda x: -x, -2.5),
        (abs, 2.5),
        (lambda x: round(x, 0), 2.0),
        (lambda x: f"{x:.2f}", "2.50"),
        (repr, "2.5"),
        (hash, hash(2.5)),
        (bool, True),
        (math.isfinite, True),
        (
            lambda x: (x > 2, x >= 3, x < 3, x <= 2, x == 2.5, x != 2.5),
            (True, False, True, False, True, False),
        ),
        (lambda x: min(x, 7.0) == 2.5, True),
        (lambda x: x + late(0.5)[0], 3.0),
    ],
)
def test_it_does_what_numbers_do(look, expected):
    loss, asked = late()
    assert look(loss) == expected and asked


def test_an_update_that_was_broken_off_has_no_loss():
    assert math.isnan(float(LateLoss(lambda update: None, 0)))
