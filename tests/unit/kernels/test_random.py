"""Philox4x32-10 against Random123's known answers, and masks that do not depend on who holds a sample."""

import itertools

import numpy as np
import pytest

from mpdp.kernels import random


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(counter, key, expected):
    found = random.philox4x32(np.array([counter], np.uint32), key)
    assert found.dtype == np.uint32
    assert tuple(int(word) for word in found[0]) == expected


def test_philox_works_through_many_counters_in_pieces():
    counter = np.zeros((10_000, 4), np.uint32)
    counter[:, 0] = np.arange(10_000)
    whole = random.philox4x32(counter, (1, 2))
    assert np.array_equal(whole[4095:4098], random.philox4x32(counter[4095:4098], (1, 2)))


def test_philox_refuses_another_shape():
    with pytest.raises(ValueError, match=r"counter: expected shape \(n, 4\), got \(4,\)"):
        random.philox4x32(np.zeros(4, np.uint32), (0, 0))


def test_bits_are_philox_of_block_position_and_step():
    words = random.bits((5, 6), step=9, start=2**33 + 1, count=2, elements=6)
    counter = np.array([[block, 1 + i, 2, 9] for i in range(2) for block in range(2)], np.uint32)
    assert np.array_equal(words, random.philox4x32(counter, (5, 6)).reshape(2, 8)[:, :6])


@pytest.mark.parametrize("elements", [0, 1, 3, 4, 257])
def test_masks_do_not_depend_on_how_samples_are_shared(elements):
    whole = random.dropout_mask(3, "layers.2", 7, 0, (11, elements), 0.3)
    cuts = [0, 4, 4, 5, 11]  # an empty share among them
    parts = [
        random.dropout_mask(3, "layers.2", 7, a, (b - a, elements), 0.3) for a, b in itertools.pairwise(cuts)
    ]
    assert np.array_equal(np.concatenate(parts), whole)


def test_masks_differ_by_seed_path_step_and_call():
    def mask(seed=0, path="a", step=0, call=0):
        return random.dropout_mask(seed, path, step, 0, (4, 100), 0.5, call)

    others = [mask(seed=1), mask(path="b"), mask(step=1), mask(call=1)]
    assert all((mask() != other).mean() > 0.3 for other in others)
    assert np.array_equal(mask(), mask())


def test_masks_keep_the_asked_share():
    kept = random.dropout_mask(0, "", 0, 0, (100, 1000), 0.2).mean()
    assert abs(kept - 0.8) < 0.006  # five standard deviations of 100000 draws


@pytest.mark.parametrize("p", [-0.1, 1.0, 2.0])
def test_a_probability_out_of_range_is_refused(p):
    with pytest.raises(ValueError, match=r"p: expected a probability in \[0, 1\), got"):
        random.keep_threshold(p)


def test_uniform_and_normal_have_the_moments_they_should():
    u, z = random.uniform((1, 2), 40_001), random.normal((1, 2), 40_001)
    assert u.shape == z.shape == (40_001,)
    assert u.min() >= 0.0 and u.max() < 1.0
    assert abs(u.mean() - 0.5) < 0.01 and abs(u.var() - 1 / 12) < 0.005
    assert abs(z.mean()) < 0.03 and abs(z.var() - 1.0) < 0.05


def test_keys_tell_types_of_words_apart():
    assert random.derive_key(0, 1) != random.derive_key(0, "1")
    assert random.derive_key(0, "a", "b") != random.derive_key(0, "a\x1fb")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 64, 65, 1001])
def test_numbers_do_not_depend_on_parts_and_threads(count, threads, monkeypatch):
    pairs = -(-count // 2)
    words = random.bits((8, 9), 0, 0, 1, 4 * pairs).reshape(-1, 2).astype(np.float64)
    expected = (words[:, 0] // 32 * 2.0**26 + words[:, 1] // 64) / 2.0**53
    radius, angle = np.sqrt(-2.0 * np.log1p(-expected[:pairs])), 2.0 * np.pi * expected[pairs:]
    waves = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    monkeypatch.setattr(random, "_cores", lambda: threads)
    for part in (1 << 15, 7, 2):
        monkeypatch.setattr(random, "_PART", part)
        assert random.uniform((8, 9), count).tobytes() == expected[:count].tobytes()
        assert random.normal((8, 9), count).tobytes() == waves.tobytes()
        rounded = (0.5 + 0.02 * waves).astype(np.float32)
        assert random.normal((8, 9), count, 0.5, 0.02, np.float32).tobytes() == rounded.tobytes()
