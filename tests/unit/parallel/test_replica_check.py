"""Checks of replicas between ranks that are threads: what is found, who is believed, and what a repair restores."""

import numpy as np
import pytest

import mpdp
from mpdp import data, nn, optim, threads
from mpdp.errors import DivergenceError
from mpdp.training import checkpoint

X = np.random.default_rng(0).standard_normal((24, 4)).astype("float32")
Y = np.arange(24) % 3


class Flip(mpdp.Callback):
    """Flip the lowest bit of a number on one rank after an update."""

    def __init__(self, rank, step, where):
        self.rank, self.step, self.where = rank, step, where

    def on_step(self, trainer):
        if (trainer.world.rank, trainer.step_count) == (self.rank, self.step):
            self.where(trainer).reshape(-1)[:1].view(np.uint32)[0] ^= 1


def train(callbacks, updates=12, **options):
    mpdp.seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    trainer = mpdp.Trainer(model, nn.cross_entropy, optim.Adam(lr=0.05), callbacks=callbacks, **options)
    trainer.fit(data.ArrayDataset(X, Y), updates=updates, global_batch_size=8, progress=False)
    return trainer


def weight(trainer):
    return trainer.model[0].weight.data


def moment(trainer):
    return trainer.optimizer.state["variance"]


@pytest.mark.parametrize("where, name", [(weight, "weight of 0.weight"), (moment, "variance of 2.bias")])
def test_a_flipped_bit_is_named(where, name):
    def body():
        with pytest.raises(
            DivergenceError, match=rf"after step 10, got a different {name} on rank 1"
        ) as error:
            train([Flip(1, 9, where)])
        return error.value.agreed and error.value.root == 0

    assert threads.run(body, 3) == [True] * 3


@pytest.mark.parametrize("size, bad, root", [(3, 0, 1), (3, 2, 0), (2, 1, 0), (2, 0, 0)])
@pytest.mark.parametrize("where", [weight, moment])
def test_a_repair_takes_what_most_ranks_hold(size, bad, root, where, capfd):
    """Of two ranks, the first is believed."""

    def body():
        trainer = train([Flip(bad, 12, where)], on_divergence="repair")
        trainer.check_replicas()
        return [weight(trainer).copy(), moment(trainer).copy()]

    ranks = threads.run(body, size)
    assert "got a different" not in capfd.readouterr().err
    for arrays in ranks[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(arrays, ranks[0]))
    sound = threads.run(lambda: [weight(t := train([])).copy(), moment(t).copy()], size)[0]
    equal = all(np.array_equal(a, b) for a, b in zip(sound, ranks[0]))
    assert equal == (bad != root), "the flip came after the last update: the repaired state is the sound one"


def test_of_two_ranks_nobody_knows_which_is_right():
    def body():
        with pytest.raises(
            DivergenceError, match=r"different weight of 0\.weight on rank 1 than on rank 0; resume"
        ):
            train([Flip(0, 9, weight)])

    threads.run(body, 2)


def test_a_repair_is_said_once(capfd):
    threads.run(lambda: train([Flip(2, 9, weight)], on_divergence="repair").step_count, 3)
    said = [line for line in capfd.readouterr().err.splitlines() if "replicas:" in line]
    assert len(said) == 1 and said[0].startswith(
        "[0/3] warning replicas: found a different weight of 0.weight on rank 2 after step 10; all ranks go on with "
        "the state of rank 0, but gradients since the check before may have come from the wrong one"
    )


def test_the_loss_scale_is_repaired_too():
    def body():
        trainer = train([], precision="float16", on_divergence="repair", updates=1)
        if trainer.world.rank == 1:
            trainer.parallel.loss_scale.load_state({**trainer.parallel.loss_scale.state(), "value": 2.0})
        trainer.check_replicas()
        return trainer.parallel.loss_scale.state()["value"]

    values = threads.run(body, 3)
    assert values == [values[0]] * 3 and values[0] != 2.0


@pytest.mark.parametrize("options", [{"placement": "sharded"}, {"placement": "root"}, {"ema": 0.9}])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_repair_with_other_placements_and_an_average(options, precision):
    def body():
        trainer = train([], updates=3, precision=precision, on_divergence="repair", **options)
        weights = (
            trainer.parallel.weights
            if trainer.parallel._replica.copies is None
            else trainer.parallel._replica.copies
        )
        if trainer.world.rank == 1:
            weights[:1].view(np.uint8)[0] ^= 1
        flipped = weights[:64].tobytes()
        trainer.check_replicas()
        repaired = weights[:64].tobytes()
        trainer.fit(data.ArrayDataset(X, Y), updates=6, global_batch_size=8, progress=False)
        return flipped, repaired, weights[:64].tobytes()

    flipped, repaired, after = zip(*threads.run(body, 3))
    assert len(set(flipped)) == 2 and set(repaired) == {flipped[0]} and len(set(after)) == 1


def test_a_checkpoint_is_written_from_equal_replicas_alone(tmp_path):
    def body():
        with pytest.raises(
            DivergenceError, match=r"after step 6, got a different weight of 0\.weight on rank 1"
        ):
            train([Flip(1, 5, weight)], run_dir=tmp_path / "run", save_every=3)

    threads.run(body, 3)
    found, reasons = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert found[0].step == 3 and reasons == []


def test_a_policy_is_one_of_two():
    with pytest.raises(ValueError, match=r'on_divergence: expected "stop" or "repair", got \'mend\''):
        train([], on_divergence="mend")
