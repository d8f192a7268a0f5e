"""Odd but legal situations in 16 bits, each against a formula on the whole batch. argv = device. Runs at any n."""

import sys

import ml_dtypes
import numpy as np

import mpdp
from mpdp import kernels, nn, optim
from mpdp.autodiff import ops

world = mpdp.init(device=sys.argv[1], timeout=30)
rank, size = world.rank, world.size
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
RANDOM = np.random.default_rng(4)
X = RANDOM.standard_normal((7, 4)).astype(np.float32)
TARGET = RANDOM.standard_normal((7, 3)).astype(np.float32)
TOLERANCE = 1e-6 if world.device.kind == "cpu" else 2e-3


def put(array):
    return kernels.move(np.ascontiguousarray(array), world.device)


def share():
    """Return this rank's rows: none on rank 0 of several, and all that is left on the last."""
    cuts = [0, *[min(7, 2 * r) for r in range(size - 1)], 7]
    return slice(cuts[rank], cuts[rank + 1])


def wrap(precision, model):
    scale = optim.LossScale(initial=256.0) if precision == "float16" else None
    return mpdp.DataParallel(model, precision=precision, loss_scale=scale)


def copies_are_right(parallel):
    host = kernels.for_device(world.device).to_numpy
    copies = parallel._replica.copies
    return host(copies).tobytes() == host(parallel.weights).astype(copies.dtype).tobytes()


def unequal_and_empty_shares(precision):
    def half(a):
        return a.astype(DTYPES[precision]).astype(np.float32)

    mpdp.seed(0)
    model = nn.Linear(4, 3)
    w, b = model.weight.data.copy(), model.bias.data.copy()
    parallel, optimizer = wrap(precision, model), optim.SGD(lr=0.1)
    for _ in range(3):
        mine = share()
        output = parallel(put(X[mine]))
        parallel.backward(nn.mse(output, put(TARGET[mine])) if mine.start < mine.stop else None)
        parallel.step(optimizer)
        parallel.check_replicas()
        factor = np.float32(256.0 if precision == "float16" else 1.0)
        out = half(half(X) @ half(w).T + half(b))
        g = half(2 * factor * (out - TARGET))
        w = w - np.float32(0.1 / 21) / factor * (g.T @ half(X))
        b = b - np.float32(0.1 / 21) / factor * g.sum(0)
        np.testing.assert_allclose(model.weight.numpy(), w, atol=TOLERANCE)
        np.testing.assert_allclose(model.bias.numpy(), b, atol=TOLERANCE)
        assert copies_are_right(parallel)
        w, b = model.weight.numpy().copy(), model.bias.numpy().copy()


class Branches(nn.Module):
    """The last rank alone uses ``spare``; nobody uses ``idle``; ``first`` is tied."""

    def __init__(self):
        mpdp.seed(1)
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.spare, self.idle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.tied = self.first

    def forward(self, x):
        x = self.tied(ops.tanh(self.norm(self.first(x))))
        return self.last(self.spare(x) if rank == size - 1 else x)


def unused_tied_and_frozen(precision):
    parallel, optimizer = wrap(precision, Branches()), optim.AdamW(lr=0.05, weight_decay=0.1)
    model = parallel.model
    for step in range(4):
        if step == 2:
            parallel.freeze("norm.weight", "first.weight")
        if step == 3:
            parallel.thaw("first.weight")
        before = {name: p.numpy().copy() for name, p in model.named_parameters()}
        for final in (False, True):
            parallel.backward(nn.mse(parallel(put(X[rank::size])), put(TARGET[rank::size])), final=final)
        parallel.step(optimizer, clip_norm=1.0)
        parallel.check_replicas()
        assert copies_are_right(parallel)
        moved = {name for name, p in model.named_parameters() if not np.array_equal(before[name], p.numpy())}
        still = {"idle.weight", "idle.bias"} | ({"norm.weight"} if step >= 2 else set())
        still |= {"first.weight"} if step == 2 else set()
        assert moved == before.keys() - still, (step, moved)


def restored_by_one_rank(precision):
    """Weights that are loaded on rank 0 reach all ranks, and the working copies with them."""
    parallel = wrap(precision, nn.Linear(4, 3))
    if rank == 0:
        parallel.model.load_state_dict({"weight": np.full((3, 4), 1 / 3, "f4"), "bias": np.zeros(3, "f4")})
    parallel.broadcast()
    assert copies_are_right(parallel) and float(parallel.model.weight.numpy()[0, 0]) == np.float32(1 / 3)
    parallel.check_replicas()


for precision in DTYPES:
    for case in (unequal_and_empty_shares, unused_tied_and_frozen, restored_by_one_rank):
        case(precision)
print(f"all passed on rank {rank}", flush=True)
