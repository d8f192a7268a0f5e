"""A world of threads: what ranks get, what they share, and how one that fails ends all."""

import sys
import threading
import time

import numpy as np
import pytest

import mpdp
from mpdp import data, nn, optim, threads
from mpdp.errors import CommunicationError, LaunchError, Preempted, RankFailedError, StallError

SIZES = [1, 2, 3, 4]


def join(**arguments):
    return mpdp.init(device="cpu", **arguments)


def digits(count=101):
    random = np.random.default_rng(3)
    return data.ArrayDataset(
        random.standard_normal((count, 12)).astype(np.float32), random.integers(0, 5, count)
    )


def train(device="cpu", run_dir=None, callbacks=(), updates=12):
    """Train a small model in this rank's world and return its trainer."""
    mpdp.init(device=device)
    mpdp.seed(1)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 5))
    trainer = mpdp.Trainer(
        model,
        nn.cross_entropy,
        optim.SGD(lr=0.1, momentum=0.9),
        run_dir=run_dir,
        callbacks=callbacks,
        chunk_bytes=1024,
    )
    if run_dir is not None:
        trainer.resume()
    trainer.fit(digits(), updates=updates, global_batch_size=23)
    return trainer


def weights(trainer):
    return np.concatenate([p.numpy().reshape(-1) for p in trainer.model.parameters()])


@pytest.mark.parametrize("size", SIZES)
def test_each_thread_is_a_rank_of_one_world(size):
    def rank():
        world = join()
        assert mpdp.init() is mpdp.current_world() is world
        sums = np.array([world.rank + 1.0])
        world.comm.all_reduce(sums)
        return world.rank, world.size, world.local_rank, world.num_nodes, world.transport, sums[0]

    total = size * (size + 1) / 2
    assert threads.run(rank, size) == [(r, size, r, 1, "threads", total) for r in range(size)]
    assert mpdp.init().size == 1


@pytest.mark.parametrize("size", SIZES)
def test_training_is_exact(size):
    results = threads.run(lambda: weights(train()), size)
    assert all((result == results[0]).all() for result in results)
    np.testing.assert_allclose(results[0], weights(train()), rtol=2e-5, atol=2e-6)


def test_a_run_repeats_its_bits():
    first, again = (threads.run(lambda: weights(train()), 3)[0] for _ in range(2))
    assert (first == again).all()


def test_seeds_and_modes_belong_to_a_thread():
    barrier = threading.Barrier(2)

    def rank():
        world = join()
        mpdp.seed(world.rank)
        barrier.wait(10)
        layer = nn.Linear(3, 3)
        if world.rank == 0:
            with mpdp.no_grad():
                barrier.wait(10)
                barrier.wait(10)
        else:
            barrier.wait(10)
            (layer(np.ones((1, 3), np.float32)).sum()).backward()
            barrier.wait(10)
        return layer.weight.numpy().copy(), layer.weight.grad is not None

    (a, a_grad), (b, b_grad) = threads.run(rank, 2)
    assert (a != b).any() and (a_grad, b_grad) == (False, True)


def test_blas_threads_are_shared_out_and_given_back(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    import sklearn.utils  # noqa: F401  loads OpenMP, whose count of threads belongs to the thread that asks

    from mpdp.world import blas_threads

    before = blas_threads()
    assert max(threads.run(blas_threads, 64)) == 1
    assert blas_threads() == before


def test_the_first_error_ends_all():
    ended = []

    def rank():
        try:
            world = join()
            if world.rank == 1:
                raise KeyError("the reason")
            world.comm.barrier()
        finally:
            ended.append(threading.current_thread().name)

    with pytest.raises(KeyError, match="the reason") as raised:
        threads.run(rank, 3)
    assert raised.value.__notes__ == ["on rank 1 of 3 threads"]
    assert sorted(ended) == ["mpdp-rank0", "mpdp-rank1", "mpdp-rank2"]


@pytest.mark.parametrize("where", ["before init", "in init", "in recv", "in python"])
def test_an_error_ends_ranks_wherever_they_are(where):
    def rank():
        if threading.current_thread().name == "mpdp-rank1":
            if where != "before init" and where != "in init":
                join()
            time.sleep(0.1)
            raise ZeroDivisionError("now")
        if where == "before init":
            time.sleep(0.2)
        world = join()
        if where == "in recv":
            world.comm.recv(np.zeros(1), source=1)
        while True:
            pass

    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="now"):
        threads.run(rank, 2)
    assert time.monotonic() - start < 6
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mpdp-rank")]


def test_a_rank_that_ends_while_others_wait_is_an_error():
    def rank():
        world = join()
        if world.rank != 1:
            world.comm.barrier()

    with pytest.raises(RankFailedError, match="got rank 1 ended while rank 0 waits; run the same code"):
        threads.run(rank, 3)


def test_joining_while_a_module_is_imported_is_an_error(tmp_path, monkeypatch):
    """The other ranks wait for the import, inside of Python's lock on the module, and would do so forever."""
    (tmp_path / "joins_at_import.py").write_text("import mpdp\nworld = mpdp.init(device='cpu')\n")
    (tmp_path / "imports_it.py").write_text("from joins_at_import import world\n")
    monkeypatch.syspath_prepend(tmp_path)
    began = time.monotonic()
    with pytest.raises(
        LaunchError, match=r"init: expected a call outside of an import .* while joins_at_import is imported"
    ):
        threads.run(lambda: __import__("imports_it").world.rank, 2)
    assert time.monotonic() - began < 10
    assert threads.run(lambda: __import__("imports_it").world.rank, 1) == [0]
    for module in ("imports_it", "joins_at_import"):
        del sys.modules[module]


def test_a_rank_that_does_not_come_is_reported_with_its_stack():
    def rank():
        world = join(timeout=0.3)
        if world.rank == 1:
            a_long_nap()
        world.comm.barrier()

    def a_long_nap():
        for _ in range(100):
            time.sleep(0.05)

    with pytest.raises(StallError, match=r"got rank 0 waiting while rank 1 did not come") as raised:
        threads.run(rank, 2)
    assert "a_long_nap" in raised.value.__notes__[0]


def test_an_error_of_all_ranks_may_be_caught():
    def rank():
        world = join()
        trainer = mpdp.Trainer(nn.Linear(12, 5), nn.cross_entropy, optim.SGD(lr=0.1))
        try:
            trainer.fit(digits(), epochs=-1, global_batch_size=4)
        except ValueError:
            world.comm.barrier()
            return "caught"
        return "no error"

    assert threads.run(rank, 2) == ["caught", "caught"]


def test_a_failing_trainer_ends_the_others():
    class Fails(mpdp.Callback):
        def on_step(self, trainer):
            if trainer.world.rank == 1 and trainer.step_count == 3:
                raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        threads.run(lambda: train(callbacks=[Fails()]), 2)


def test_a_request_to_stop_stops_all_at_one_step():
    class Stops(mpdp.Callback):
        def on_step(self, trainer):
            if trainer.world.rank == 1 and trainer.step_count == 5:
                trainer.should_stop = True

    steps = threads.run(lambda: train(callbacks=[Stops()], updates=100).step_count, 3)
    assert len(set(steps)) == 1 and 5 <= steps[0] < 10


def test_a_checkpoint_of_threads_goes_on_elsewhere(tmp_path):
    def first():
        trainer = train(run_dir=tmp_path, updates=6)
        trainer.save()
        return trainer.step_count

    assert threads.run(first, 3) == [6, 6, 6]
    resumed = train(run_dir=tmp_path, updates=12)
    assert resumed.step_count == 12
    np.testing.assert_allclose(weights(resumed), weights(train()), rtol=2e-5, atol=2e-6)


def test_ranks_that_ask_for_different_things_are_told():
    def rank():
        mpdp.init(device="cpu", timeout=5.0 + (threading.current_thread().name == "mpdp-rank1"))

    with pytest.raises(mpdp.errors.DisagreementError, match="timeout"):
        threads.run(rank, 2)


@pytest.mark.parametrize("transport", ["shared_memory", "mpi", "cuda_ipc"])
def test_a_transport_of_processes_is_refused(transport):
    with pytest.raises(CommunicationError, match="expected auto, threads or staged where ranks are threads"):
        threads.run(lambda: join(transport=transport), 2)


def test_devices_are_those_given():
    assert threads.run(lambda: str(mpdp.init().device), devices=["cpu", "cpu", "cpu"]) == ["cpu"] * 3
    with pytest.raises(ValueError, match=r"device: expected cpu as given to threads\.run, got cuda"):
        threads.run(lambda: mpdp.init(device="cuda"), devices=["cpu", "cpu"])


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="n: expected a number of threads of at least 1, got 0"):
        threads.run(join, 0)
    with pytest.raises(ValueError, match="devices: expected 3, one a rank, got 2"):
        threads.run(join, 3, devices=["cpu", "cpu"])
    with pytest.raises(LaunchError, match="got one in a rank"):
        threads.run(lambda: threads.run(join, 2), 1)


def test_a_rank_of_a_launcher_starts_no_threads(monkeypatch):
    from mpdp import guard, launch

    monkeypatch.setattr(guard.current, "announcement", launch.Announcement(4, 1, 1, 4, "hydra"))
    with pytest.raises(LaunchError, match="expected a process that is no rank, got rank 1 of 4"):
        threads.run(join, 2)


def test_an_exit_with_a_status_is_an_end_of_all():
    def rank():
        if join().rank == 1:
            raise SystemExit(3)
        mpdp.init().comm.barrier()

    with pytest.raises(SystemExit) as raised:
        threads.run(rank, 2)
    assert raised.value.code == 3


def test_an_end_in_order_lets_every_rank_finish():
    """The first rank to have ended leaves the others time for their files and their log, messages too."""
    received = np.zeros(1)

    def rank():
        world = join()
        if world.rank:
            time.sleep(0.2)
        if world.rank == 1:
            world.comm.send(np.full(1, 7.0), to=2)
        elif world.rank == 2:
            world.comm.recv(received, source=1)
        raise Preempted("SIGTERM on 1 of 3 ranks")

    with pytest.raises(Preempted, match="SIGTERM on 1 of 3"):
        threads.run(rank, 3)
    assert received == 7


@pytest.mark.parametrize("size", SIZES)
def test_training_on_gpus_is_exact(gpu, size):
    results = threads.run(lambda: weights(train("cuda")), size)
    assert all((result == results[0]).all() for result in results)
    np.testing.assert_allclose(results[0], weights(train("cpu")), rtol=1e-3, atol=1e-4)


def test_steps_of_threads_are_not_captured(gpu):
    def rank():
        mpdp.init(device="cuda")
        with pytest.raises(ValueError, match="graph: expected ranks that are processes, got threads"):
            mpdp.Trainer(nn.Linear(12, 5), nn.cross_entropy, optim.SGD(lr=0.1), graph=True)
        return mpdp.Trainer(nn.Linear(12, 5), nn.cross_entropy, optim.SGD(lr=0.1)).updates.graphs

    assert threads.run(rank, 2) == [None, None]


def test_ranks_on_a_gpu_repeat_their_bits(gpu):
    first, again = (threads.run(lambda: weights(train("cuda")), 3)[0] for _ in range(2))
    assert (first == again).all()


def test_an_error_on_a_gpu_ends_all(gpu):
    def rank():
        world = mpdp.init(device="cuda")
        if world.rank == 1:
            raise KeyError("the reason")
        array = world.device.xp.ones(1 << 20, dtype="float32")
        world.comm.all_reduce(array)

    with pytest.raises(KeyError, match="the reason"):
        threads.run(rank, 3)
