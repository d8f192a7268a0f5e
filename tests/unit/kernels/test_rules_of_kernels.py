"""Lion and LAMB as kernels: formulas, pieces, columns, what is cut and what is not applied."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from on_device import here, host, put, xp

from mpdp.kernels import updates

pytestmark = pytest.mark.usefixtures("device")
RNG = np.random.default_rng(3)
EDGES = 256 * np.array([0, 1, 3, 4, 5])  # of four pieces


def draw(size=1280, dtype=np.float64):
    return RNG.standard_normal(size).astype(dtype)


@pytest.mark.parametrize("size", [0, 1, 1280, updates.PIECE + 256])
@pytest.mark.parametrize("limit", [None, 0.1])
def test_lion_formula(size, limit):
    w, g, m = draw(size), draw(size), draw(size)
    d = 0.5 * g if limit is None else np.clip(0.5 * g, -limit, limit)
    expected = 0.9 * w - 0.01 * np.sign(0.8 * m + 0.2 * d), 0.95 * m + 0.05 * d
    there = [put(a.copy()) for a in (w, g, m)]
    here.kernels.lion(
        *there, scale=0.5, lr=0.01, betas=(0.8, 0.95), shrink=0.9,
        scratch=here.kernels.update_scratch(np.float64), limit=limit,
    )  # fmt: skip
    for found, value in zip((there[0], there[2]), expected):
        np.testing.assert_allclose(host(found), value, rtol=1e-13, atol=1e-15)


def test_the_sign_of_nothing_is_nothing():
    w, g, m = xp.ones(256), xp.zeros(256), xp.zeros(256)
    g[0], g[1] = -0.0, 1e-300
    here.kernels.lion(
        w, g, m, scale=1.0, lr=0.5, betas=(0.9, 0.99), shrink=1.0,
        scratch=here.kernels.update_scratch(np.float64),
    )  # fmt: skip
    assert host(w)[:3].tolist() == [1.0, 0.5, 1.0]


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("columns", [False, True])
def test_the_two_passes_of_lamb(columns, decay):
    w, g, m, v = draw(), draw(), draw(), np.abs(draw())
    d = 0.5 * g
    m2, v2 = 0.9 * m + 0.1 * d, 0.99 * v + 0.01 * d * d
    u = m2 / (np.sqrt(v2) + 1e-3) * 0.7 + decay * w
    spans = np.array([[0, 2], [2, 2], [2, 4]])
    owners = np.array([0, 0, 0, 2, 2], np.int32)
    ratios = [np.linalg.norm(w[part]) / np.linalg.norm(u[part]) for part in (slice(768), slice(768, None))]
    ratios = np.array([ratios[0], 1.0, ratios[1]])
    numbers = {"correction": 0.7, "eps": 1e-3, "weight_decay": decay}
    if columns:
        numbers = {name: np.full(5, value) for name, value in numbers.items()}
    k, there = here.kernels, [put(a.copy()) for a in (w, g, m, v)]
    common = {"scratch": k.update_scratch(np.float64), **numbers}
    out = xp.full((4, 2), np.nan)
    k.lamb_moments(
        *there, edges=put(EDGES + 512), offset=512, out=out, scale=0.5, betas=(0.9, 0.99), **common
    )
    sums = [[(a[x:y] ** 2).sum() for a in (w, u)] for x, y in pairwise(EDGES)]
    np.testing.assert_allclose(host(out), sums, rtol=1e-12)
    found = k.trust_ratios(out, put(spans))
    np.testing.assert_allclose(host(found), ratios, rtol=1e-12)
    weights, _, mean, variance = there
    k.lamb(weights, mean, variance, lr=0.1, ratios=found, owners=put(owners), **common)
    np.testing.assert_allclose(host(mean), m2, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(host(variance), v2, rtol=1e-13)
    np.testing.assert_allclose(
        host(weights), w - 0.1 * np.repeat(ratios[owners], 256) * u, rtol=1e-11, atol=1e-13
    )


def test_a_pass_that_is_not_applied_changes_nothing():
    k, never = here.kernels, put(np.int64(0)).reshape(())
    arrays = [put(draw(512, np.float32)) for _ in range(3)]
    arrays.append(put(np.abs(draw(512, np.float32))))
    before = [host(a).tobytes() for a in arrays]
    w, g, m, v = arrays
    common = {"scratch": k.update_scratch(np.float32), "when": never}
    k.lion(w, g, m, scale=1.0, lr=0.1, betas=(0.9, 0.99), shrink=0.9, **common)
    numbers = {"correction": 1.0, "eps": 1e-6, "weight_decay": 0.1}
    k.lamb_moments(
        w, g, m, v, edges=put(EDGES[:2] * 2), offset=0, out=xp.zeros((1, 2)), scale=1.0, betas=(0.9, 0.99),
        **numbers, **common,
    )  # fmt: skip
    owners, ratios = put(np.zeros(2, np.int32)), put(np.ones(1))
    k.lamb(w, m, v, lr=0.1, ratios=ratios, owners=owners, **numbers, **common)
    assert [host(a).tobytes() for a in arrays] == before
