"""no_grad: as a block, as a decorator, nested, and per thread."""

import threading

from mpdp.autodiff import Parameter, no_grad


def test_nothing_is_recorded():
    w = Parameter([1.0])
    with no_grad():
        with no_grad():
            pass
        assert not (w * 2).requires_grad
    assert (w * 2).requires_grad


def test_an_error_ends_it():
    w = Parameter([1.0])
    try:
        with no_grad():
            raise KeyError
    except KeyError:
        pass
    assert (w * 2).requires_grad


def test_as_a_decorator():
    w = Parameter([1.0])

    @no_grad()
    def double():
        return w * 2

    assert not double().requires_grad and not double().requires_grad


def test_it_holds_for_one_thread():
    w = Parameter([1.0])
    seen = []
    with no_grad():
        thread = threading.Thread(target=lambda: seen.append((w * 2).requires_grad))
        thread.start()
        thread.join(10)
    assert seen == [True]


def test_results_of_no_grad_are_constants_later():
    w = Parameter([2.0])
    with no_grad():
        y = w * 2
    (y * w).sum().backward()
    assert w.grad.tolist() == [4]
