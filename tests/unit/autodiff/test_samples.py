"""The sample context: current or not, call counts, and elements of a sample."""

import threading

import pytest

from mpdp.autodiff import SampleContext, current_samples, samples


def test_the_context_is_current_inside_and_nests():
    assert current_samples() is None
    with samples(SampleContext(0, 1, 2, 3)) as outer:
        assert current_samples() is outer and (outer.seed, outer.step, outer.start, outer.count) == (
            0,
            1,
            2,
            3,
        )
        with samples(SampleContext(0, 1, 5, 1)) as inner:
            assert current_samples() is inner
        assert current_samples() is outer
    assert current_samples() is None


def test_threads_have_their_own():
    seen = []
    with samples(SampleContext(0, 0, 0, 1)):
        thread = threading.Thread(target=lambda: seen.append(current_samples()))
        thread.start()
        thread.join(10)
    assert seen == [None]


def test_calls_are_counted_by_path():
    context = SampleContext(0, 0, 0, 1)
    assert [context.call(path) for path in ("a", "a", "b", "a")] == [0, 1, 0, 2]


@pytest.mark.parametrize(
    ("count", "shape", "elements"),
    [(4, (4, 5), 5), (4, (4,), 1), (4, (8, 5), 10), (4, (4, 2, 3), 6), (4, (0, 5), 0), (0, (0, 5), 0)],
)
def test_elements_of_a_sample(count, shape, elements):
    assert SampleContext(0, 0, 0, count).elements(shape) == elements


@pytest.mark.parametrize(("count", "shape"), [(4, (6, 5)), (4, (3,)), (4, ()), (0, (1, 5)), (0, ())])
def test_a_leading_length_that_does_not_fit_is_refused(count, shape):
    with pytest.raises(
        ValueError,
        match=r"samples: expected a leading length that is a multiple of the \d samples .* got shape",
    ):
        SampleContext(0, 0, 0, count).elements(shape)
