"""Agreements, with a stand-in for the other ranks; tests/parallel runs them on real ones."""

import json
import traceback

import numpy as np
import pytest

from mpdp.comm.agreement import agree, compare, on_root, together
from mpdp.comm.solo import SoloCommunicator
from mpdp.errors import CheckpointError, DisagreementError, MpdpError


class Pretended(SoloCommunicator):
    """Rank 0 of several: maxima and gathered texts are those given."""

    def __init__(self, maximum, texts):
        super().__init__()
        self.size = len(texts)
        self.maximum, self.texts = maximum, texts

    def _all_reduce(self, array, op, lane):
        assert (op, lane) == ("max", "urgent")
        array[...] = np.maximum(array, self.maximum)

    def all_gather_bytes(self, data):
        return [data, *(json.dumps(text).encode() for text in self.texts[1:])]


def test_nothing_is_raised_where_all_is_well():
    agree(SoloCommunicator(), None)
    agree(Pretended([0], [None, None]), None)
    assert together(SoloCommunicator(), lambda: 3) == 3
    assert on_root(SoloCommunicator(), lambda: 4) == 4
    assert on_root(SoloCommunicator(), lambda: 4, root=1) is None


def test_a_world_of_one_raises_the_error_itself():
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        agree(SoloCommunicator(), error)
    assert caught.value is error


def test_the_error_of_another_rank_is_raised_here_with_its_class_and_rank():
    with pytest.raises(ValueError, match=r"^target: bad \(on rank 1, 3 of 4\)$") as caught:
        agree(Pretended([1], [None, ["ValueError", "target: bad"], None, ["TypeError", "x"]]), None)
    assert caught.value.agreed
    with pytest.raises(CheckpointError, match=r"torn \(on rank 1 of 2\)"):
        agree(Pretended([1], [None, ["CheckpointError", "torn"]]), None)


def test_the_traceback_of_another_rank_comes_along():
    text = 'Traceback (most recent call last):\n  File "mine.py", line 3\nValueError: bad\n'
    with pytest.raises(ValueError) as caught:
        agree(Pretended([1], [None, ["ValueError", "bad", text]]), None)
    shown = "".join(traceback.format_exception(caught.value))
    assert "on rank 1:\n" + text.rstrip() in shown


def test_a_rank_sends_its_traceback_with_notes_and_not_without_end():
    sent = []

    class Listening(Pretended):
        def all_gather_bytes(self, data):
            sent.append(json.loads(data))
            return super().all_gather_bytes(data)

    def fail(depth):
        if depth:
            fail(depth - 1)
        error = OSError("disk")
        error.add_note("while loading sample 7")
        raise error

    for depth in (1, 900):
        with pytest.raises(OSError, match="disk"):
            together(Listening([1], [None, None]), lambda depth=depth: fail(depth))
    for name, message, text in sent:
        assert (name, message) == ("OSError", "disk")
        assert text.endswith("OSError: disk\nwhile loading sample 7\n")
        assert "in fail" in text and len(text) < 20_000


def test_a_key_error_is_quoted_once():
    with pytest.raises(KeyError) as caught:
        agree(Pretended([1], [None, None]), KeyError("name"))
    assert str(caught.value) == repr("name (on rank 0 of 2)")


def test_an_own_error_is_the_cause_of_the_agreed_one():
    error = OSError("disk")
    with pytest.raises(OSError, match=r"disk \(on every rank\)") as caught:
        agree(Pretended([1], [None, ["OSError", "disk"]]), error)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("name", ["UnicodeDecodeError", "SystemExit", "NoSuchClass", "print"])
def test_a_class_that_cannot_be_rebuilt_becomes_an_mpdp_error(name):
    with pytest.raises(MpdpError, match=rf"{name}: text"):
        agree(Pretended([1], [None, [name, "text"]]), None)


def test_compare_names_the_first_difference_and_the_ranks():
    mine = {"a": 1, "b": 2, "c": 3}
    theirs = [["a", "1"], ["b", "5"], ["c", "4"]]
    with pytest.raises(
        DisagreementError, match=r"model: expected the same b on all ranks, got 2 on rank 0, 2; 5 on rank 1"
    ):
        compare(
            Pretended([2**62, 2**62], [None, theirs, [["a", "1"], ["b", "2"], ["c", "3"]]]), "model", mine
        )
    with pytest.raises(
        DisagreementError, match=r"expected the same entry 1 on all ranks, got b 2 on rank 0; x 2 on"
    ):
        compare(Pretended([2**62, 2**62], [None, [["a", "1"], ["x", "2"], ["c", "3"]]]), "model", mine)
    with pytest.raises(
        DisagreementError, match=r"entry 2 on all ranks, got c 3 on rank 0; \(nothing\) \(nothing\) on"
    ):
        compare(Pretended([2**62, 2**62], [None, theirs[:1] + [["b", "2"]]]), "model", mine)


def test_compare_of_equal_fields_is_one_small_message():
    compare(Pretended([-(2**63), -(2**63)], [None, None]), "model", {"a": 1})
    compare(SoloCommunicator(), "model", {"a": 1})
