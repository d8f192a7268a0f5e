"""Steps leave nothing behind, also without the garbage collector."""

import gc
import tracemalloc
from itertools import chain

import numpy as np

import mpdp
from mpdp import autodiff, data, nn, optim

UPDATES = 400


class Look(mpdp.Callback):
    def __init__(self):
        self.objects, self.bytes = {}, {}

    def on_step(self, trainer):
        if trainer.step_count in (50, UPDATES):
            trainer.folder.flush()  # rows wait for about a second
            # In one call, so that no other thread gets on: one that builds a tuple must be the only one to hold it.
            kinds = list(map(type, chain.from_iterable(map(gc.get_objects, (None,)))))
            self.objects[trainer.step_count] = {
                kind.__name__: kinds.count(kind)
                for kind in (autodiff.Tensor, autodiff.Tape, nn.Loss, data.MicroBatch)
            }
            del kinds
            self.bytes[trainer.step_count] = tracemalloc.get_traced_memory()[0]


def test_400_updates_with_a_log_and_without_the_collector(tmp_path):
    random = np.random.default_rng(0)
    x, y = random.standard_normal((64, 16)).astype("float32"), random.integers(0, 4, 64)
    train = data.Transform(
        data.ArrayDataset(x, y), lambda s, r: (s[0] + r.normal(size=16).astype("float32"), s[1]), random=True
    )
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
    look = Look()
    trainer = mpdp.Trainer(
        model,
        nn.cross_entropy,
        optim.AdamW(lr=1e-3),
        accumulate=2,
        clip_norm=1.0,
        run_dir=tmp_path / "run",
        save_every=90,
        async_save=True,
        callbacks=[look, mpdp.CsvWriter()],
    )
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    tracemalloc.start()
    try:
        trainer.fit(train, updates=UPDATES, global_batch_size=16, metrics=[nn.accuracy], progress=False)
    finally:
        tracemalloc.stop()
        if enabled:
            gc.enable()
    first, last = look.objects[50], look.objects[UPDATES]
    assert first["Tape"] <= 1 and last["Tape"] <= 1
    for kind, count in last.items():
        assert count <= first[kind] + 12, f"{kind}: {first[kind]} after 50 updates, {count} after {UPDATES}"
    grown = look.bytes[UPDATES] - look.bytes[50]
    rows = 350 // 4 * 1200  # an epoch's row of the history, and what waits for the CSV file
    assert grown < rows + 100_000, f"{grown} bytes more over {UPDATES - 50} updates"
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == UPDATES + UPDATES // 4 + 2
