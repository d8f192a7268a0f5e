"""Train a PyTorch module over the arena on any number of ranks, beside plain PyTorch on the whole batch.

Each rank begins with weights of its own; rank 0's count. Batches are cut into shares of unequal length, and with one
sample some ranks have none. Records the digest of the weights, and the largest difference from plain PyTorch.
"""

import copy
import hashlib
import sys

import numpy as np
import torch
from launching import record
from torch import nn
from torch.nn import functional as F

import mpdp
from mpdp import data
from mpdp.errors import DisagreementError, DivergenceError
from mpdp.interop.torch import DataParallel

torch.set_num_threads(1)
BATCHES = [12, 7, 1, 12, 5]


def build(seed, width=16):
    torch.manual_seed(seed)
    layers = nn.Sequential(
        nn.Linear(8, width), nn.BatchNorm1d(width, track_running_stats=True), nn.Linear(width, 4)
    )
    return layers.double()


def main():
    world = mpdp.init()
    module = build(world.rank).eval()  # batch norm by its buffers, which are rank 0's
    module[1].running_mean += world.rank
    parallel = DataParallel(module, world, chunk_bytes=4096)
    plain = copy.deepcopy(module)
    reference = build(0).eval()
    assert all(
        torch.equal(a, b) for a, b in zip(module.state_dict().values(), reference.state_dict().values())
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in (module, plain)]
    random = np.random.default_rng(5)
    for size in BATCHES:
        x = torch.from_numpy(random.standard_normal((size, 8)))
        y = torch.from_numpy(random.integers(0, 4, size))
        for micro, final in ((slice(0, size // 2), False), (slice(size // 2, size), True)):
            start, stop = data.share(len(y[micro]), world.size, world.rank)
            mine, labels = x[micro][start:stop], y[micro][start:stop]
            loss = F.cross_entropy(module(mine), labels, reduction="sum") if len(labels) else None
            parallel.backward(loss, len(labels), final)
        assert parallel.finish() == size
        optimizers[1].zero_grad()
        F.cross_entropy(plain(x), y).backward()
        for m in (module, plain):
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
    parallel.check_replicas()
    differences = [float((a - b).abs().max()) for a, b in zip(module.parameters(), plain.parameters())]
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()
    if world.size > 1:
        disagree(parallel, world)
    record([digest, max(differences)])


def disagree(parallel, world):
    last = world.size - 1
    with torch.no_grad():
        parallel.module[2].bias[0] += world.rank == last
    try:
        parallel.check_replicas()
    except DivergenceError as error:
        assert "parameter 2.bias" in str(error), error
    else:
        sys.exit("a replica that differs was not seen")
    try:
        DataParallel(build(0, width=17 if world.rank == last else 16), world)
    except DisagreementError as error:
        assert "module: expected the same 0.weight on all ranks" in str(error), error
    else:
        sys.exit("modules that differ were not seen")
    try:
        DataParallel(build(0).float() if world.rank == last else None, world)
    except TypeError as error:
        assert "module: expected a torch.nn.Module, got NoneType" in str(error), error
        assert error.agreed
    else:
        sys.exit("a module that is missing on some ranks was not seen")
    parallel.broadcast(root=last)
    parallel.check_replicas()


if __name__ == "__main__":
    main()
