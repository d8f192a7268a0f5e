"""Turns of several sides, and the arithmetic of their figures."""

import pytest

from mpdp.bench.turns import alternate, quartiles, ratio, steps_of


def test_sides_take_turns_block_by_block():
    calls = []

    def block(name, warm_up, steps):
        calls.append((name, warm_up, steps))
        return len(calls)

    sides = [lambda w, n, name=name: block(name, w, n) for name in "ab"]
    assert alternate(sides, 3, [(1, 5), (2, 7)]) == [[1, 3, 5], [2, 4, 6]]
    assert calls == [("a", 1, 5), ("b", 2, 7)] * 3


def test_a_ratio_is_of_blocks_of_one_turn():
    # The machine is twice as slow in the second turn and four times in the third: each ratio is 3 all the same.
    ours, theirs = [1.0, 2.0, 4.0], [3.0, 6.0, 12.0]
    assert ratio(theirs, ours) == 3.0
    assert ratio(ours, ours) == 1.0
    with pytest.raises(ValueError):
        ratio([1.0], ours)


@pytest.mark.parametrize(
    ("seconds", "once", "expected"),
    [(2.0, 0.125, (4, 16)), (2.0, 1e-4, (10, 20_000)), (0.1, 3.0, (1, 1)), (0.5, 0.25, (1, 2))],
)
def test_steps_of_a_block(seconds, once, expected):
    assert steps_of(seconds, once) == expected


def test_quartiles_are_values():
    assert quartiles([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert quartiles([4.0]) == (4.0, 4.0)
    assert quartiles([float(i) for i in range(9)]) == (2.0, 6.0)
