"""What every communicator refuses before a byte moves, and what a world of one does."""

import ml_dtypes
import numpy as np
import pytest

from mpdp.comm.activity import Activity
from mpdp.comm.base import Buffer, host_memory
from mpdp.comm.progress import ProgressThread
from mpdp.comm.solo import SoloCommunicator
from mpdp.device import CPU
from mpdp.errors import RankFailedError

COMM = SoloCommunicator()


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        ([1.0], TypeError, r"array: expected a NumPy or CuPy array, got list"),
        (np.float32(1), ValueError, r"array: expected a flat C-contiguous array, got shape \(\)"),
        (np.zeros(3, bool), TypeError, r"array: expected a dtype of float16, .* got bool"),
        (np.zeros(3, complex), TypeError, r"array: expected a dtype of float16, .* got complex128"),
        (np.zeros(3, ">f4"), TypeError, r"array: expected native byte order, got swapped bytes"),
        (np.zeros((2, 3)), ValueError, r"array: expected a flat C-contiguous array, got shape \(2, 3\)"),
        (np.zeros(6)[::2], ValueError, r"array: expected a flat C-contiguous array, got shape \(3,\)"),
        (np.zeros((2, 3), order="F"), ValueError, r"array: expected a flat C-contiguous array"),
        (np.frombuffer(bytes(8)), ValueError, r"array: expected writable memory, got a read-only array"),
    ],
)
def test_arrays_that_cannot_travel(array, error, message):
    with pytest.raises(error, match=message):
        COMM.all_reduce(array)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: COMM.all_reduce(np.zeros(2), lane="fast"),
            r"lane: expected one of bulk, urgent, got 'fast'",
        ),
        (lambda: COMM.all_reduce(np.zeros(2), op="min"), r"op: expected one of sum, max, got 'min'"),
        (lambda: COMM.broadcast(np.zeros(2), root=1), r"root: expected a rank in 0\.\.0, got 1"),
        (lambda: COMM.reduce(np.zeros(2), root=-1), r"root: expected a rank in 0\.\.0, got -1"),
        (
            lambda: COMM.all_gather(np.zeros(4), [0, 3]),
            r"bounds: expected 2 increasing offsets from 0 to 4, got",
        ),
        (lambda: COMM.reduce_scatter(np.zeros(4), [0, 2, 4]), r"bounds: expected 2 increasing offsets"),
        (lambda: COMM.barrier(lane="x"), r"lane: expected one of bulk, urgent, got 'x'"),
        (lambda: COMM.allocate(-1), r"nbytes: expected 0 or more, got -1"),
        (lambda: COMM.send(np.zeros(1), to=0), r"to: expected another rank, got 0 in a world of one"),
        (lambda: COMM.recv(np.zeros(1), source=0), r"source: expected another rank, got 0 in a world of one"),
    ],
)
def test_arguments_that_make_no_sense(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.uint8, np.int64]
)
def test_a_world_of_one_changes_nothing(dtype):
    array = np.arange(5).astype(dtype)
    before = array.copy()
    COMM.all_reduce(array)
    COMM.start_all_reduce(array, op="max").wait()
    COMM.broadcast(array)
    COMM.reduce(array)
    COMM.all_gather(array, [0, 5])
    COMM.reduce_scatter(array, [0, 5])
    COMM.barrier()
    assert np.array_equal(array, before)
    assert COMM.exclusive_sum(7) == 0
    assert COMM.broadcast_bytes(b"x") == b"x"
    assert COMM.all_gather_bytes(b"xy") == [b"xy"]
    assert COMM.duplicate().size == 1


def test_buffers_are_zeroed_aligned_and_give_views():
    buffer = COMM.allocate(1000, CPU)
    flat = buffer.array(np.float32, 250)
    assert flat.ctypes.data % 64 == 0
    assert not flat.any()
    flat[10] = 3
    assert buffer.array(np.float32, 5, 40)[0] == 3
    assert buffer.array(np.float64, 0).size == 0
    for count, offset in ((251, 0), (1, 998), (1, -4)):
        with pytest.raises(
            ValueError, match=r"buffer: expected a range inside 0\.\.1000 bytes, aligned to 4"
        ):
            buffer.array(np.float32, count, offset)
    assert isinstance(COMM.allocate(0), Buffer)
    assert host_memory(0).size == 0


def test_no_collective_is_entered_after_a_failure():
    activity = Activity()
    comm = SoloCommunicator(activity)
    activity.failure = "rank 0 failed in step 3: ValueError: mine"
    with pytest.raises(
        RankFailedError, match=r"all_reduce: expected .* \(rank 0 failed in step 3: ValueError: mine\)"
    ):
        comm.all_reduce(np.zeros(2))
    assert activity.call is None


def test_the_activity_is_left_when_a_transport_raises():
    class Broken(SoloCommunicator):
        def _all_reduce(self, array, op, lane):
            raise OSError("cable")

    comm = Broken()
    with pytest.raises(OSError, match="cable"):
        comm.all_reduce(np.zeros(2))
    assert comm.activity.call is None


def test_a_progress_thread_runs_in_order_and_hands_errors_back():
    thread = ProgressThread("test")
    seen = []

    def broken():
        raise ZeroDivisionError("there")

    requests = [thread.submit(lambda i=i: seen.append(i)) for i in range(20)]
    bad = thread.submit(broken)
    last = thread.submit(lambda: seen.append(20))
    with pytest.raises(ZeroDivisionError, match="there"):
        bad.wait()
    last.wait()
    for request in requests:
        request.wait()
    assert seen == list(range(21))
    thread.close()
