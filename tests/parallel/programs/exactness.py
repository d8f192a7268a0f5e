"""Train the reference's network with mpdp and write what came out: argv = dtype, optimizer, folder, device."""

import json
import sys
from pathlib import Path

import numpy as np
import reference

import mpdp
from mpdp import data, kernels, nn, optim

dtype, kind, folder, device = sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4]
world = mpdp.init(device=device, timeout=60)
x, y = reference.digits(dtype)
x, y = x[:301], y[:301]
optimizer = {
    "sgd": optim.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "adamw": optim.AdamW(lr=3e-3, weight_decay=0.05),
}[kind]
seen = []


class Watch(mpdp.Callback):
    def on_step(self, trainer):
        seen.append(trainer.loss)
        trainer.check_replicas()


trainer = mpdp.Trainer(
    reference.build_model(dtype),
    nn.cross_entropy,
    optimizer,
    schedule=optim.WarmupLinear(5, 40),
    precision=dtype,
    accumulate=3,
    clip_norm=0.5,
    seed=3,
    chunk_bytes=1 << 14,
    callbacks=[Watch()],
)
trainer.fit(data.ArrayDataset(x, y), updates=20, global_batch_size=53)
test = trainer.evaluate(data.ArrayDataset(x[:101], y[:101]), metrics=[nn.accuracy], global_batch_size=13)
correct = nn.accuracy(
    trainer.model.eval()(kernels.move(x[:101], world.device)), kernels.move(y[:101], world.device)
)
if world.rank == 0:
    np.savez(folder / f"n{world.size}.npz", *[p.numpy() for p in trainer.model.parameters()])
    (folder / f"n{world.size}.json").write_text(
        json.dumps(
            {
                "losses": seen,
                "history": trainer.history,
                "accuracy": test["accuracy"],
                "loss": test["loss"],
                "correct": [float(v) for v in correct],
                "size": world.size,
            }
        )
    )
