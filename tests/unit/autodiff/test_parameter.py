"""Parameters on views of an arena: the first write of an update assigns, later ones add."""

import copy
import pickle

import numpy as np
import pytest
from on_device import host, put, xp

from mpdp.autodiff import Buffer, Parameter, Tape, Tensor, ops

pytestmark = pytest.mark.usefixtures("device")


class Arena:
    """The smallest owner of an arena."""

    arriving = None

    def __init__(self, *parameters, dtype="float64"):
        self.update = 0
        self.dirty = False
        size = sum(p.size for p in parameters)
        self.weights, self.gradients = xp.zeros(size, dtype), xp.full(size, np.nan, dtype)
        start = 0
        for p in parameters:
            stop = start + p.size
            p.bind(
                self.weights[start:stop].reshape(p.shape), self.gradients[start:stop].reshape(p.shape), self
            )
            start = stop


def test_binding_keeps_values_and_moves_memory():
    w = Parameter([[1.0, 2.0]])
    arena = Arena(w)
    assert arena.weights.tolist() == [1, 2] and xp.shares_memory(w.data, arena.weights)
    assert xp.shares_memory(w.grad, arena.gradients)


def test_the_first_write_of_an_update_assigns_and_later_ones_add():
    w, b = Parameter([[1.0, 2.0]]), Parameter([3.0])
    arena = Arena(w, b)
    x = put([[1.0, 1.0], [2.0, 0.0]])
    for update in range(3):
        arena.update = update
        arena.gradients[...] = np.nan  # what an update leaves behind is never read
        for times in (1, 2, 3):
            ops.linear(x, w, b).sum().backward()
            assert arena.gradients.tolist() == [3 * times, times, 2 * times]


def test_bound_views_are_written_in_place_by_every_path():
    w = Parameter(np.arange(4.0).reshape(2, 2))
    exact = Parameter(put(w.data))
    arena = Arena(w)

    def losses(p):
        x = put([[1.0, -1.0]])
        yield (x @ p).sum()  # written by the operation
        yield (p * 2).sum()  # an array of the operation's
        yield (p.T * 3).sum()  # a view of one
        yield (p * p).sum() + (p @ p).sum()  # twice by one operation

    view = w.grad
    for loss in losses(w):
        loss.backward()
    for loss in losses(exact):
        loss.backward()
    assert w.grad is view and np.array_equal(host(arena.gradients).reshape(2, 2), host(exact.grad))


def test_a_leaf_that_gets_no_gradient_is_zero_and_not_stale():
    from mpdp import autodiff

    stop = autodiff.register("stop", lambda k, x: (x, None), lambda k, saved, g, wants: (None,))
    w = Parameter([1.0, 2.0])
    arena = Arena(w)
    stop(w).sum().backward()
    assert arena.gradients.tolist() == [0, 0]


def test_a_bound_leaf_as_its_own_loss():
    w = Parameter(3.0)
    arena = Arena(w)
    w.backward()
    w.backward(2.0)
    assert arena.gradients.tolist() == [3]
    arena.update += 1
    w.backward()
    assert arena.gradients.tolist() == [1]


def test_scalar_and_empty_parameters_are_bound_too():
    s, e, f = Parameter(2.0), Parameter(np.zeros((3, 0))), Parameter(np.zeros(0))
    arena = Arena(s, e, f)
    ((s * xp.ones(4)).sum() + e.sum() + (f * 2).sum()).backward()
    assert s.grad.shape == () and float(s.grad) == 4 and arena.gradients.tolist() == [4]
    assert e.grad.shape == (3, 0)


def test_assigning_to_a_bound_parameter_copies_into_the_view():
    w = Parameter(np.zeros((2, 2), "f4"), name="w")
    arena = Arena(w, dtype="f4")
    view = w.data
    w.data = xp.ones((2, 2), "f2")
    assert w.data is view and arena.weights.tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match=r"data: expected shape \(2, 2\) of 'w', got \(2,\); reshape it"):
        w.data = xp.zeros(2, "f4")
    with pytest.raises(
        TypeError,
        match=r"data: expected float32 of 'w' or a dtype that casts to it safely, got float64; conv",
    ):
        w.data = xp.zeros((2, 2))
    assert arena.weights.tolist() == [1, 1, 1, 1]
    w.grad = xp.full((2, 2), 5, "f4")
    w.sum().backward()  # adds: the assignment was this update's first write
    assert arena.gradients.tolist() == [6, 6, 6, 6]
    w.grad = None
    assert arena.gradients.tolist() == [0, 0, 0, 0] and w.grad is not None
    w.sum().backward()
    assert arena.gradients.tolist() == [1, 1, 1, 1]


def test_views_of_another_shape_are_refused():
    w = Parameter([1.0, 2.0], name="w")
    with pytest.raises(
        ValueError, match=r"grad_view: expected shape \(2,\) of 'w', got \(3,\); check the layout"
    ):
        w.bind(xp.zeros(2), xp.zeros(3), Arena())
    with pytest.raises(ValueError, match=r"data_view: expected shape \(2,\) of 'w', got \(1, 2\)"):
        w.bind(xp.zeros((1, 2)), xp.zeros(2), Arena())
    assert w.grad is None and w.data.tolist() == [1, 2]


def test_freezing_a_bound_parameter_marks_the_arena():
    w = Parameter([1.0])
    w.requires_grad = True
    arena = Arena(w)
    w.requires_grad = True
    assert not arena.dirty
    w.requires_grad = False
    assert arena.dirty and not (w * 2).requires_grad


def test_binding_again_moves_the_values_on():
    w = Parameter([1.0, 2.0])
    old = Arena(w)
    w.data = put([3.0, 4.0])
    new = Arena(w)
    w.sum().backward()
    assert (
        new.weights.tolist() == [3, 4]
        and new.gradients.tolist() == [1, 1]
        and np.isnan(host(old.gradients)).all()
    )


def test_a_parameter_bound_again_marks_the_arena_it_leaves():
    w = Parameter([1.0])
    first, second = Arena(w), Arena(w)
    assert (first.dirty, second.dirty) == (True, False)


def test_a_frozen_bound_parameter_has_no_gradient_to_set():
    w = Parameter([1.0])
    arena = Arena()
    w.bind(put([0.0]), None, arena)
    w.grad = None
    with pytest.raises(ValueError, match=r"grad: expected None for the frozen Parameter, got an array"):
        w.grad = put([1.0])


def test_copies_of_a_bound_parameter_are_unbound():
    w = Parameter([1.0, 2.0])
    arena = Arena(w)
    for twin in (copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        twin.data = xp.zeros(5)
        twin.sum().backward()
        assert twin.grad.shape == (5,)
    assert arena.weights.tolist() == [1, 2] and np.isnan(host(arena.gradients)).all()


def test_gradient_views_may_be_wider_than_the_values():
    w = Parameter(np.ones((2, 2), "f2"))
    grad = xp.full((2, 2), np.nan, "f4")

    class Binding:
        arriving = None
        update, dirty = 0, False

    w.bind(xp.zeros((2, 2), "f2"), grad, Binding())
    (w * 3).sum().backward()
    ops.linear(xp.ones((1, 2), "f2"), w).sum().backward()
    assert grad.dtype == np.float32 and grad.tolist() == [[4, 4], [4, 4]]


def test_a_buffer_is_never_differentiated():
    b = Buffer([1.0])
    assert not b.requires_grad and not (b * 2).requires_grad
    b.requires_grad = False
    with pytest.raises(
        ValueError, match=r"requires_grad: expected False for a Buffer, got True; use a Parameter"
    ):
        b.requires_grad = True


def test_the_tape_is_the_same_bound_or_not():
    w = Parameter([1.0], name="w")
    before = Tape((w * 2).sum()).signature
    Arena(w)
    assert Tape((w * 2).sum()).signature == before
    assert isinstance(w, Tensor)
