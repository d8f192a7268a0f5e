"""The plan book: what is found, what is left to be measured, and who is told of changes."""

import pytest

from mpdp import kernels
from mpdp.device import CPU
from mpdp.kernels.plan_book import PlanBook


def test_a_book_that_is_not_timed_measures_nothing():
    book = PlanBook()
    assert book.find("a", lambda: pytest.fail("measured")) is None
    assert book.missing == book.measure() == len(book) == 0


def test_what_is_missing_is_measured_once_and_later():
    book, calls = PlanBook(timed=True), []

    def measure():
        calls.append("a")
        return "7"

    assert book.find("a", measure) is None and book.find("a", measure) is None
    assert calls == [] and book.missing == 1
    assert book.measure() == 1 and calls == ["a"]
    assert book.find("a", measure) == "7" and book.missing == 0 and book.measure() == 0


def test_no_choice_leaves_no_plan():
    book = PlanBook(timed=True)
    book.find("a", lambda: None)
    assert book.measure() == 0 and book.plans() == {}


def test_makers_are_told_of_changes_alone():
    book, told = PlanBook(), []
    book.on_change.append(lambda: told.append(book.plans()))
    book.load({"b": "2", "a": "1"})
    book.load({"a": "1"})
    book.load({})
    assert told == [{"a": "1", "b": "2"}] and list(book.plans()) == ["a", "b"]
    book.load({"a": "3"})
    assert told[1:] == [{"a": "3", "b": "2"}]


def test_what_another_has_measured_is_forgotten():
    book = PlanBook(timed=True)
    book.find("a", lambda: pytest.fail("measured"))
    book.forget_missing()
    assert book.measure() == 0


def test_an_error_while_measuring_is_raised():
    book = PlanBook(timed=True)
    book.find("a", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        book.measure()


def test_every_device_has_one():
    assert isinstance(kernels.for_device(CPU).plan_book, PlanBook)
