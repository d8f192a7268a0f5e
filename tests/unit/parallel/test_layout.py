"""The one index space: ranges, zones, padding, hashes."""

import numpy as np
import pytest

from mpdp.parallel.layout import BLOCK, SPAN, Layout

SHAPES = {"a": (10, 30), "b": (), "c": (0,), "d": (3, 0), "e": (BLOCK,), "f": (SPAN + 1,)}


def test_ranges_are_in_reverse_registration_order_on_block_starts():
    layout = Layout(SHAPES)
    assert [e.name for e in layout.entries] == list(reversed(SHAPES))
    for entry, following in zip(layout.entries, layout.entries[1:]):
        assert entry.start % BLOCK == 0
        assert entry.stop <= following.start
    for entry in layout.entries:
        assert entry.stop - entry.start == int(np.prod(entry.shape))
        assert entry.shape == SHAPES[entry.name]


def test_frozen_parameters_lie_behind_a_padded_trainable_zone():
    layout = Layout(SHAPES, frozen=["a", "f"])
    assert layout.trainable_size % SPAN == 0
    assert [e.name for e in layout.trainable] == ["e", "d", "c", "b"]
    assert all(layout[name].start >= layout.trainable_size for name in ("a", "f"))
    assert layout.size % SPAN == 0


def test_views_share_memory_and_keep_odd_shapes():
    layout = Layout(SHAPES)
    flat = np.zeros(layout.size)
    for value, name in enumerate(SHAPES, start=1):
        view = layout.view(flat, name)
        assert view.shape == SHAPES[name]
        view[...] = value
    assert flat.sum() == sum(v * int(np.prod(s)) for v, s in enumerate(SHAPES.values(), start=1))


def test_all_frozen_leaves_an_empty_trainable_zone():
    layout = Layout({"a": (3,)}, frozen=["a"])
    assert layout.trainable_size == 0
    assert layout.trainable == ()
    assert layout["a"].start == 0


@pytest.mark.parametrize(
    "other",
    [
        Layout({**SHAPES, "a": (30, 10)}),
        Layout({("z" if k == "a" else k): v for k, v in SHAPES.items()}),
        Layout(dict(reversed(SHAPES.items()))),
        Layout(SHAPES, frozen=["e"]),
    ],
    ids=["shape", "name", "order", "frozen"],
)
def test_the_digest_sees_every_difference(other):
    assert Layout(SHAPES).digest == Layout(SHAPES).digest
    assert Layout(SHAPES).digest != other.digest
    assert 0 <= Layout(SHAPES).digest < 2**63


def test_unknown_names_are_errors():
    with pytest.raises(ValueError, match=r"frozen: expected names of parameters, got 'x'"):
        Layout(SHAPES, frozen=["x"])
    with pytest.raises(KeyError, match=r"expected one of 6 parameters such as 'f', got 'x'"):
        Layout(SHAPES)["x"]
