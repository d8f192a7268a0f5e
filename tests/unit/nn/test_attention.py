"""Attention and transformer blocks as layers: formula, padding, causality, dropout that follows the samples."""

import numpy as np
import pytest
from on_device import here, host, put, xp

from mpdp import nn
from mpdp.autodiff import SampleContext, ops, samples

pytestmark = pytest.mark.usefixtures("device")
random = np.random.default_rng(5)


def draw(*shape):
    return random.standard_normal(shape)


def test_multi_head_attention():
    layer = nn.MultiHeadAttention(6, 2, dtype="float64").to(here.device)
    assert {name: p.shape for name, p in layer.named_parameters()} == {
        "qkv.weight": (18, 6),
        "qkv.bias": (18,),
        "projection.weight": (6, 6),
        "projection.bias": (6,),
    }
    x = draw(3, 4, 6)
    qkv = x @ host(layer.qkv.weight).T + host(layer.qkv.bias)
    q, k, v = (qkv[..., 6 * i : 6 * i + 6].reshape(3, 4, 2, 3).transpose(0, 2, 1, 3) for i in range(3))
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(3)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    mixed = (weights @ v).transpose(0, 2, 1, 3).reshape(3, 4, 6)
    expected = mixed @ host(layer.projection.weight).T + host(layer.projection.bias)
    np.testing.assert_allclose(host(layer(put(x))), expected, rtol=0, atol=1e-12)
    assert layer(put(x[:0])).shape == (0, 4, 6)
    assert nn.MultiHeadAttention(6, 2, bias=False).qkv.bias is None


def test_padding_is_not_seen():
    layer = nn.MultiHeadAttention(6, 3, dtype="float64").to(here.device)
    x = draw(2, 5, 6)
    key_mask = np.array([[True] * 3 + [False] * 2, [True] * 5])
    found = host(layer(put(x), put(key_mask)))
    np.testing.assert_allclose(found[:1, :3], host(layer(put(x[:1, :3]))), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found[1:], host(layer(put(x[1:]))), rtol=0, atol=1e-12)


def test_causal():
    block = nn.TransformerBlock(6, 2, causal=True, dtype="float64").to(here.device)
    x = draw(2, 5, 6)
    changed = x.copy()
    changed[:, 3] += 1
    before, after = host(block(put(x))), host(block(put(changed)))
    assert np.array_equal(before[:, :3], after[:, :3]) and not np.allclose(before[:, 3:], after[:, 3:])


def test_transformer_block():
    block = nn.TransformerBlock(6, 2, hidden=10, dtype="float64").to(here.device)
    names = [name for name, _ in block.named_modules()]
    assert names == ["", "norm1", "attention", "attention.qkv", "attention.projection", "norm2", "up", "down"]
    assert block.up.weight.shape == (10, 6) and nn.TransformerBlock(6, 2).up.weight.shape == (24, 6)
    x = put(draw(2, 3, 6))
    key_mask = put(np.array([[True, False, True]] * 2))
    middle = x + block.attention(block.norm1(x), key_mask)
    up = ops.linear(block.norm2(middle), block.up.weight, block.up.bias)
    expected = middle + block.down(ops.gelu(up))
    np.testing.assert_allclose(
        host(block(x, key_mask)), host(expected), rtol=0, atol=1e-10
    )  # a GPU's own tanh


def test_dropout_follows_the_samples():
    block = nn.TransformerBlock(6, 2, dropout=0.4, dtype="float64").bind_names().to(here.device)
    assert any(module.draws_samples for _, module in block.named_modules())
    x = put(draw(5, 3, 6))

    def run(start, stop):
        with samples(SampleContext(seed=1, step=2, start=start, count=stop - start)):
            return host(block(x[start:stop]))

    whole = run(0, 5)
    np.testing.assert_allclose(np.concatenate([run(0, 2), run(2, 2), run(2, 5)]), whole, rtol=0, atol=1e-12)
    block.eval()
    assert not np.allclose(run(0, 5), whole)
    assert not any(m.draws_samples for _, m in nn.TransformerBlock(6, 2).named_modules())


def test_what_does_not_fit():
    with pytest.raises(ValueError, match=r"width: expected a multiple of heads=4, got 6"):
        nn.MultiHeadAttention(6, 4)
    with pytest.raises(ValueError, match=r"width: expected a multiple of heads=0, got 6"):
        nn.MultiHeadAttention(6, 0)
    with pytest.raises(ValueError, match=r"x: expected shape \(sequences, positions, width\), got \(3, 6\)"):
        nn.MultiHeadAttention(6, 2)(xp.zeros((3, 6), "f4"))
    with pytest.raises(ValueError, match=r"dropout|p: expected"):
        nn.TransformerBlock(6, 2, dropout=1.5)
