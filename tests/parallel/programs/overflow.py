"""float16 gradients that overflow on one rank alone: every rank skips the same update, and goes on with one scale.

In update 2 the last rank's loss is 1024 times as steep: its gradient, times the scale of 1024, leaves float16. The loss
sum is finite all the time. argv = device.
"""

import sys

import numpy as np
from launching import record

import mpdp
from mpdp import kernels, nn, optim
from mpdp.errors import DivergenceError

world = mpdp.init(device=sys.argv[1], timeout=30)
rank, size = world.rank, world.size
model = nn.Linear(4, 2, bias=False)
model.weight.data = np.zeros((2, 4), "float32")
optimizer = optim.Adam(lr=0.5)
parallel = mpdp.DataParallel(
    model, precision="float16", loss_scale=optim.LossScale(initial=2.0**10, interval=3)
)
x = kernels.move(np.full((2, 4), 0.25, "float32"), world.device)
seen = []
for step in range(7):
    before = model.weight.numpy().copy()
    steep = step == 2 and rank == size - 1
    loss = (parallel(x).astype("float32") * (1024.0 if steep else 1.0)).sum()
    parallel.backward((loss, 2.0))
    mine = bool(np.isfinite(kernels.of(x).to_numpy(parallel.arena.array)).all())
    parallel.step(optimizer)
    parallel.check_replicas()
    moved = not np.array_equal(before, model.weight.numpy())
    seen.append(
        [mine, moved, parallel.loss_scale.value, parallel.loss_scale.skipped, int(optimizer.updates[0])]
    )
assert parallel.step_count == 7
if size > 1:  # the check of replicas sees a scale or a working copy that differs, and names it
    copies = parallel._replica.copies
    scale = parallel.loss_scale
    for what in ("loss scale (value)", "working copy of weight"):
        kept = scale.value, copies[:1].copy()
        if rank == size - 1:
            if what.startswith("loss"):
                scale.value *= 2
            else:
                copies[:1] *= 2
        try:
            parallel.check_replicas()
        except DivergenceError as error:
            assert f"got a different {what} on rank" in str(error), error
        else:
            raise AssertionError(f"{what}: expected a DivergenceError")
        scale.value, copies[:1] = kept
record({"seen": seen, "weight": model.weight.numpy().tolist()})
