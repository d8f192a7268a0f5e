"""The pieces over which norms of parameters are summed."""

from __future__ import annotations

import numpy as np
import pytest
from filled_layout import Layout

from mpdp.optim.segments import Segments


def test_pieces_lie_in_one_span_and_one_parameter():
    rng = np.random.default_rng(0)
    for _ in range(40):
        count = int(rng.integers(1, 12))
        layout = Layout({str(i): (int(rng.integers(0, 9000)),) for i in range(count)})
        segments = Segments(layout, [True] * count)
        assert segments.edges[0] == 0 and segments.edges[-1] == layout.trainable_size
        assert (np.diff(segments.edges) > 0).all() and not (segments.edges % layout.BLOCK).any()
        first, last = segments.edges[:-1], segments.edges[1:] - 1
        assert (first // layout.SPAN == last // layout.SPAN).all()
        for entry, (a, b) in zip(layout.trainable, segments.spans):
            if entry.stop > entry.start:
                assert segments.edges[a] == entry.start and segments.edges[b] >= entry.stop
        assert sum(b - a for a, b in segments.spans) == segments.count  # each belongs to one


def test_rows_of_ranges():
    layout = Layout({"a": (5000,), "b": (10,), "c": (9000,)})
    segments = Segments(layout, [True, False, True])
    assert segments.edges.tolist() == [0, 4096, 5120, 5376, 8192, 12288, 16384]
    assert segments.spans.tolist() == [[0, 2], [0, 0], [3, 6]]
    assert segments.rows(0, 4096) == slice(0, 1) and segments.rows(4096, 16384) == slice(1, 6)
    assert segments.rows(8192, 8192) == slice(4, 4)
    with pytest.raises(AssertionError, match="whole pieces"):
        segments.rows(256, 4096)


def test_nothing_to_sum():
    assert Segments(Layout({}), []).count == 0
    assert Segments(Layout({"a": (0,)}), [True]).spans.tolist() == [[0, 0]]
