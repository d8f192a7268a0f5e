"""Binding, groups, plans, state and messages of optimizers."""

from __future__ import annotations

import inspect
import json
from itertools import pairwise

import numpy as np
import pytest
from filled_layout import Layout

from mpdp import nn, optim
from mpdp.errors import CheckpointError
from mpdp.kernels.updates import CpuUpdates
from mpdp.optim.plan import Plan

KERNELS = CpuUpdates()


def bound(optimizer, shapes=None, dtype=np.float32):
    layout = Layout(shapes or {"a": (3, 4), "b": (5,)})
    weights = np.zeros(layout.size, dtype)
    optimizer.bind(layout, weights, KERNELS)
    return layout, weights


def test_slots():
    assert optim.SGD(0.1).slots == ()
    assert optim.SGD(0.1, momentum=0.9).slots == ("momentum",)
    assert optim.Adam(0.1).slots == optim.AdamW(0.1).slots == optim.LAMB(0.1).slots == ("mean", "variance")
    assert optim.Lion(0.1).slots == ("momentum",)


def test_prepare_needs_no_sums():
    for optimizer in (optim.SGD(0.1), optim.Adam(0.1), optim.AdamW(0.1), optim.Lion(0.1)):
        layout, _ = bound(optimizer)
        assert optimizer.prepare(np.zeros(layout.trainable_size), 0, layout.trainable_size, 1.0) is None


def test_describe_can_be_stored():
    optimizer = optim.AdamW(np.float64(0.1), groups=[optim.Group("*.bias", weight_decay=0)])
    assert json.loads(json.dumps(optimizer.describe())) == {
        "class": "AdamW", "lr": 0.1, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8,
        "groups": [{"pattern": "*.bias", "lr_factor": 1.0, "weight_decay": 0.0}],
    }  # fmt: skip
    assert optim.SGD(1, 0.5).describe()["momentum"] == 0.5
    assert optim.SGD(0.1).describe() != optim.SGD(0.2).describe()


def test_binding_twice():
    optimizer = optim.SGD(0.1)
    layout, weights = bound(optimizer)
    optimizer.bind(layout, weights, KERNELS)
    with pytest.raises(
        ValueError, match=r"SGD: expected weights that it was bound to before, got others; make one"
    ):
        optimizer.bind(Layout({"a": (3,)}), np.zeros(4096), KERNELS)
    optimizer.unbind()
    other, weights = bound(optimizer, {"c": (5000,)})
    assert optimizer.updates.shape == (1,)
    optimizer.apply(np.zeros(other.trainable_size, np.float32), 0, other.trainable_size, scale=1.0, lr=0.1)


def test_apply_before_bind():
    with pytest.raises(ValueError, match=r"Adam: expected bind\(\) before apply\(\)"):
        optim.Adam(0.1).apply(np.zeros(4096), 0, 4096, scale=1.0, lr=0.1)


def test_weights_of_another_size():
    with pytest.raises(ValueError, match=r"weights: expected shape \(4096,\), got \(5,\)"):
        optim.SGD(0.1).bind(Layout({"a": (3,)}), np.zeros(5), KERNELS)


def test_first_group_that_fits_decides():
    optimizer = optim.SGD(
        1.0,
        groups=[
            optim.Group("layers.?.bias", lr_factor=3.0),
            optim.Group("*.bias", lr_factor=2.0),
            optim.Group("head.*", lr_factor=0.0),
        ],
    )
    shapes = {"head.weight": (2,), "head.bias": (2,), "layers.0.bias": (300,), "layers.0.weight": (2, 2)}
    layout, weights = bound(optimizer, shapes)
    gradient = np.ones(layout.trainable_size, np.float32)
    optimizer.apply(gradient, 0, layout.trainable_size, scale=1.0, lr=1.0)
    for name, factor in {"head.weight": 0, "head.bias": 2, "layers.0.bias": 3, "layers.0.weight": 1}.items():
        assert (layout.view(weights, name) == -factor).all()


def test_pattern_that_fits_nothing():
    optimizer = optim.SGD(0.1, groups=[optim.Group("*.biass")])
    with pytest.raises(
        ValueError, match=r"fit a parameter, got '\*.biass' which fits none of 2 \(a, b\); correct"
    ):
        bound(optimizer)


def test_pattern_may_fit_frozen_parameters_only():
    optimizer = optim.SGD(0.1, groups=[optim.Group("b")])
    optimizer.bind(Layout({"a": (3,), "b": (4,)}, frozen=("b",)), np.zeros(8192), KERNELS)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: optim.SGD(-0.1), r"lr: expected a finite number of 0 or more, got -0.1"),
        (lambda: optim.SGD(float("nan")), r"lr: expected a finite number of 0 or more, got nan"),
        (
            lambda: optim.Adam(0.1, weight_decay=-1),
            r"weight_decay: expected a finite number of 0 or more, got -1",
        ),
        (lambda: optim.SGD(0.1, momentum=1.0), r"momentum: expected a number in \[0, 1\), got 1.0"),
        (lambda: optim.SGD(0.1, nesterov=True), r"nesterov: expected momentum above 0 with it, got 0.0"),
        (
            lambda: optim.Adam(0.1, betas=(0.9, 1.0)),
            r"betas: expected two numbers in \[0, 1\), got \(0.9, 1.0\)",
        ),
        (lambda: optim.Adam(0.1, betas=(0.9,)), r"betas: expected two numbers, got"),
        (lambda: optim.Adam(0.1, eps=0.0), r"eps: expected a number above 0, got 0.0"),
        (
            lambda: bound(optim.Adam(0.1, eps=1e-60)),
            r"eps: expected a number that float32 can hold, got 1e-60",
        ),
        (lambda: optim.Group("a", lr_factor=-1), r"lr_factor: expected a finite number of 0 or more, got -1"),
        (lambda: optim.SGD(0.1, groups=[optim.Group(f"{i}") for i in range(256)]), r"at most 255, got 256"),
    ],
)
def test_bad_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: optim.SGD("0.1"), r"lr: expected a number of 0 or more, got '0.1'"),
        (lambda: optim.SGD(0.1, groups=["*.bias"]), r"groups: expected optim.Group objects, got '\*.bias'"),
        (lambda: optim.Group(3), r"pattern: expected a string such as '\*.bias', got 3"),
    ],
)
def test_bad_types(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("rule", [optim.SGD, optim.Adam, optim.AdamW, optim.Lion, optim.LAMB])
def test_parameters_in_the_place_of_the_learning_rate(rule):
    """As in PyTorch: optim.Adam(model.parameters(), lr=0.01)."""
    model, name = nn.Sequential(nn.Linear(2, 3)), rule.__name__
    start = rf"^{name}: expected no parameters \(the trainer gives it those of the model\), got "
    end = r" and pass it to mpdp.Trainer\(model, loss, optimizer\)$"
    for kind, given in (
        ("generator", model.parameters()),
        ("list", list(model.parameters())),
        ("list", [{"params": model.parameters()}]),
        ("dict", dict(model.named_parameters())),
        ("Sequential", model),
        ("Linear", model[0]),
        ("Parameter", model[0].weight),
    ):
        with pytest.raises(TypeError, match=rf"{start}{kind}; write {name}\(lr=0.02\){end}"):
            rule(given, lr=0.02)
        with pytest.raises(TypeError, match=rf"{start}{kind}; write {name}\(lr=0.02\){end}"):
            rule(given, 0.02)
        with pytest.raises(TypeError, match=rf"{start}{kind}; write {name}\(lr=0.001\){end}"):
            rule(given)
    with pytest.raises(TypeError, match=rf"{start}generator; write {name}\(lr=0.1\){end}"):
        rule(params=model.parameters(), lr=0.1)
    assert next(iter(inspect.signature(rule).parameters)) == "lr"
    assert rule(np.float32(0.5)).lr == 0.5
    with pytest.raises(TypeError, match=r"lr: expected a number of 0 or more, got array"):
        rule(np.ones(2))

    class Own(rule):
        pass

    with pytest.raises(TypeError, match=r"^Own: expected no parameters"):
        Own(model.parameters(), lr=0.02)
    assert Own(0.5).lr == 0.5


def test_state_that_does_not_fit_changes_nothing():
    optimizer = optim.Adam(0.1)
    bound(optimizer)
    good = {name: np.ones_like(array) for name, array in optimizer.state_arrays().items()}
    bad = {"mean": good["mean"], "variance": good["variance"][:5], "momentum": good["mean"]}
    with pytest.raises(CheckpointError) as caught:
        optimizer.load_state_arrays(bad)
    for part in (
        "updates is missing",
        "momentum is unexpected",
        "variance is float32 (5,) in place of float32 (4096,)",
    ):
        assert part in str(caught.value)
    assert "resume with the optimizer and model that wrote the checkpoint" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"mean is float64 \(4096,\) in place of float32 \(4096,\)"):
        optimizer.load_state_arrays({**good, "mean": good["mean"].astype(float)})
    assert not any(array.any() for array in optimizer.state_arrays().values())
    optimizer.load_state_arrays(good)
    assert (optimizer.state["mean"] == 1).all() and (optimizer.updates == 1).all()


def test_plan_does_not_grow_with_the_number_of_parameters():
    many = Layout({f"p{i}": (300,) for i in range(1000)})
    plan = Plan(many, [0] * 1000)
    assert plan.ranges(0, many.trainable_size, None) == [(0, many.trainable_size, 0)]
    assert plan.ranges(4096, 8192, None) == [(4096, 8192, 0)]
    assert Plan(many, [7] * 1000).ranges(0, many.trainable_size, None) == [(0, many.trainable_size, 7)]
    mixed = Plan(many, [i % 2 for i in range(1000)])
    assert mixed.ranges(0, many.trainable_size, None) == [(0, many.trainable_size, None)]


def test_plan_joins_small_stretches_and_keeps_large_ones():
    layout = Layout({"w1": (100_000,), "b1": (10,), "w2": (5000,), "b2": (10,), "w3": (100_000,)})
    pieces = Plan(layout, [0, 1, 0, 1, 0]).ranges(0, layout.trainable_size, None)
    assert [piece.group for piece in pieces] == [0, None, 0]
    assert pieces[0].start == 0 and pieces[-1].stop == layout.trainable_size
    assert all(a.stop == b.start for a, b in pairwise(pieces))


def test_plan_of_used_parameters():
    layout = Layout(dict.fromkeys("abcdef", (256,)))
    plan = Plan(layout, [0] * 6)
    used = np.array([True, True, False, False, True, False])
    assert plan.ranges(0, 4096, used) == [(0, 512, 0), (1024, 1280, 0)]
    assert plan.ranges(256, 1024, used) == [(256, 512, 0)]
    assert plan.ranges(0, 4096, used) is plan.ranges(0, 4096, used.copy())
    used[5] = True  # the caller's own array changed in place
    assert plan.ranges(0, 4096, used) == [(0, 512, 0), (1024, 4096, 0)]
    assert plan.ranges(0, 4096, np.zeros(6, bool)) == []
    assert plan.ranges(0, 4096, None) == [(0, 4096, 0)]


def test_plan_covers_each_used_block_once():
    rng = np.random.default_rng(0)
    for _ in range(50):
        count = int(rng.integers(1, 30))
        layout = Layout({str(i): (int(rng.integers(0, 9000)),) for i in range(count)})
        groups = rng.integers(0, 3, count).tolist()
        plan = Plan(layout, groups)
        used = rng.random(count) < 0.7
        hits = np.zeros(layout.trainable_size, int)
        inner = rng.integers(0, layout.trainable_size // 256 + 1, 3) * 256
        edges = sorted([0, *inner.tolist(), layout.trainable_size])
        for start, stop in pairwise(edges):
            for piece in plan.ranges(start, stop, used):
                hits[piece.start : piece.stop] += 1
                owners = plan.parameter_of_block()[piece.start // 256 : piece.stop // 256]
                assert used[owners].all()
                assert piece.group is None or all(groups[i] == piece.group for i in owners)
        for entry, flag in zip(layout.trainable, used):
            assert (hits[entry.start : entry.stop] == flag).all()
