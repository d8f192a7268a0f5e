"""SGD, Adam and AdamW against formulas that are written out here, one parameter at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from filled_layout import Layout
from on_device import here, host, put, xp

from mpdp import optim

pytestmark = pytest.mark.usefixtures("device")
SHAPES = {
    "a.weight": (20, 30),
    "a.bias": (30,),
    "empty": (0, 3),
    "scalar": (),
    "b.weight": (90, 100),
    "b.bias": (5,),
}


class Reference:
    """PyTorch's rules in float64, parameter by parameter, as its documentation states them."""

    def __init__(self, optimizer, layout, weights):
        self.optimizer, self.layout = optimizer, layout
        self.weights = {e.name: layout.view(host(weights), e.name).astype(float) for e in layout.trainable}
        self.buffers, self.moments, self.steps = {}, {}, {}

    def update(self, gradients, scale, lr, used=None):
        for i, entry in enumerate(self.layout.trainable):
            if used is None or used[i]:
                name = entry.name
                factor, decay = 1.0, self.optimizer.weight_decay
                for group in self.optimizer.groups:
                    if (group.pattern == "*.bias" and name.endswith(".bias")) or group.pattern == name:
                        factor = group.lr_factor
                        decay = decay if group.weight_decay is None else group.weight_decay
                        break
                g = self.layout.view(host(gradients), name).astype(float) * scale
                getattr(self, type(self.optimizer).__name__.lower())(name, g, lr * factor, decay)

    def sgd(self, name, g, lr, decay):
        mu = self.optimizer.momentum
        g = g + decay * self.weights[name]
        if mu:
            self.buffers[name] = mu * self.buffers[name] + g if name in self.buffers else g
            g = g + mu * self.buffers[name] if self.optimizer.nesterov else self.buffers[name]
        self.weights[name] = self.weights[name] - lr * g

    def adam(self, name, g, lr, decay):
        self._adam(name, g + decay * self.weights[name], lr)

    def adamw(self, name, g, lr, decay):
        self.weights[name] = self.weights[name] * (1 - lr * decay)
        self._adam(name, g, lr)

    def _adam(self, name, g, lr):
        b1, b2 = self.optimizer.betas
        m, v = self.moments.get(name, (np.zeros_like(g), np.zeros_like(g)))
        t = self.steps[name] = self.steps.get(name, 0) + 1
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        self.moments[name] = m, v
        self.weights[name] = self.weights[name] - lr * (m / (1 - b1**t)) / (
            np.sqrt(v / (1 - b2**t)) + self.optimizer.eps
        )


GROUPS = (optim.Group("*.bias", lr_factor=2.0, weight_decay=0.0), optim.Group("scalar", weight_decay=0.5))
RULES = {
    "sgd": lambda **k: optim.SGD(0.1, **k),
    "momentum": lambda **k: optim.SGD(0.1, momentum=0.9, **k),
    "nesterov": lambda **k: optim.SGD(0.1, momentum=0.8, nesterov=True, **k),
    "adam": lambda **k: optim.Adam(0.01, **k),
    "adam betas": lambda **k: optim.Adam(0.01, betas=(0.5, 0.9), eps=1e-3, **k),
    "adamw": lambda **k: optim.AdamW(0.01, **k),
}


def bound(optimizer, dtype, shapes=SHAPES, frozen=(), seed=0):
    layout = Layout(shapes, frozen)
    weights = put(layout.filled(np.random.default_rng(seed), dtype))
    optimizer.bind(layout, weights, here.kernels)
    return layout, weights


@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-12), (np.float32, 2e-5)])
@pytest.mark.parametrize("groups", [(), GROUPS], ids=["one group", "groups"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("rule", RULES)
def test_rule(rule, decay, groups, dtype, tolerance):
    optimizer = RULES[rule](weight_decay=decay, groups=groups)
    layout, weights = bound(optimizer, dtype)
    reference, rng = Reference(optimizer, layout, weights), np.random.default_rng(1)
    for t in range(12):
        gradient = put(layout.filled(rng, dtype, trainable_only=True))
        lr = optimizer.lr * 0.9**t
        optimizer.apply(gradient, 0, layout.trainable_size, scale=1 / 8, lr=lr)
        optimizer.finish_update()
        reference.update(gradient, 1 / 8, lr)
    for entry in layout.trainable:
        new, expected = layout.view(host(weights), entry.name), reference.weights[entry.name]
        assert new.size == 0 or np.abs(new - expected).max() <= tolerance * np.abs(expected).max()
    assert not host(weights)[layout.padding(layout.size)].any()
    for array in optimizer.state.values():
        assert not host(array)[layout.padding(layout.trainable_size)].any()
    assert (optimizer.updates == 12).all()


@pytest.mark.parametrize("groups", [(), GROUPS], ids=["one group", "groups"])
@pytest.mark.parametrize("rule", RULES)
def test_unused_parameters_are_untouched(rule, groups):
    optimizer = RULES[rule](weight_decay=0.1, groups=groups)
    layout, weights = bound(optimizer, np.float64)
    reference, rng = Reference(optimizer, layout, weights), np.random.default_rng(1)
    for t in range(12):
        used = np.ones(len(layout.trainable), bool)
        used[0] = False  # never used
        used[4] = t % 2 == 0  # alternates
        used[3] = t < 5
        before = weights.copy()
        gradient = put(layout.filled(rng, np.float64, trainable_only=True))
        optimizer.apply(gradient, 0, layout.trainable_size, scale=0.5, lr=0.1, used=used)
        optimizer.finish_update(used)
        reference.update(gradient, 0.5, 0.1, used)
        for entry, flag in zip(layout.trainable, used):
            if not flag:
                same = layout.view(weights, entry.name).tobytes() == layout.view(before, entry.name).tobytes()
                assert same
    for entry in layout.trainable:
        np.testing.assert_allclose(
            layout.view(host(weights), entry.name), reference.weights[entry.name], rtol=1e-12, atol=1e-13
        )
    assert optimizer.updates.tolist() == [0, 12, 12, 5, 6, 12]
    for array in optimizer.state.values():
        assert not array[layout.trainable[0].start : layout.trainable[0].stop].any()


@pytest.mark.parametrize("pattern", ["all", "used", "counts"])
@pytest.mark.parametrize("groups", [(), GROUPS], ids=["one group", "groups"])
@pytest.mark.parametrize("rule", RULES)
def test_any_partition_gives_equal_bits(rule, groups, pattern):
    results = []
    for cut in range(4):
        optimizer = RULES[rule](weight_decay=0.1, groups=groups)
        layout, weights = bound(optimizer, np.float32)
        rng, cuts = np.random.default_rng(1), np.random.default_rng(cut)
        blocks = layout.trainable_size // layout.BLOCK
        for t in range(4):
            used = None
            if pattern == "used" or (pattern == "counts" and t == 1):
                used = np.array([True, t % 2 == 0, True, True, False, True])
            inner = np.sort(cuts.choice(np.arange(1, blocks), size=(0, 1, 5, blocks - 1)[cut], replace=False))
            edges = [0, *(inner * layout.BLOCK).tolist(), layout.trainable_size]
            gradient = put(layout.filled(rng, np.float32, trainable_only=True))
            parts = list(pairwise(edges))
            cuts.shuffle(parts)
            for start, stop in parts:
                optimizer.apply(gradient, start, stop, scale=0.3, lr=0.01, used=used)
            optimizer.finish_update(used)
        results.append([weights.tobytes(), *(a.tobytes() for a in optimizer.state_arrays().values())])
    assert results[0] == results[1] == results[2] == results[3]


@pytest.mark.parametrize("rule", RULES)
def test_frozen_zone_is_untouched(rule):
    optimizer = RULES[rule](weight_decay=0.1)
    layout, weights = bound(optimizer, np.float32, frozen=("a.bias", "b.weight"))
    before = weights.copy()
    gradient = xp.ones(layout.trainable_size, np.float32)
    optimizer.apply(gradient, 0, layout.trainable_size, scale=1.0, lr=0.1)
    assert weights[layout.trainable_size :].tobytes() == before[layout.trainable_size :].tobytes()
    assert (layout.view(weights, "a.weight") != layout.view(before, "a.weight")).all()
    assert all(array.shape == (layout.trainable_size,) for array in optimizer.state.values())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shapes", [{"p": (0,)}, {"p": ()}, {}], ids=["only empty", "0-d", "nothing"])
def test_odd_sizes(rule, shapes):
    optimizer = RULES[rule](weight_decay=0.1)
    layout, weights = bound(optimizer, np.float64, shapes)
    gradient = put(layout.filled(np.random.default_rng(1), np.float64, trainable_only=True))
    for _ in range(2):
        optimizer.apply(gradient, 0, layout.trainable_size, scale=1.0, lr=0.1)
        optimizer.finish_update()
    assert optimizer.updates.tolist() == [2] * len(shapes) and np.isfinite(host(weights)).all()


@pytest.mark.parametrize("rule", ["momentum", "adam"])
def test_half_weights_keep_their_state_in_float32(rule):
    optimizer = RULES[rule]()
    layout, weights = bound(optimizer, np.float16)
    before = weights.copy()
    gradient = xp.full(layout.trainable_size, 1e-4, np.float16)
    optimizer.apply(gradient, 0, layout.trainable_size, scale=1.0, lr=0.01)
    assert {array.dtype for array in optimizer.state.values()} == {np.dtype(np.float32)}
    assert np.isfinite(host(weights)).all()
    assert np.abs(host(weights) - host(before)).max() <= 0.012  # 0.01 and the rounding of float16


@pytest.mark.parametrize("rule", RULES)
def test_state_goes_through_a_checkpoint_to_the_bit(rule):
    """Stop after update 7 of 10 with counts that differ, and go on in another optimizer."""

    def train(optimizer, weights, layout, updates):
        for t in updates:
            gradient = put(layout.filled(np.random.default_rng(t), np.float32, trainable_only=True))
            used = np.array([t % 2 == 0, True, True, True, True, True])
            lr = optimizer.lr * optim.WarmupCosine(3, 10)(t)
            optimizer.apply(gradient, 0, layout.trainable_size, scale=0.5, lr=lr, used=used)
            optimizer.finish_update(used)

    whole = RULES[rule](weight_decay=0.1, groups=GROUPS)
    layout, expected = bound(whole, np.float32)
    train(whole, expected, layout, range(10))
    first = RULES[rule](weight_decay=0.1, groups=GROUPS)
    layout, weights = bound(first, np.float32)
    train(first, weights, layout, range(7))
    saved = {name: array.copy() for name, array in first.state_arrays().items()}
    second = RULES[rule](weight_decay=0.1, groups=GROUPS)
    second.bind(layout, weights, here.kernels)
    second.load_state_arrays(saved)
    train(second, weights, layout, range(7, 10))
    assert weights.tobytes() == expected.tobytes()
    for name, array in whole.state_arrays().items():
        assert array.tobytes() == second.state_arrays()[name].tobytes()


# Eight updates of three weights from p = (1, -2, 0.5) along gradients g_t = (t + 1, 1 / (t + 1), (-1)^t),
# decay 0.1, from torch 2.13.0 in float64: torch.optim.NAME(**arguments, foreach=False).
TORCH = {
    "sgd": ("SGD", {"lr": 0.1}, [-2.5945027892129793, -2.1038683368394464, 0.46525452337336093]),
    "momentum": (
        "SGD",
        {"lr": 0.1, "momentum": 0.9},
        [-9.031033781918262, -2.6022503424326127, 0.12969709955195446],
    ),
    "nesterov": (
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        [-11.324047156021452, -2.6089632314366837, 0.1554918964364097],
    ),
    "adam": ("Adam", {"lr": 0.1}, [0.21595176066359723, -2.468682681175951, 0.32493988305247806]),
    "adamw": (
        "AdamW",
        {"lr": 0.1, "betas": (0.8, 0.99), "eps": 1e-06},
        [0.1257631146012814, -2.4267397297570117, 0.34043392175826304],
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_constants_from_pytorch(name):
    kind, arguments, expected = TORCH[name]
    optimizer = getattr(optim, kind)(weight_decay=0.1, **arguments)
    layout, weights = bound(optimizer, np.float64, {"p": (3,)})
    weights[:3] = put([1, -2, 0.5])
    for t in range(8):
        gradient = xp.zeros(layout.trainable_size)
        gradient[:3] = put([t + 1, 1 / (t + 1), (-1) ** t])
        optimizer.apply(gradient, 0, layout.trainable_size, scale=1.0, lr=optimizer.lr)
        optimizer.finish_update()
    np.testing.assert_allclose(host(weights[:3]), expected, rtol=1e-13)
