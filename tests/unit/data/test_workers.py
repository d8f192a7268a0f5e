"""Workers give what the data set gives by itself, and an error is the data set's own."""

import os
import time

import numpy as np
import pytest
from worker_samples import Broken, Where, jitter

from mpdp import data
from mpdp.data.reading import take
from mpdp.errors import WorkerError

NUMBERS = data.ArrayDataset(np.arange(40.0).reshape(20, 2), np.arange(20))


@pytest.fixture
def workers():
    made = []

    def make(*arguments, **options):
        made.append(data.Workers(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_batches_are_those_of_the_data_set(workers, kind, tmp_path):
    np.save(tmp_path / "x.npy", NUMBERS.arrays[0])
    np.save(tmp_path / "y.npy", NUMBERS.arrays[1])
    mapped = data.ArrayDataset.from_npy(tmp_path / "x.npy", tmp_path / "y.npy")
    dataset = data.Transform(mapped, jitter, random=True)
    several = workers(dataset, 3, kind=kind)
    for indices, draw in (
        ([4, 1, 19, 0, 7], data.Draw(3, 2)),
        ([5], data.Draw()),
        (range(20), data.Draw(0, 1)),
    ):
        expected = take(dataset, np.array(indices), draw=draw)
        found = take(several, np.array(indices), draw=draw)
        for a, b in zip(found, expected):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
    assert take(several, np.array([], int)) is None
    assert len(several) == 20 and several[2][1] == 2
    around = data.Transform(several, lambda s: (s[0] * 2, s[1]))
    np.testing.assert_array_equal(
        take(around, np.array([3]), draw=data.Draw(1, 1))[0],
        2 * take(dataset, np.array([3]), draw=data.Draw(1, 1))[0],
    )


def test_processes_are_others_and_end(workers):
    several = workers(Where(), 2)
    found = take(several, np.arange(8))
    pids = sorted(set(found[:, 0].tolist()))
    assert len(pids) == 2 and os.getpid() not in pids
    assert not found[:, 1:3].any(), "no MPI, no launcher"
    assert found[:, 3].tolist() == list(range(8))
    again = take(several, np.arange(8))
    assert sorted(set(again[:, 0].tolist())) == pids
    several.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_an_error_in_a_worker(workers, kind):
    several = workers(Broken(), 2, kind=kind)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="mine") as caught:
            take(several, np.arange(4), " (rank 2)")
        notes = "\n".join(caught.value.__notes__)
        assert "while loading sample 3" in notes and "(rank 2)" in notes
        if kind == "processes":
            assert "in worker process 1:" in notes and "__getitem__" in notes
        assert take(several, np.array([0, 1, 2])).ravel().tolist() == [0, 1, 2], "answers are not mixed up"
    if kind == "processes":
        with pytest.raises(RuntimeError, match=r"Unpicklable: 1 and 2"):
            take(several, np.array([6]))


def test_a_worker_that_dies(workers):
    several = workers(Broken(), 2)
    with pytest.raises(WorkerError, match=r"expected an answer of worker 1, got its end \(status -9\)"):
        take(several, np.array([0, 5]))
    assert take(several, np.array([0, 1])).ravel().tolist() == [0, 1], "the next batch starts new ones"


def test_what_cannot_be_sent(workers):
    with pytest.raises(
        TypeError, match=r"dataset: expected one that can be pickled for worker processes, got"
    ):
        take(workers(data.Transform(NUMBERS, lambda s: s), 1), np.array([0]))
    with pytest.raises(ValueError, match=r'kind: expected "processes" or "threads", got .fork.'):
        data.Workers(NUMBERS, 1, kind="fork")
    with pytest.raises(ValueError, match=r"count: expected 1 or more, got 0"):
        data.Workers(NUMBERS, 0)
    with pytest.raises(TypeError, match=r"dataset: expected an object with __len__"):
        data.Workers(3, 1)


def test_unequal_samples_in_different_workers(workers):
    ragged = [np.zeros(2), np.zeros(2), np.zeros(3), np.zeros(3)]
    with pytest.raises(
        ValueError, match=r"sample: expected one structure and shape in a batch, got float64\[2\] and"
    ):
        take(workers(ragged, 2, kind="threads"), np.arange(4))


def test_workers_end_with_their_owner():
    several = data.Workers(Where(), 1)
    pid = int(take(several, np.array([0]))[0, 0])
    del several
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError("the worker is still there")
