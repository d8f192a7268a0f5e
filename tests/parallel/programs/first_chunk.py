"""Ranks that come to a Reducer in every way, right and wrong, in turn; argv[1] is how many turns, argv[2] a seed.

All ranks draw the same turns, and each its own pauses in them. After a wrong turn all have the error, the gradients
are as they were, and the next turn is as good as any.
"""

import random
import sys
import time

import numpy as np

import mpdp
from mpdp.errors import DisagreementError
from mpdp.parallel.record import Kind, exchange

turns, seed = int(sys.argv[1]), int(sys.argv[2])
world = mpdp.init(timeout=60)
rank, size = world.rank, world.size
shared, own = random.Random(seed), random.Random(seed + 1 + rank)

SHAPES = {"first": (40_000,), "second": (150, 600), "last": (60_000,)}
# The first chunk of the second is too small to carry a record.
reducers = [
    mpdp.Reducer(mpdp.GradientArena(SHAPES), chunk_bytes=chunk) for chunk in (256 << 10, 64 << 10, 1 << 20)
]
pattern = np.arange(reducers[0].arena.array.size, dtype="float32") % 11
met = dict.fromkeys(("right", "step", "elsewhere", "reducer"), 0)


def pause():
    draw = own.random()
    if draw < 0.1:
        time.sleep(own.choice((0.0001, 0.001, 0.004)))
    elif draw < 0.3:
        stop = time.perf_counter() + own.random() * 2e-4
        while time.perf_counter() < stop:
            pass


for turn in range(turns):
    number = shared.randrange(len(reducers))
    early = [shared.random() < 0.3 for _ in range(size)]
    if shared.random() < 0.5:
        early = early[:1] * size
    counted = shared.random() < 0.5
    way = shared.choice(("right", "right", "right", "step", "elsewhere", "reducer"))
    odd = shared.randrange(size)
    other = (number + 1 + shared.randrange(len(reducers) - 1)) % len(reducers)
    met[way] += 1

    reducer = reducers[other if way == "reducer" and rank == odd else number]
    arena, step = reducer.arena, reducer.step
    if way == "step" and rank == odd:
        reducer.step += 1
    given = pattern * (rank + 1) + turn % 5
    arena.array[...] = given
    pause()
    try:
        if way == "elsewhere" and rank == odd:
            exchange(arena.comm, Kind.SAVE, turn)
        if early[rank]:
            names = list(SHAPES)
            own.shuffle(names)
            for name in names:
                reducer.ready(name)
                pause()
        total = reducer.finish(rank + 0.5) if counted else reducer.finish()
    except DisagreementError as error:
        assert way != "right", (turn, error)
        assert error.agreed
        assert np.array_equal(arena.array, given), (turn, way)
        reducer.step = step
    else:
        assert way == "right", (turn, way)
        expected = pattern * (size * (size + 1) / 2) + size * (turn % 5)
        assert total == (size * size / 2 if counted else None), (turn, total)
        assert np.allclose(arena.array, expected / (total or 1)), (turn, way, early)
    pause()

if rank == 0:
    print("passed", " ".join(f"{way} {count}" for way, count in met.items()), flush=True)
