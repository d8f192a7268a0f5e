"""The same training on the GPU and on the CPU of the same ranks, and what the GPU adds: memory, transfers, errors.

Runs at any n; several ranks share a GPU. The world of the CPU twin is the same world with another device: host arrays
pass straight through its staged communicator.
"""

import gc
from dataclasses import replace

import numpy as np

import mpdp
from mpdp import autodiff, data, kernels, nn, optim
from mpdp.comm.base import Request
from mpdp.device import CPU
from mpdp.nn.models import GPT

gpu = mpdp.init(device="cuda", timeout=60)
cpu = replace(gpu, device=CPU)
rank, size = gpu.rank, gpu.size
CASES = []


def case(function):
    CASES.append(function)
    return function


def bounds(total):
    return [total * r // size for r in range(size + 1)][rank : rank + 2]


def close(a, b, tolerance=1e-10):
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if b.size:
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-300)
        assert error <= tolerance, f"relative difference {error}"


def twins(build, loss, optimizer, batches, tolerance=1e-10, act=None, **options):
    """Train the same thing twice and compare losses and weights; ``act(trainer, step)`` may interfere."""
    results = []
    for world in (cpu, gpu):
        mpdp.seed(0)
        trainer = mpdp.Trainer(build(), loss, optimizer(), world=world, **options)
        losses = []
        for step, batch in enumerate(batches):
            if act is not None:
                act(trainer, step)
            start, stop = bounds(len(batch[-1]))
            losses.append(trainer.step(tuple(array[start:stop] for array in batch)))
        trainer.check_replicas()
        results.append((losses, {name: p.numpy() for name, p in trainer.model.named_parameters()}))
    (losses, weights), (other_losses, other_weights) = results
    close(other_losses, losses, tolerance)
    for name, value in weights.items():
        close(other_weights[name], value, tolerance)


def class_batches(steps, samples=11, features=6, classes=4, dtype="float64"):
    random = np.random.default_rng(1)
    return [
        (random.standard_normal((samples, features)).astype(dtype), random.integers(0, classes, samples))
        for _ in range(steps)
    ]


def mlp(dtype="float64"):
    return nn.Sequential(
        nn.Linear(6, 33, dtype=dtype),
        nn.LayerNorm(33, dtype=dtype),
        nn.GELU(),
        nn.Dropout(0.4),
        nn.Linear(33, 17, dtype=dtype),
        nn.Tanh(),
        nn.Linear(17, 4, dtype=dtype),
    )


@case
def layers_and_optimizers():
    for optimizer in (
        lambda: optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        lambda: optim.Adam(lr=0.01, weight_decay=0.01),
        lambda: optim.AdamW(lr=0.01, groups=[optim.Group("*.bias", weight_decay=0.0, lr_factor=2.0)]),
    ):
        twins(
            mlp,
            nn.cross_entropy,
            optimizer,
            class_batches(12),
            precision="float64",
            accumulate=2,
            clip_norm=0.7,
            schedule=optim.WarmupCosine(3, 12),
            chunk_bytes=1,
        )


@case
def single_precision():
    twins(
        lambda: mlp("float32"),
        nn.cross_entropy,
        lambda: optim.SGD(lr=0.1),
        class_batches(10, dtype="float32"),
        1e-4,
    )


@case
def a_transformer():
    random = np.random.default_rng(2)
    batches = [(random.integers(0, 20, (7, 10)), random.integers(0, 20, (7, 10))) for _ in range(6)]
    batches[3][1][:, 4:] = -100  # masked tokens
    batches[4][1][:] = -100  # nothing to learn on any rank
    twins(
        lambda: GPT(2, 24, 3, 10, 20, dtype="float64"),
        nn.cross_entropy,
        lambda: optim.AdamW(lr=1e-3),
        batches,
        precision="float64",
    )


@case
def parameters_that_some_steps_do_not_use():
    class Alternating(nn.Module):
        def __init__(self):
            self.a = nn.Linear(6, 4, dtype="float64")
            self.b = nn.Linear(6, 4, dtype="float64")
            self.scalar = autodiff.Parameter(np.array(1.5))
            self.empty = autodiff.Parameter(np.zeros((0, 3)))
            self.turn = 0

        def forward(self, x):
            out = self.a(x) * self.scalar
            return out + self.b(x) if self.turn % 2 else out

    def act(trainer, step):
        trainer.model.turn = step

    twins(
        Alternating,
        nn.cross_entropy,
        lambda: optim.Adam(lr=0.02),
        class_batches(9),
        act=act,
        precision="float64",
    )


@case
def freezing_and_thawing():
    def act(trainer, step):
        if step == 2:
            trainer.freeze("0.weight", "4.bias")
        elif step == 5:
            trainer.thaw("0.weight")

    twins(
        mlp,
        nn.cross_entropy,
        lambda: optim.SGD(lr=0.1, momentum=0.9),
        class_batches(8),
        act=act,
        precision="float64",
    )


@case
def shares_of_every_length():
    for samples in (1, 2, 3, 5):
        twins(
            mlp, nn.cross_entropy, lambda: optim.SGD(lr=0.1), class_batches(3, samples), precision="float64"
        )


@case
def fit_and_evaluate():
    random = np.random.default_rng(3)
    dataset = data.ArrayDataset(random.standard_normal((57, 6)), random.integers(0, 4, 57))
    results = []
    for world in (cpu, gpu):
        mpdp.seed(0)
        trainer = mpdp.Trainer(
            mlp(),
            nn.cross_entropy,
            optim.AdamW(lr=0.01),
            world=world,
            precision="float64",
            accumulate=2,
            seed=4,
        )
        history = trainer.fit(
            dataset, epochs=3, global_batch_size=10, validation=dataset, metrics=[nn.accuracy]
        )
        results.append((history, trainer.evaluate(dataset, metrics=[nn.accuracy], global_batch_size=7)))
    (history, last), (other_history, other_last) = results
    for row, other in zip(history, other_history):
        close(other["loss"], row["loss"])
        assert other["accuracy"] == row["accuracy"]
    close(other_last["loss"], last["loss"])
    assert other_last["accuracy"] == last["accuracy"]


@case
def initial_weights_orders_and_masks_have_the_same_bits():
    for world in (cpu, gpu):
        mpdp.seed(7)
        trainer = mpdp.Trainer(mlp("float32"), nn.cross_entropy, optim.SGD(lr=0.1), world=world)
        weights = {name: p.numpy().tobytes() for name, p in trainer.model.named_parameters()}
        if world is cpu:
            first = weights
    assert weights == first
    mask = kernels.for_device(gpu.device).keep_mask((1, 2), 3, 4, 5, 6, 1 << 31)
    assert np.array_equal(
        gpu.device.xp.asnumpy(mask), kernels.for_device(CPU).keep_mask((1, 2), 3, 4, 5, 6, 1 << 31)
    )


@case
def batch_norm_free_buffers_live_on_the_device():
    class Shift(nn.Module):
        def __init__(self):
            self.scale = autodiff.Parameter(np.ones(6))
            self.mean = autodiff.Buffer(np.full(6, float(rank)))

        def forward(self, x):
            return (x - self.mean.data) * self.scale

    trainer = mpdp.Trainer(Shift(), lambda o, t: nn.mse(o, t), optim.SGD(lr=0.1), precision="float64")
    assert mpdp.Device("cuda", gpu.device.ordinal) == trainer.model.mean.device
    assert float(trainer.model.mean.data[0]) == 0.0  # rank 0's
    x = np.ones((4, 6))
    trainer.step((x, x))
    trainer.check_replicas()


@case
def a_bad_label_is_reported_with_its_step():
    if size > 1:
        return  # it ends the job; tests/parallel/test_gpu.py looks at that
    trainer = mpdp.Trainer(mlp("float32"), nn.cross_entropy, optim.SGD(lr=0.1))
    (x, y), *_ = class_batches(1, dtype="float32")
    trainer.step((x, y))
    y[3] = 9
    try:
        trainer.step((x, y))
    except ValueError as error:
        assert "target: expected class indices in 0..3, got 9 at sample 3" in str(error), error
        assert "in step 1" in str(error), error
    else:
        raise AssertionError("a bad label was not seen")


@case
def no_memory_beyond_weights_gradients_and_state():
    pool = gpu.device.xp.get_default_memory_pool()
    gc.collect()
    gpu.comm.allocate(16, gpu.device)  # gives back what earlier cases have left
    before = pool.used_bytes() + gpu.comm.device_bytes
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    count = sum(p.size for _, p in model.named_parameters())
    trainer = mpdp.Trainer(model, nn.mse, optim.SGD(lr=1e-3, momentum=0.9))
    x = np.ones((2, 1024), dtype="float32")
    trainer.step((x, x))
    held = pool.used_bytes() + gpu.comm.device_bytes - before
    family = getattr(gpu.comm, "family", None)
    if family is not None:  # the lanes were there before
        held += sum(lane.sizes.nbytes for lane in family.lanes)
    chunk = max(stop - start for start, stop in trainer.parallel._replica.reducer.chunks)
    assert held <= 4 * (3 * count + 2 * chunk), (held, count, chunk)


@case
def requests_may_be_waited_for_in_any_thread_order():
    comm = gpu.axis("data")
    xp = gpu.device.xp
    arrays = [xp.full(3_000_001, float(rank + i), dtype="float32") for i in range(4)]
    requests = [comm.start_all_reduce(array) for array in arrays]
    assert all(isinstance(request, Request) for request in requests)
    for request in requests:
        request.wait()
    for i, array in enumerate(arrays):
        assert bool((array == size * (size - 1) / 2 + i * size).all())
    small = xp.full(3, float(rank))
    comm.all_reduce(small, op="max", lane="urgent")
    assert bool((small == size - 1).all())


for function in CASES:
    function()
    if rank == 0:
        print(f"passed {function.__name__}", flush=True)
print(f"all passed on rank {rank} of {size}", flush=True)
