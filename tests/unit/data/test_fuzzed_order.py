"""The global order, drawn at random: every sample once an epoch, for all lengths, batches, ranks and accumulations.

Also where a run is stopped after any update and goes on with other ranks. `pytest --hypothesis-profile=long` draws
20,000 of them.
"""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mpdp.data import ArrayDataset, Loader


def samples_of(update):
    """Return the samples of one update over all ranks, each rank's parts in order."""
    return [
        index
        for rank in update
        for part in rank
        for index in ([] if part.indices is None else part.indices.tolist())
    ]


@settings(deadline=None)
@given(
    length=st.integers(1, 70),
    batch=st.integers(1, 25),
    accumulate=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    seed=st.integers(-3, 2**40),
    data=st.data(),
)
def test_every_sample_once_an_epoch_on_whatever_ranks(
    length, batch, accumulate, sizes, drop_last, shuffle, seed, data
):
    """Each part of the run has another number of ranks; micro-batches are the same sets of samples on all of them."""
    batch = min(batch, length) if drop_last else batch
    dataset = ArrayDataset(np.arange(length), np.arange(length))
    options = {"seed": seed, "shuffle": shuffle, "drop_last": drop_last, "prefetch": 0}
    alone = Loader(dataset, batch, accumulate=accumulate, **options)
    per_epoch = alone.updates_per_epoch
    total = 2 * per_epoch
    stops = sorted(
        data.draw(st.lists(st.integers(0, total), min_size=len(sizes) - 1, max_size=len(sizes) - 1))
    )
    whole = list(alone.updates(0, total))
    seen, first = [], 0
    for size, stop in zip(sizes, [*stops, total]):
        ranks = [
            list(
                Loader(dataset, batch, accumulate=accumulate, rank=rank, size=size, **options).updates(
                    first, stop
                )
            )
            for rank in range(size)
        ]
        for offset, update in enumerate(zip(*ranks, strict=True)):
            for i, part in enumerate(whole[first + offset]):
                shares = [parts[i] for parts in update]
                together = [index for share in shares for index in share.indices.tolist()]
                assert together == part.indices.tolist()
                assert max(s.count for s in shares) - min(s.count for s in shares) <= 1
                assert all(share.total == part.count for share in shares)
            seen.append(samples_of(update))
        first = stop
    assert len(seen) == total
    for epoch in range(2):
        counted = Counter(
            index for update in seen[epoch * per_epoch : (epoch + 1) * per_epoch] for index in update
        )
        assert set(counted.values()) <= {1} and set(counted) <= set(range(length))
        assert sum(counted.values()) == (length - length % batch if drop_last else length)
