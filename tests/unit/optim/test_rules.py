"""SGD, Adam, AdamW, Lion and LAMB against formulas that are written out here, one parameter at a time."""

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
    """The rules in float64, parameter by parameter: SGD and Adam as PyTorch's documentation states them, Lion and LAMB
    as their papers do."""

    def __init__(self, optimizer, layout, weights, clip=np.inf):
        self.optimizer, self.layout, self.clip = optimizer, layout, clip
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
                g = np.clip(
                    self.layout.view(host(gradients), name).astype(float) * scale, -self.clip, self.clip
                )
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

    def lion(self, name, g, lr, decay):
        b1, b2 = self.optimizer.betas
        m = self.buffers.get(name, np.zeros_like(g))
        direction = np.sign(b1 * m + (1 - b1) * g)
        self.weights[name] = self.weights[name] - lr * (direction + decay * self.weights[name])
        self.buffers[name] = b2 * m + (1 - b2) * g

    def lamb(self, name, g, lr, decay):
        b1, b2 = self.optimizer.betas
        m, v = self.moments.get(name, (np.zeros_like(g), np.zeros_like(g)))
        t = self.steps[name] = self.steps.get(name, 0) + 1
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        self.moments[name] = m, v
        p = self.weights[name]
        u = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + self.optimizer.eps) + decay * p
        own, step = np.linalg.norm(p.ravel()), np.linalg.norm(u.ravel())
        plain = name in self.optimizer.unscaled or own == 0 or step == 0
        self.weights[name] = p - lr * (1 if plain else own / step) * u

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
    "lion": lambda **k: optim.Lion(0.01, **k),
    "lamb": lambda **k: optim.LAMB(0.01, **k),
    "lamb unscaled": lambda **k: optim.LAMB(
        0.01, betas=(0.5, 0.9), eps=1e-3, unscaled=["a.bias", "b.weight"], **k
    ),
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


@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-12), (np.float32, 2e-5)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("rule", RULES)
def test_elements_of_the_gradient_are_cut(rule, decay, dtype, tolerance):
    """Averaged first, then cut, then decayed: also for SGD without momentum, which folds its factors."""
    optimizer = RULES[rule](weight_decay=decay)
    layout, weights = bound(optimizer, dtype)
    reference, rng = Reference(optimizer, layout, weights, clip=0.05), np.random.default_rng(1)
    for _ in range(5):
        gradient = put(layout.filled(rng, dtype, trainable_only=True))
        optimizer.apply(gradient, 0, layout.trainable_size, scale=1 / 8, lr=0.1, clip_value=0.05)
        optimizer.finish_update()
        reference.update(gradient, 1 / 8, 0.1)
    for entry in layout.trainable:
        new, expected = layout.view(host(weights), entry.name), reference.weights[entry.name]
        assert new.size == 0 or np.abs(new - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("groups", [(), GROUPS], ids=["one group", "groups"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_in_memory_give_the_bits_of_apply(rule, groups, dtype):
    """What a captured graph calls, by ranges too; and nothing at all where the update is not to be applied."""
    results = []
    for captured in (False, True):
        optimizer = RULES[rule](weight_decay=0.1, groups=groups)
        layout, weights = bound(optimizer, dtype)
        size, rng = layout.trainable_size, np.random.default_rng(1)
        optimizer.prepare_captured()
        for t in range(4):
            gradient = put(layout.filled(rng, dtype, trainable_only=True))
            if not captured:
                optimizer.apply(gradient, 0, size, scale=0.3, lr=0.01, clip_value=0.2)
            else:
                before = [host(a).copy() for a in (weights, *optimizer.state.values())]
                for when in (0, 1):
                    numbers = put(optimizer.numbers(0.01))
                    options = {"scale": put(np.float64(0.3)), "numbers": numbers, "when": put(np.int64(when))}
                    options["clip_value"] = 0.2
                    if t % 2 and optimizer.needs_sums:
                        ranges = [(4096, size), (0, 4096)]
                        table = xp.zeros((optimizer.rows(0, size).stop, 2))
                        for start, stop in ranges:
                            part = optimizer.prepare_range_captured(gradient, start, stop, **options)
                            table[optimizer.rows(start, stop)] = part
                        for start, stop in ranges:
                            optimizer.apply_captured(gradient, start, stop, sums=table, **options)
                    else:
                        optimizer.apply_captured(gradient, 0, size, **options)
                    if not when:
                        after = [host(a) for a in (weights, *optimizer.state.values())]
                        assert all(a.tobytes() == b.tobytes() for a, b in zip(before, after))
            optimizer.finish_update()
        results.append([weights.tobytes(), *(a.tobytes() for a in optimizer.state_arrays().values())])
    assert results[0] == results[1]


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
            sums = prepared(optimizer, layout, gradient, cuts, (0, 1, 2, 2)[cut], scale=0.3, used=used)
            for start, stop in parts:
                optimizer.apply(gradient, start, stop, scale=0.3, lr=0.01, used=used, sums=sums)
            optimizer.finish_update(used)
        results.append([weights.tobytes(), *(a.tobytes() for a in optimizer.state_arrays().values())])
    assert results[0] == results[1] == results[2] == results[3]


def prepared(optimizer, layout, gradient, random, cuts, **options):
    """Return the sums of ranges that owners of whole spans bring, as a placement puts them together."""
    if not optimizer.needs_sums:
        assert optimizer.prepare(gradient, 0, layout.trainable_size, **options) is None
        assert optimizer.rows(0, layout.trainable_size) == slice(0, 0)
        return None
    spans = layout.trainable_size // layout.SPAN
    inner = np.sort(random.choice(np.arange(1, spans), size=min(cuts, spans - 1), replace=False))
    edges = [0, *(inner * layout.SPAN).tolist(), layout.trainable_size]
    table = xp.zeros((optimizer.rows(0, layout.trainable_size).stop, 2))
    parts = list(pairwise(edges))
    random.shuffle(parts)
    for start, stop in parts:
        table[optimizer.rows(start, stop)] = optimizer.prepare(gradient, start, stop, **options)
    return table


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


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule != "lamb unscaled"]
)  # it names what is not there
@pytest.mark.parametrize("shapes", [{"p": (0,)}, {"p": ()}, {}], ids=["only empty", "0-d", "nothing"])
def test_odd_sizes(rule, shapes):
    optimizer = RULES[rule](weight_decay=0.1)
    layout, weights = bound(optimizer, np.float64, shapes)
    gradient = put(layout.filled(np.random.default_rng(1), np.float64, trainable_only=True))
    for _ in range(2):
        optimizer.apply(gradient, 0, layout.trainable_size, scale=1.0, lr=0.1)
        optimizer.finish_update()
    assert optimizer.updates.tolist() == [2] * len(shapes) and np.isfinite(host(weights)).all()


@pytest.mark.parametrize("rule", ["momentum", "adam", "lion", "lamb"])
def test_half_weights_keep_their_state_in_float32(rule):
    optimizer = RULES[rule]()
    layout, weights = bound(optimizer, np.float16)
    before = weights.copy()
    gradient = xp.full(layout.trainable_size, 1e-4, np.float16)
    optimizer.apply(gradient, 0, layout.trainable_size, scale=1.0, lr=0.01)
    assert {array.dtype for array in optimizer.state.values()} == {np.dtype(np.float32)}
    assert np.isfinite(host(weights)).all()
    if rule != "lamb":  # whose steps are as long as the weights
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
# The same updates from optax 0.2.8 in float64: optax.lion(**arguments), optax.lamb(**arguments).
OPTAX = {
    "lion": ("Lion", {"lr": 0.1}, [0.1501916387071211, -2.61804244457664, 0.46525452337336104]),
    "lamb": (
        "LAMB",
        {"lr": 0.1, "betas": (0.8, 0.99), "eps": 1e-06},
        [-0.7266388722527239, -2.7952963843789322, 0.26082239293911774],
    ),
}


@pytest.mark.parametrize("name", [*TORCH, *OPTAX])
def test_constants_from_pytorch_and_optax(name):
    kind, arguments, expected = {**TORCH, **OPTAX}[name]
    optimizer = getattr(optim, kind)(weight_decay=0.1, **arguments)
    layout, weights = bound(optimizer, np.float64, {"p": (3,)})
    weights[:3] = put([1, -2, 0.5])
    for t in range(8):
        gradient = xp.zeros(layout.trainable_size)
        gradient[:3] = put([t + 1, 1 / (t + 1), (-1) ** t])
        optimizer.apply(gradient, 0, layout.trainable_size, scale=1.0, lr=optimizer.lr)
        optimizer.finish_update()
    np.testing.assert_allclose(host(weights[:3]), expected, rtol=1e-13)


@pytest.mark.parametrize("sign", [1, -1, 0])
def test_the_first_step_of_lion_is_the_rate(sign):
    optimizer = optim.Lion(0.1)
    layout, weights = bound(optimizer, np.float64, {"p": (300,)})
    before = host(weights).copy()
    optimizer.apply(xp.full(layout.trainable_size, 1e-30 * sign), 0, layout.trainable_size, scale=1.0, lr=0.1)
    assert (host(weights) == before - 0.1 * sign).all()


def test_the_step_of_lamb_is_as_long_as_the_rate_says():
    """|new - old| = lr |p| for each parameter, whatever its gradient: what the paper's ratio is for."""
    optimizer = optim.LAMB(0.1, weight_decay=0.3)
    layout, weights = bound(optimizer, np.float64)
    before = host(weights).copy()
    gradient = put(1e-3 * layout.filled(np.random.default_rng(3), np.float64, trainable_only=True))
    optimizer.apply(gradient, 0, layout.trainable_size, scale=1.0, lr=0.1)
    for entry in layout.trainable:
        old, new = (layout.view(a, entry.name).ravel() for a in (before, host(weights)))
        assert np.linalg.norm(new - old) == pytest.approx(0.1 * np.linalg.norm(old), rel=1e-12)


def test_lamb_where_a_norm_is_0():
    """r = 1: weights of 0 start to move as by Adam, a parameter without gradient stays."""
    optimizer = optim.LAMB(0.1, weight_decay=0.0)
    layout, weights = bound(optimizer, np.float64, {"zero": (5,), "still": (7,)})
    layout.view(weights, "zero")[...] = 0
    still = layout.view(host(weights), "still").copy()
    gradient = xp.zeros(layout.trainable_size)
    layout.view(gradient, "zero")[...] = 2.0
    optimizer.apply(gradient, 0, layout.trainable_size, scale=1.0, lr=0.1)
    np.testing.assert_allclose(layout.view(host(weights), "zero"), -0.1, rtol=1e-6)
    assert (layout.view(host(weights), "still") == still).all()


def test_lamb_on_a_part_needs_the_sums_of_all():
    optimizer = optim.LAMB(0.1)
    layout, _ = bound(optimizer, np.float32)
    gradient = xp.ones(layout.trainable_size, np.float32)
    with pytest.raises(
        ValueError, match=r"sums: expected those of all ranges for LAMB on a part .* call prepare"
    ):
        optimizer.apply(gradient, 0, layout.SPAN, scale=1.0, lr=0.1)


def test_names_that_lamb_leaves_unscaled():
    with pytest.raises(TypeError, match=r"unscaled: expected a list of name patterns, got '\*.bias'; as in"):
        optim.LAMB(0.1, unscaled="*.bias")
    with pytest.raises(
        ValueError, match=r"unscaled: expected each pattern to fit .* got 'c.\*' which fits none of 6"
    ):
        bound(optim.LAMB(0.1, unscaled=["c.*"]), np.float32)
