"""What modules exchange inside a step: gathered by rank, added up, and refused where ranks are in different modules."""

import copy
import pickle

import numpy as np
import pytest
import thread_ranks

from mpdp import nn
from mpdp.autodiff import Tensor, ops
from mpdp.errors import DisagreementError
from mpdp.parallel.collectives import AxisPeers, average_buffers

SIZES = [1, 2, 3, 4]


@pytest.mark.parametrize("size", SIZES)
def test_gather_and_add(size):
    def body(comm):
        peers = AxisPeers(comm)
        numbers = np.arange(3.0) + 10 * comm.rank
        return peers.gather(numbers, "here").copy(), peers.add(numbers, "here").copy()

    rows = np.arange(3.0) + 10 * np.arange(size)[:, None]
    for gathered, added in thread_ranks.run(size, body):
        assert np.array_equal(gathered, rows) and np.array_equal(added, rows.sum(0))


@pytest.mark.parametrize("size", SIZES[1:])
def test_ranks_in_different_modules(size):
    def gather(comm):
        with pytest.raises(
            DisagreementError, match=r"expected all ranks in it, got ranks? .* in another one"
        ) as found:
            AxisPeers(comm).gather(np.zeros(2), f"norm {comm.rank == size - 1} forward")
        assert found.value.agreed
        return str(found.value)

    messages = thread_ranks.run(size, gather)
    assert f"got rank {size - 1} in another" in messages[0]

    def add(comm):
        try:
            AxisPeers(comm).add(np.zeros(2), f"norm {comm.rank == size - 1} backward")
        except DisagreementError:
            return True
        return False

    assert any(thread_ranks.run(size, add))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lengths", [(3, 0, 2, 1), (0, 1, 0, 0), (2, 2, 2, 2)])
def test_batch_norm_over_ranks_is_that_of_the_whole_batch(size, lengths):
    lengths = lengths[:size]
    random = np.random.default_rng(0)
    x, g = (random.standard_normal((sum(lengths), 3, 2)) for _ in range(2))
    weight = Tensor(random.standard_normal(3), requires_grad=True)
    whole = Tensor(x, requires_grad=True)
    out = ops.batch_norm(whole, weight)
    out.backward(g)
    bounds = np.cumsum([0, *lengths])

    def body(comm):
        part = slice(bounds[comm.rank], bounds[comm.rank + 1])
        mine, own = Tensor(x[part], requires_grad=True), Tensor(weight.data, requires_grad=True)
        result = ops.batch_norm(mine, own, peers=AxisPeers(comm), what="here")
        result.backward(g[part])
        return result.data, mine.grad, own.grad

    results = thread_ranks.run(size, body)
    for found, expected in ((0, out.data), (1, whole.grad)):
        np.testing.assert_allclose(np.concatenate([r[found] for r in results]), expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(sum(r[2] for r in results), weight.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_buffers_are_averaged_by_samples(size):
    def body(comm):
        buffers = [nn.Buffer(np.full((2, 2), comm.rank, "float32")), nn.Buffer(np.array([10.0 * comm.rank]))]
        average_buffers(comm, buffers, float(comm.rank))
        same = [nn.Buffer(np.array([1.0, 3.0]))]
        average_buffers(comm, same, 0.0)
        return [b.data for b in (*buffers, *same)]

    ranks = np.arange(size)
    mean = (ranks * ranks).sum() / max(ranks.sum(), 1)
    for first, second, same in thread_ranks.run(size, body):
        assert first.dtype == "float32" and np.allclose(first, mean) and np.allclose(second, 10 * mean)
        assert same.tolist() == [1, 3]


def test_a_copy_of_a_model_belongs_to_no_axis():
    def body(comm):
        layer = nn.BatchNorm1d(2)
        layer.peers = AxisPeers(comm)
        return copy.deepcopy(layer).peers, pickle.loads(pickle.dumps(layer)).peers

    assert thread_ranks.run(2, body) == [(None, None)] * 2
