"""Train the reference's network in one precision: argv = precision, folder, device, and what to do with it.

``train``: to the end. ``stop``: half of it, and a checkpoint. ``resume``: the other half.
"""

import json
import sys
from pathlib import Path

import numpy as np
import reference

import mpdp
from mpdp import data, nn, optim

precision, folder, device, what = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4]
world = mpdp.init(device=device, timeout=60)
x, y = reference.digits("float32")
x, y = x[:300], y[:300]
rows, losses = [], []


class Watch(mpdp.Callback):
    def on_step(self, trainer):
        trainer.check_replicas()
        losses.append(trainer.loss)
        scale = trainer.parallel.loss_scale
        rows.append(None if scale is None else [scale.value, scale.skipped])


trainer = mpdp.Trainer(
    reference.build_model("float32"),
    nn.cross_entropy,
    optim.AdamW(lr=3e-3, weight_decay=0.05),
    precision=precision,
    loss_scale=optim.LossScale(initial=2.0**24, interval=3) if precision == "float16" else None,
    accumulate=2,
    clip_norm=0.5,
    seed=3,
    chunk_bytes=1 << 14,
    callbacks=[Watch()],
    run_dir=None if what == "train" else folder / "run",
)
if what == "resume":
    assert trainer.resume() and trainer.step_count == 10
trainer.fit(data.ArrayDataset(x, y), updates=10 if what == "stop" else 20, global_batch_size=50)
if what == "stop":
    trainer.save()
result = trainer.evaluate(data.ArrayDataset(x[:101], y[:101]), global_batch_size=13)
if world.rank == 0:
    name = "resumed" if what == "resume" else f"n{world.size}"
    np.savez(folder / f"{name}.npz", *[p.numpy() for p in trainer.model.parameters()])
    (folder / f"{name}.json").write_text(
        json.dumps({"losses": losses, "scales": rows, "loss": result["loss"]})
    )
