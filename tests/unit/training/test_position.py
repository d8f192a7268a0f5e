"""Where a run stands: what may change inside of an epoch."""

import pytest

from mpdp.training.position import Position


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (
            {"size": 4},
            {"size": 8},
            "size: expected 4 as before in this epoch, got 8; it may change between epochs",
        ),
        ({"size": 4, "ranks": 2}, {"size": 4}, "ranks: expected 2 as before in this epoch, got None; "),
        ({"size": 4}, {"size": 4, "ranks": 2}, "ranks: expected None as before in this epoch, got 2; "),
    ],
)
def test_the_order_of_samples_changes_between_epochs_only(before, now, message):
    position = Position(batch=1, order=before)
    error = position.begin(now, metrics=0)
    assert isinstance(error, ValueError) and message in str(error) and position.order == before
    position.batch = 0
    assert position.begin(now, metrics=0) is None and position.order == now
