"""The loader: shares, resume, casts, errors and the life of its thread."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpdp.data import ArrayDataset, Loader, Order


class Items:
    def __init__(self, length=20, make=lambda i: (np.full(2, i, np.float32), i)):
        self.length, self.make = length, make

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.make(index)


def arrays(length=20, dtype=np.float32):
    return ArrayDataset(np.arange(2 * length, dtype=dtype).reshape(length, 2), np.arange(length))


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("mpdp-loader")]


def wait_for_no_threads():
    deadline = time.monotonic() + 5
    while loader_threads() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert not loader_threads()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    wait_for_no_threads()


def ids(updates):
    return [[m.indices.tolist() for m in update] for update in updates]


@settings(deadline=None, max_examples=100)
@given(
    length=st.integers(0, 40),
    batch=st.integers(1, 12),
    accumulate=st.integers(1, 4),
    size=st.integers(1, 5),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    kind=st.sampled_from([arrays, Items]),
)
def test_ranks_together_see_each_sample_once(length, batch, accumulate, size, drop_last, shuffle, kind):
    if drop_last and 0 < length < batch:
        return
    options = {
        "accumulate": accumulate,
        "size": size,
        "drop_last": drop_last,
        "shuffle": shuffle,
        "prefetch": 0,
    }
    loaders = [Loader(kind(length), batch, rank=rank, seed=3, **options) for rank in range(size)]
    one = Loader(kind(length), batch, seed=3, **{**options, "size": 1})
    per_epoch = len(one)
    assert {len(loader) for loader in loaders} == {per_epoch}
    streams = [list(loader.updates(0, 2 * per_epoch)) for loader in loaders]
    whole = list(one.updates(0, 2 * per_epoch))
    assert {len(stream) for stream in streams} == {len(whole)} == {2 * per_epoch}
    seen = [[], []]
    for of_ranks, of_one in zip(zip(*streams), whole):
        assert all(len(update) == accumulate for update in of_ranks)
        for i, expected in enumerate(of_one):
            parts = [update[i] for update in of_ranks]
            assert np.array_equal(np.concatenate([p.indices for p in parts]), expected.indices)
            counts = [p.count for p in parts]
            assert max(counts) - min(counts) <= 1 and sum(counts) == expected.count
            assert {p.total for p in parts} == {expected.total} == {expected.count}
            starts = [expected.start + sum(counts[:rank]) for rank in range(size)]
            assert [p.start for p in parts] == starts
            assert {(p.epoch, p.update) for p in parts} == {(expected.epoch, expected.update)}
            for p in parts:
                if p.inputs is not None:
                    assert len(p.inputs[0]) == len(p.target) == p.count
                    assert np.array_equal(p.target, p.indices)
                else:
                    assert p.count == 0 and p.target is None and p.kwargs == {}
            seen[expected.epoch] += expected.indices.tolist()
    kept = length - length % batch if drop_last else length
    for epoch in (0, 1):
        assert seen[epoch] == Order(length, 3, epoch, shuffle).indices(0, length)[:kept].tolist()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_resume_at_every_update_equals_skipping(prefetch):
    """N = 10, batch 2, three epochs, two ranks, accumulate 2: a run stopped at any update goes on alike."""
    for rank in range(2):
        loader = Loader(arrays(10), 2, accumulate=2, rank=rank, size=2, prefetch=prefetch)
        whole = list(loader.updates(0, 15))
        assert [m.epoch for (m, _) in whole] == [0] * 5 + [1] * 5 + [2] * 5
        for first in range(16):
            rest = list(loader.updates(first, 15))
            assert ids(rest) == ids(whole[first:])
            for a, b in zip(rest, whole[first:]):
                for m, n in zip(a, b):
                    assert (m.update, m.epoch, m.start) == (n.update, n.epoch, n.start)
                    assert np.array_equal(m.inputs[0], n.inputs[0])


def test_reading_ahead_equals_reading_at_once():
    make = lambda prefetch: Loader(arrays(1797), 64, accumulate=3, size=3, rank=1, prefetch=prefetch)  # noqa: E731
    assert ids(make(0).updates(5, 200)) == ids(make(2).updates(5, 200))


def test_orders_differ_between_epochs_without_being_told():
    stream = Loader(arrays(20), 20, seed=1).updates(0, 3)
    epochs = [update[0].indices.tolist() for update in stream]
    assert all(a != b for a, b in itertools.combinations(epochs, 2))
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)


def test_endless_updates():
    with Loader(arrays(3), 2).updates() as stream:
        assert [next(stream)[0].epoch for _ in range(7)] == [0, 0, 1, 1, 2, 2, 3]


def test_iterating_is_one_epoch():
    loader = Loader(arrays(5), 2, shuffle=False)
    assert ids(loader) == [[[0, 1]], [[2, 3]], [[4]]] == ids(loader)
    assert len(loader) == loader.updates_per_epoch == 3


def test_data_set_smaller_than_the_world():
    for rank in range(4):
        for dataset, known in ((arrays(2), True), (Items(2), False)):
            (update,) = Loader(dataset, 8, rank=rank, size=4, shuffle=False)
            (part,) = update
            assert part.total == 2 and part.count == (1 if rank < 2 else 0)
            if part.count or known:
                assert part.inputs[0].shape == (part.count, 2) and part.inputs[0].dtype == np.float32
                assert part.target.shape == (part.count,)
            else:
                assert part.inputs is None and part.target is None


def test_empty_share_takes_the_shape_of_an_earlier_sample():
    stream = list(Loader(Items(5), 4, rank=1, size=2, shuffle=False))
    assert [update[0].count for update in stream] == [2, 0]
    assert stream[1][0].inputs[0].shape == (0, 2) and stream[1][0].target.shape == (0,)


def test_empty_share_of_zero_rows_takes_its_shape_from_sample_0():
    (update,) = Loader(Items(2), 2, rank=2, size=3, zero_rows=True)
    (part,) = update
    assert part.count == 0 and part.inputs[0].shape == (0, 2) and part.inputs[0].dtype == np.float32
    assert part.target.shape == (0,)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_empty_data_set(prefetch):
    loader = Loader(arrays(0), 4, prefetch=prefetch, drop_last=True)
    assert (
        len(loader) == 0 and list(loader) == [] and list(loader.updates(0, 5)) == [] == list(loader.updates())
    )


def test_float64_is_cast_and_said_once():
    said = []
    dataset = ArrayDataset((np.zeros((6, 2)), np.zeros((6, 2), np.float16)), np.arange(6, dtype=np.int32))
    loader = Loader(dataset, 2, say=said.append)
    for _ in range(2):
        for (part,) in loader:
            assert [x.dtype for x in part.inputs] == [np.float32] * 2 and part.target.dtype == np.int32
    assert said == ["batch[0][0]: cast from float64 to float32 on loading"]


def test_widening_is_not_worth_a_word():
    said = []
    (update,) = Loader(arrays(2), 2, dtype="float64", say=said.append)
    assert update[0].inputs[0].dtype == np.float64 and said == []
    (update,) = Loader(arrays(2, np.float64), 2, dtype=None, say=said.append)
    assert update[0].inputs[0].dtype == np.float64 and said == []


def test_default_says_it_on_rank_0(caplog):
    with caplog.at_level(logging.WARNING):
        for rank in range(2):
            list(Loader(arrays(4, np.float64), 4, rank=rank, size=2))
    assert [r.getMessage() for r in caplog.records] == ["batch[0]: cast from float64 to float32 on loading"]


def test_targets_of_regression_are_cast_too():
    (update,) = Loader(ArrayDataset(np.zeros((2, 3)), np.zeros(2)), 2, say=lambda line: None)
    assert update[0].target.dtype == np.float32


def test_batches_of_several_inputs():
    x, y = np.zeros((4, 2), np.float32), np.arange(4)
    (update,) = Loader(ArrayDataset((x, x), y), 4)
    assert len(update[0].inputs) == 2 and update[0].kwargs == {}
    (update,) = Loader(ArrayDataset(image=x, mask=x, target=y), 4)
    assert update[0].inputs == () and sorted(update[0].kwargs) == ["image", "mask"]
    assert update[0].target.shape == (4,)
    (update,) = Loader(ArrayDataset(x), 4)
    assert len(update[0].inputs) == 1 and update[0].target is None


class Odd(BaseException):
    pass


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("kind", [ValueError, FileNotFoundError, Odd, SystemExit])
def test_error_of_the_data_set_reaches_the_caller(kind, prefetch):
    def make(index):
        if index == 14:
            raise kind("no sample")
        return index

    loader = Loader(Items(20, make), 4, rank=1, size=2, shuffle=False, prefetch=prefetch)
    stream, good = loader.updates(0, 5), []
    with pytest.raises(kind, match="no sample"):
        while True:
            good.append(next(stream))
    assert len(good) == 3  # those before it arrive first: samples 2, 3, 6, 7, 10, 11
    assert list(stream) == []  # at its end


def test_note_names_sample_rank_epoch_and_update():
    def make(index):
        raise ValueError("torn file")

    with pytest.raises(ValueError, match="torn file") as caught:
        next(Loader(Items(20, make), 4, rank=1, size=2, shuffle=False).updates(8))
    assert caught.value.__notes__ == ["while loading sample 14 (rank 1, epoch 1, update 8)"]
    assert any(entry.name == "make" for entry in caught.traceback)  # the data set's own frame is shown


def test_stop_iteration_of_a_data_set_is_no_quiet_end():
    def make(index):
        raise StopIteration

    for prefetch in (0, 2):
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(Loader(Items(20, make), 4, prefetch=prefetch))


def test_samples_of_unequal_shape():
    dataset = Items(4, lambda i: (np.zeros(2 + (i == 3)), i))
    message = r"sample\[0\]: expected shape \(2,\) as in sample 2, got \(3,\) in sample 3"
    with pytest.raises(ValueError, match=message):
        list(Loader(dataset, 2, shuffle=False))


def test_thread_is_bounded_and_named():
    made = []
    dataset = Items(1000, lambda i: made.append(i) or (float(i), i))
    with Loader(dataset, 1, rank=2, size=3, shuffle=False, prefetch=2).updates(2) as stream:
        next(stream)
        assert [thread.name for thread in loader_threads()] == ["mpdp-loader-rank2"]
        assert all(thread.daemon for thread in loader_threads())
        time.sleep(0.05)
    assert len(made) == 0  # rank 2 of 3 has no part of single samples
    with Loader(dataset, 1, shuffle=False, prefetch=2).updates() as stream:
        next(stream)
        time.sleep(0.05)
        assert len(made) <= 1 + 2 + 1  # taken, waiting, in the thread's hand
    assert not loader_threads()


def test_thread_ends_when_the_consumer_stops_early():
    loader = Loader(arrays(100), 2)
    for update in loader:
        assert update
        break
    wait_for_no_threads()
    stream = loader.updates()
    next(stream)
    del stream
    wait_for_no_threads()
    stream = loader.updates()
    stream.close()
    stream.close()
    assert not loader_threads() and list(stream) == []
    with pytest.raises(KeyError), loader.updates() as stream:
        next(stream)
        raise KeyError
    assert not loader_threads()


def test_thread_ends_with_the_data():
    stream = Loader(arrays(4), 2).updates(0, 2)
    assert len(list(stream)) == 2
    assert not loader_threads()


def test_closed_while_the_data_set_blocks():
    release = threading.Event()
    dataset = Items(10, lambda i: release.wait(5) and (0.0, 0))
    stream = Loader(dataset, 1).updates()
    threading.Timer(0.05, release.set).start()
    start = time.monotonic()
    stream.close()
    assert time.monotonic() - start < 4


def test_two_streams_of_one_loader():
    loader = Loader(arrays(30), 3)
    a, b = loader.updates(0, 10), loader.updates(5, 10)
    assert ids(a)[5:] == ids(b)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"global_batch_size": 0}, r"global_batch_size: expected 1 or more, got 0"),
        ({"accumulate": 0}, r"accumulate: expected 1 or more, got 0"),
        ({"rank": 2, "size": 2}, r"rank: expected one of 0..1, got 2"),
        ({"prefetch": -1}, r"prefetch: expected 0 or more, got -1"),
        (
            {"global_batch_size": 21, "drop_last": True},
            r"drop_last: expected at least one full batch of 21 samples, got 20 samples; lower",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Loader(arrays(20), **{"global_batch_size": 4, **arguments})


def test_bad_types():
    with pytest.raises(TypeError, match=r"global_batch_size: expected a whole number, got 2.5"):
        Loader(arrays(20), 2.5)
    with pytest.raises(
        TypeError, match=r"dataset: expected an object with __len__ and __getitem__, got generator"
    ):
        Loader((i for i in range(3)), 2)
    with pytest.raises(ValueError, match=r"first: expected 0 or more, got -1"):
        Loader(arrays(20), 2).updates(-1)
