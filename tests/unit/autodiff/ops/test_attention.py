"""Attention against a plain formula and central differences: causal, padded, dropped, empty."""

import numpy as np
import pytest
from on_device import host, put, xp

from mpdp.autodiff import Tensor, check, ops

pytestmark = pytest.mark.usefixtures("device")
random = np.random.default_rng(14)


def draw(*shape):
    return random.standard_normal(shape)


def plain(q, k, v, allowed, keep):
    """Row by row, in float64."""
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for at in np.ndindex(q.shape[:3]):
        n, h, _ = at
        scores = k[n, h] @ q[at] / np.sqrt(q.shape[3])
        seen = allowed[at]
        if seen.any():
            weights = np.where(seen, np.exp(scores - scores[seen].max()), 0)
            out[at] = (weights / weights.sum() * keep[at]) @ v[n, h]
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize(
    ("n", "h", "t", "s", "d"), [(2, 3, 4, 4, 5), (1, 1, 1, 1, 1), (2, 1, 3, 6, 2), (0, 2, 3, 3, 4)]
)
def test_attention(n, h, t, s, d, p, padded, causal):
    q, k, v = draw(n, h, t, d), draw(n, h, s, d), draw(n, h, s, d)
    key_mask = random.random((n, s)) < 0.6
    key_mask[:1] = False  # a sequence of padding only
    keep = random.random((n, h, t, s)) >= p
    allowed = np.ones((n, h, t, s), bool)
    options = {"causal": causal, "p": p}
    if causal:
        allowed &= np.arange(s) <= np.arange(t)[:, None] + s - t
    if padded:
        allowed &= key_mask[:, None, None]
        options["key_mask"] = put(key_mask)
    if p:
        options["keep"] = put(keep)
    expected = plain(q, k, v, allowed, keep / (1 - p))
    found = host(ops.attention(put(q), put(k), put(v), **options))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)
    check(lambda *a: ops.attention(*a, **options), put(q), put(k), put(v))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "t", "h", "d"), [(2, 4, 3, 2), (1, 1, 1, 1), (0, 3, 2, 2), (2, 0, 2, 2)])
def test_self_attention(n, t, h, d, causal):
    qkv = put(draw(n, t, 3 * h * d))
    mask, keep = put(random.random((n, t)) < 0.7), put(random.random((n, h, t, t)) >= 0.25)
    for options in ({}, {"key_mask": mask}, {"keep": keep, "p": 0.25}, {"engine": "plain"}):
        q, k, v = (qkv.reshape(n, t, 3, h, d)[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
        expected = host(ops.attention(q, k, v, causal=causal, **options))
        found = host(ops.self_attention(qkv, h, causal=causal, **options))
        assert np.array_equal(found, expected.transpose(0, 2, 1, 3).reshape(n, t, h * d))
        check(lambda x, o=options: ops.self_attention(x, h, causal=causal, **o), qkv)


def test_large_scores_and_float16():
    q = put((draw(2, 2, 5, 4) * 20).astype("float16"))
    x = Tensor(q, requires_grad=True)
    out = ops.attention(x, x, x, causal=True)
    out.backward(np.ones(out.shape))
    assert out.dtype == x.grad.dtype == "float16"
    assert np.isfinite(host(out)).all() and np.isfinite(host(x.grad)).all()


def test_what_does_not_fit():
    q = xp.zeros((2, 3, 4, 5))
    with pytest.raises(
        ValueError, match=r"attention: expected a query \(N, H, T, D\), .*got \(2, 3, 4, 5\), \(3, 4, 5\)"
    ):
        ops.attention(q, q[0], q)
    with pytest.raises(ValueError, match=r"key_mask: expected shape \(2, 4\), got \(4,\)"):
        ops.attention(q, q, q, key_mask=xp.ones(4, bool))
    with pytest.raises(TypeError, match=r"key_mask: expected a boolean array, got float64"):
        ops.attention(q, q, q, key_mask=xp.ones((2, 4)))
    with pytest.raises(ValueError, match=r"p: expected a probability in \[0, 1\), got 1"):
        ops.attention(q, q, q, p=1.0)
    with pytest.raises(ValueError, match=r"engine: expected one of auto, cudnn, plain, got 'flash'"):
        ops.attention(q, q, q, engine="flash")
    with pytest.raises(
        ValueError, match=r"self_attention: expected qkv of shape \(N, T, 3 \* 2 \* D\), got \(2, 3, 4\)"
    ):
        ops.self_attention(q[..., 0], 2)
