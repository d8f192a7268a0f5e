"""The chunk table: covers everything once, in order, on span boundaries, with small ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpdp.comm.base import Communicator
from mpdp.parallel.chunks import chunk_table
from mpdp.parallel.layout import SPAN


@given(st.integers(0, 3000), st.sampled_from([2, 4, 8]), st.integers(1, 64 << 20), st.integers(1, 16))
def test_chunks_cover_every_span_once_in_order(spans, itemsize, chunk_bytes, edge):
    table = chunk_table(spans * SPAN, itemsize, chunk_bytes, edge)
    position = 0
    for start, stop in table:
        assert start == position
        assert stop > start
        assert start % SPAN == 0
        assert (stop - start) * itemsize <= max(chunk_bytes, SPAN * itemsize)
        position = stop
    assert position == spans * SPAN


@pytest.mark.parametrize("edge", [1, 4, 8])
def test_the_first_and_the_last_chunk_are_small(edge):
    table = chunk_table(4096 * SPAN, 4, 4 << 20, edge)
    sizes = [(stop - start) * 4 for start, stop in table]
    assert sizes[0] == sizes[-1] == (4 << 20) // edge
    assert max(sizes) == 4 << 20
    assert len(table) > 4


def test_a_small_model_is_one_chunk():
    assert chunk_table(10 * SPAN, 4, Communicator.chunk_bytes) == ((0, 10 * SPAN),)
    assert chunk_table(0, 4, Communicator.chunk_bytes) == ()


@pytest.mark.parametrize("bad", [0, -1, 1.5, "x"])
def test_a_bad_size_is_an_error(bad):
    with pytest.raises(ValueError, match=r"chunk_bytes: expected a positive number of bytes, got"):
        chunk_table(SPAN, 4, bad)
