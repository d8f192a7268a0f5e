"""Arrivals: an update may end while its weights are under way, and nobody reads one that is not here."""

import copy
import threading

import numpy as np
import pytest
from called_again import capture

import mpdp
from mpdp import data, nn, optim, threads
from mpdp.autodiff import Tensor
from mpdp.comm.base import Request
from mpdp.errors import NonFiniteError
from mpdp.parallel.collectives import AxisPeers

N, FEATURES = 60, 12
X = np.random.default_rng(0).normal(size=(N, FEATURES)).astype("float32")
Y = (X[:, 0] > 0).astype("int64")


class Late(Request):
    """What a transport that carries by itself would bring later: it is in the array once somebody has waited."""

    def __init__(self, comm, array, bounds, log):
        self._array, self._log = array, log
        self._whole = array.copy()
        comm.all_gather(self._whole, bounds)
        log.append("start")

    def wait(self):
        self._log.append("wait")
        if self._whole is not None:
            self._array[...] = self._whole
        self._whole = None


def make_late(world, log):
    comm = world.axis("data")
    comm.independent = True
    comm.start_all_gather = lambda array, bounds, lane="bulk": Late(comm, array, bounds, log)


class Net(nn.Module):
    """Layers in several chunks; what they read is noted between the starts and the waits of chunks."""

    static = True

    def __init__(self, log=None):
        self.layers = [nn.Linear(FEATURES, 160), nn.LayerNorm(160), nn.Linear(160, 160), nn.Linear(160, 2)]
        self._log = log

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            if self._log is not None:
                self._log.append(i)
            x = layer(x)
            x = x.relu() if i < 3 else x
        return x


def trainer_of(placement, optimizer="adamw", log=None, **options):
    kind = {"adamw": optim.AdamW, "lamb": optim.LAMB}[optimizer]
    mpdp.seed(1)
    return mpdp.Trainer(
        Net(log), nn.cross_entropy, kind(0.01), placement=placement, chunk_bytes=32768, seed=1, **options
    )


def fit(trainer, **options):
    trainer.fit(data.ArrayDataset(X, Y), global_batch_size=20, progress=False, **{"epochs": 2, **options})


def state(trainer):
    weights, slots = trainer.parallel.collect()
    return None if weights is None else [weights.tobytes(), *[slot.tobytes() for slot in slots.values()]]


def run(body, n=2):
    return threads.run(body, n, devices=["cpu"] * n)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("adamw", {"clip_norm": 0.1}), ("lamb", {"accumulate": 2}), ("adamw", {"ema": 0.75})],
)
@pytest.mark.parametrize("graph", [False, True])
def test_the_bits_are_those_of_updates_that_wait(monkeypatch, precision, optimizer, options, graph):
    monkeypatch.setattr("mpdp.parallel.capture.LATE_BYTES", 1)

    def body():
        log, found = [], []
        world = mpdp.init()
        for late in (False, True):
            if late:
                make_late(world, log)
            trainer = trainer_of("sharded", optimizer, precision=precision, **options)
            if graph and late:
                world.axis("data").capturable = True
                capture(trainer)
            fit(trainer, validation=data.ArrayDataset(X[:7], Y[:7]))
            trainer.check_replicas()
            found.append((state(trainer), trainer.history))
        captured = trainer.updates.graphs.captures if graph else 0
        assert captured == (options.get("accumulate", 1) if graph else 0)
        return found, log.count("start"), log.count("wait"), len(trainer.parallel.reducer.chunks)

    for (first, second), starts, waits, chunks in run(body, 3):
        assert first == second
        assert starts == waits or (graph and starts < waits)  # a graph waits too for what was waited for
        assert chunks >= 3 and starts % chunks == 0 and starts >= 6 * chunks


@pytest.mark.parametrize("graph", [False, True])
def test_forward_waits_for_the_chunks_that_it_reads_and_no_other(monkeypatch, graph):
    monkeypatch.setattr("mpdp.parallel.capture.LATE_BYTES", 1)

    def body():
        log, started = [], []
        world = mpdp.init()
        make_late(world, log)
        trainer = trainer_of("sharded", log=log)
        if graph:
            world.axis("data").capturable = True
            capture(trainer)
        placement = trainer.parallel.reducer.placement
        give = placement.start_giving

        def start(view, chunk):
            started.append(chunk)
            return give(view, chunk)

        placement.start_giving = start
        fit(trainer, updates=6, epochs=None)
        chunks = len(trainer.parallel.reducer.chunks)
        assert started == [*reversed(range(chunks))] * 6  # the first layers lie in the last chunk
        return log, {p.name: trainer.parallel.reducer.span(p.name) for p in trainer.model.parameters()}

    for log, spans in run(body):
        chunks = max(last for _, last in spans.values())
        fifth, sixth = [i for i, what in enumerate(log) if what == 0][
            -2:
        ]  # of one epoch, without a check between
        forward, behind = log[fifth:sixth], log[sixth:]
        assert forward[-chunks:] == ["start"] * chunks  # the update ended there: nobody has waited
        assert "start" not in forward[:-chunks] and forward.count("wait") == chunks
        first = set(range(*spans["layers.0.weight"])) | set(range(*spans["layers.0.bias"]))
        assert len(first) < chunks and behind[1 : len(first) + 2] == ["wait"] * len(first) + [1]
        assert graph or log.count("wait") == 6 * chunks


def test_a_graph_comes_behind_an_eager_update_whose_weights_are_under_way(monkeypatch):
    monkeypatch.setattr("mpdp.parallel.capture.LATE_BYTES", 1)

    def body():
        world, found = mpdp.init(), []
        for late in (False, True):
            if late:
                make_late(world, [])
                world.axis("data").capturable = True
            trainer = trainer_of("sharded")
            trainer.parallel.gives_late = late
            if late:
                capture(trainer)
            for size in (20, 20, 20, 20, 14, 20, 14, 20, 14, 20):
                trainer.step((X[world.rank : size : world.size], Y[world.rank : size : world.size]))
            trainer.settle()
            found.append(state(trainer))
        return found, trainer.updates.graphs.captures

    for (first, second), captures in run(body):
        assert first == second and captures == 2


class Kept(mpdp.Callback):
    """Looks at arrays of weights that were kept from before."""

    def __init__(self):
        self.views, self.seen = [], []

    def look(self):
        self.seen.append([view.tobytes() for view in self.views])

    def on_step(self, trainer):
        self.look()


@pytest.mark.parametrize("calls_back", [True, False])
def test_arrays_that_a_program_has_kept_are_whole_wherever_its_code_runs(calls_back):
    """In callbacks and metrics, behind fit, and behind each step of a loop of its own."""

    def body():
        world, kept = mpdp.init(), Kept()
        make_late(world, [])

        def metric(output, target):
            kept.look()
            return 0.0, len(target)

        trainer = trainer_of("sharded", callbacks=[kept] if calls_back else [])
        kept.views = [p.data for p in trainer.model.parameters()]
        fit(trainer, validation=data.ArrayDataset(X, Y), metrics=[metric])
        kept.look()
        for step in range(2):
            trainer.step((X[step::4][world.rank :: world.size], Y[step::4][world.rank :: world.size]))
            kept.look()
        return kept.seen, [p.data.tobytes() for p in trainer.model.parameters()]

    (seen, last), (other, end) = run(body)
    assert seen == other and seen[-1] == last == end
    assert len(seen) >= 5 + 6 * calls_back and seen[-3] != seen[-1]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_whoever_asks_a_parameter_waits_for_it(precision):
    readers = [
        lambda p: p.data.copy(),
        lambda p: p.numpy().copy(),
        lambda p: p.detach().data.copy(),
        lambda p: copy.deepcopy(p).data,
        lambda p: (p * 1.0).data,
        lambda p: np.array([p[0, 0].item()]),
        lambda p: Tensor(p).data.copy(),
    ]

    def body():
        world, found = mpdp.init(), []
        make_late(world, [])
        trainer = trainer_of("sharded", precision=precision)
        parallel = trainer.parallel
        share = slice(world.rank, 20, world.size)
        parallel.gives_late = True
        for read in readers:
            parallel.backward(nn.cross_entropy(parallel(X[share]), Y[share]))
            parallel.step(trainer.optimizer)
            assert parallel._replica.binding.arriving.left > 1
            found.append(read(trainer.model.layers[2].weight).tobytes())
            assert parallel._replica.binding.arriving is not None  # of the others nobody has asked
        parallel.arrive()
        assert parallel._replica.binding.arriving is None
        return found

    one, other = run(body)
    assert one == other


def test_the_owner_writes_nothing_that_is_still_under_way():
    """An update without a forward pass in between, as of a rank without samples, waits for the one before."""

    def body():
        log = []
        make_late(mpdp.init(), log)
        trainer = trainer_of("sharded")
        parallel = trainer.parallel
        parallel.gives_late = True
        rank = parallel.world.rank
        for _ in range(2):
            loss = nn.cross_entropy(parallel(X), Y) if rank == 0 else None
            if rank:
                assert parallel._replica.binding.arriving is None or log[-1] == "start"
            parallel.backward(loss)
            parallel.step(trainer.optimizer)
        parallel.arrive()
        return log.count("start"), log.count("wait"), [p.data.tobytes() for p in trainer.model.parameters()]

    one, other = run(body)
    assert one == other and one[0] == one[1]


def test_a_moving_average_of_whole_weights_waits_for_them():
    def body():
        log = []
        make_late(mpdp.init(), log)
        trainer = trainer_of("sharded", ema=0.5)
        fit(trainer, updates=1, epochs=None)
        return trainer.parallel._replica.can_give_late, "wait" in log

    assert run(body) == [(False, True)] * 2


def test_kept_arrays_are_whole_behind_a_fit_that_all_ranks_leave_by_an_error():
    """The ranks without a sample of the update that fails have not read a weight since the one before."""
    x, y = np.concatenate([X, np.full_like(X[:1], np.nan)]), np.append(Y, 0)

    def body():
        log = []
        make_late(mpdp.init(), log)
        trainer = trainer_of("sharded")
        kept = [p.data for p in trainer.model.parameters()]
        with pytest.raises(NonFiniteError):
            trainer.fit(
                data.ArrayDataset(x, y), epochs=1, global_batch_size=20, shuffle=False, progress=False
            )
        assert trainer.step_count == 3 and log.count("wait") == log.count("start")
        return [view.tobytes() for view in kept], [p.data.tobytes() for p in trainer.model.parameters()]

    found = run(body, 3)
    assert all(kept == asked == found[0][0] for kept, asked in found)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_is_loaded_is_not_overwritten_by_weights_under_way(precision):
    def body():
        world = mpdp.init()
        make_late(world, [])
        trainer = trainer_of("sharded", precision=precision)
        parallel, share = trainer.parallel, slice(world.rank, 20, world.size)
        trainer.step((X[share], Y[share]))
        saved, slots = parallel.collect()
        saved = None if saved is None else saved.copy()
        before = [p.numpy().tobytes() for p in trainer.model.parameters()]
        parallel.gives_late = True
        trainer.step((X[share], Y[share]))
        trainer.step((X[share], Y[share]))  # the replicas are checked after the one before
        assert parallel._replica.binding.arriving is not None
        parallel.load(saved, slots)
        return before, [p.numpy().tobytes() for p in trainer.model.parameters()]

    for before, after in run(body):
        assert before == after


def test_what_another_thread_has_waited_for_is_not_here_for_this_one():
    """On a GPU its stream has waited, and not the one that forward runs on."""

    def body():
        world = mpdp.init()
        log = []
        make_late(world, log)
        trainer = trainer_of("sharded")
        parallel, share = trainer.parallel, slice(world.rank, 20, world.size)
        parallel.gives_late = True
        parallel.backward(nn.cross_entropy(parallel(X[share]), Y[share]))
        parallel.step(trainer.optimizer)
        chunks, seen = len(parallel.reducer.chunks), []
        reader = threading.Thread(
            target=lambda: seen.extend(p.numpy().copy() for p in trainer.model.parameters())
        )
        reader.start()
        reader.join()
        waited = log.count("wait")
        assert waited >= chunks and parallel._replica.binding.arriving.left == chunks
        parallel.arrive()
        assert log.count("wait") == waited + chunks and parallel._replica.binding.arriving is None
        return [w.tobytes() for w in seen], [p.numpy().tobytes() for p in trainer.model.parameters()]

    for seen, last in run(body):
        assert seen == last


def test_a_metric_of_training_batches_reads_whole_weights_behind_a_graph(monkeypatch):
    monkeypatch.setattr("mpdp.parallel.capture.LATE_BYTES", 1)

    def body():
        world, found = mpdp.init(), []
        for late in (False, True):
            if late:
                make_late(world, [])
            world.axis("data").capturable = True
            trainer = trainer_of("sharded")
            capture(trainer)
            seen = []

            def metric(output, target, trainer=trainer, seen=seen):
                seen.append([p.numpy().tobytes() for p in trainer.model.parameters()])
                return 0.0, len(target)

            fit(trainer, metrics=[metric], epochs=3)
            assert trainer.updates.graphs.captures == 1
            found.append(seen)
        return found

    (first, second), (other, _) = run(body)
    assert len(first) == 9 and first == second == other


class Normed(Net):
    """A net whose forward pass exchanges statistics."""

    def __init__(self):
        super().__init__()
        self.layers[1] = nn.BatchNorm1d(160)


@pytest.mark.parametrize("graph", [False, True])
def test_statistics_do_not_travel_beside_weights_that_a_graph_waits_for(monkeypatch, graph):
    """NCCL's calls stand behind one another in one order on all ranks; those in a graph do not see those outside."""
    monkeypatch.setattr("mpdp.parallel.capture.LATE_BYTES", 1)
    gather = AxisPeers.gather

    def body():
        world, left = mpdp.init(), []
        make_late(world, [])
        mpdp.seed(1)
        trainer = mpdp.Trainer(
            Normed(), nn.cross_entropy, optim.AdamW(0.01), placement="sharded", chunk_bytes=32768, seed=1
        )
        if graph:
            world.axis("data").capturable = True
            capture(trainer)

        def noting(peers, numbers, what):
            if peers._comm.rank == world.rank:
                arriving = trainer.parallel._replica.binding.arriving
                left.append(0 if arriving is None else arriving.left)
            return gather(peers, numbers, what)

        for module in trainer.parallel._communicating:
            module.peers.gather = noting.__get__(module.peers)
        fit(trainer, epochs=4)
        assert not graph or trainer.updates.graphs.captures == 1
        return left

    for left in run(body):
        assert max(left[4:]) == 0 if graph else max(left) > 0
