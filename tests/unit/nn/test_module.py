"""Names, order, tied members, modes, and state that loads whole or not at all."""

import copy
import subprocess
import sys

import numpy as np
import pytest
from on_device import here, host

from mpdp import nn
from mpdp.autodiff import Tensor, ops
from mpdp.nn.module import Changes


def names(module):
    return [name for name, _ in module.named_parameters()]


class Tiny(nn.Module):
    def __init__(self):
        self.scale = nn.Parameter(np.float64(1.0))
        self.first = nn.Linear(3, 4, dtype="float64")
        self.mean = nn.Buffer(np.zeros(3))
        self.blocks = [
            nn.Linear(4, 4, dtype="float64"),
            nn.ReLU(),
            (nn.Linear(4, 4, bias=False, dtype="float64"),),
        ]
        self.heads = {"b": nn.Linear(4, 2, dtype="float64"), "a": nn.Parameter(np.ones(2))}
        self.width = 4

    def forward(self, x, scale=1.0):
        x = self.first(x - self.mean) * self.scale * scale
        for block in (*self.blocks[:2], *self.blocks[2]):
            x = block(x)
        return self.heads["b"](x) * self.heads["a"]


def test_names_and_order():
    model = Tiny()
    assert names(model) == [
        "scale",
        "first.weight",
        "first.bias",
        "blocks.0.weight",
        "blocks.0.bias",
        "blocks.2.0.weight",
        "heads.b.weight",
        "heads.b.bias",
        "heads.a",
    ]
    assert [name for name, _ in model.named_buffers()] == ["mean"]
    assert [name for name, _ in model.named_modules()] == [
        "", "first", "blocks.0", "blocks.1", "blocks.2.0", "heads.b",
    ]  # fmt: skip
    assert list(model.parameters()) == [p for _, p in model.named_parameters()]


def test_bound_names():
    model = Tiny()
    assert model.bind_names() is model
    assert model.blocks[2][0].path == "blocks.2.0" and model.path == ""
    assert model.heads["a"].name == "heads.a" and model.mean.name == "mean"


def test_a_module_needs_no_constructor_of_its_base():
    class Bare(nn.Module):
        def forward(self, x, *, times):
            return x * times

    class Proper(nn.Module):
        def __init__(self):
            super().__init__()
            self.bare = Bare()

    assert Bare()(2, times=3) == 6 and names(Bare()) == [] and Proper().bare.training
    with pytest.raises(NotImplementedError, match=r"Module: expected a method forward, found none; define"):
        nn.Module()(1)


def test_tied_members_are_listed_once_under_their_first_name():
    class Tied(nn.Module):
        def __init__(self):
            self.table = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5)
            self.head.weight = self.table.weight
            self.again = self.head
            self.me = self

    model = Tied()
    assert names(model) == ["table.weight", "head.bias"]
    assert [name for name, _ in model.named_modules()] == ["", "table", "head"]
    assert list(model.state_dict()) == ["table.weight", "head.bias"]
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.table.weight is not model.table.weight and twin.again is twin.head
    twin.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    assert twin.head.weight is twin.table.weight
    assert np.array_equal(twin.head.weight.data, model.head.weight.data + 1)


def test_tied_weights_get_the_gradient_of_both_uses():
    table = nn.Embedding(5, 3, dtype="float64")
    index = np.array([[0, 1], [4, 1]])

    def loss(embed, project):
        return ops.cross_entropy(ops.linear(ops.embedding(embed, index), project), index[:, ::-1])

    loss(table.weight, table.weight).backward()
    first, second = (Tensor(table.weight.data, requires_grad=True) for _ in range(2))
    loss(first, second).backward()
    assert np.allclose(table.weight.grad, first.grad + second.grad, rtol=0, atol=1e-15)


def test_a_set_of_modules_is_refused():
    for kind in (set, frozenset):
        model = nn.Module()
        model.outer = {"parts": [kind([nn.ReLU()])]}
        with pytest.raises(
            TypeError,
            match=r"outer.parts.0: expected modules or parameters in a list, tuple or dict, "
            rf"got a {kind.__name__}; the order of a set differs",
        ):
            names(model)
    model.outer = {"a", "b"}  # other sets are no members
    assert names(model) == []


def test_two_members_with_one_name_are_refused():
    model = nn.Module()
    model.table = {1: nn.Linear(1, 1), "1": nn.Linear(1, 1)}
    with pytest.raises(
        ValueError, match=r"module: expected one member a name, got two named 'table.1'; rename"
    ):
        names(model)


def test_order_follows_assignment_and_not_the_hash_seed():
    program = (
        "from mpdp import nn; m = nn.Module()\n"
        "for name in ('zeta', 'alpha', 'mid'): setattr(m, name, nn.Linear(1, 1))\n"
        "print([n for n, _ in m.named_parameters()])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1 and found.pop().startswith("['zeta.weight', 'zeta.bias', 'alpha.weight'")


def test_deep_models_need_no_recursion():
    model = inner = nn.Module()
    for _ in range(3000):
        inner.next = nn.Module()
        inner = inner.next
    inner.weight = nn.Parameter([1.0])
    assert len(names(model)[0].split(".")) == 3001


def test_modes():
    model = Tiny()
    assert model.training and model.eval() is model
    assert not model.training and not model.blocks[2][0].training
    model.train()
    assert model.heads["b"].training


@pytest.mark.usefixtures("device")
def test_a_model_moves_in_place():
    class Tied(nn.Module):
        def __init__(self):
            self.table = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5)
            self.head.weight = self.table.weight
            self.mean = nn.Buffer(np.zeros(3))

    model = Tied()
    before = model.state_dict()
    assert model.to(here.device) is model and model.to(str(here.device)) is model
    assert model.head.weight is model.table.weight
    assert {tensor.device for tensor in (*model.parameters(), model.mean)} == {here.device}
    assert all(np.array_equal(value, before[name]) for name, value in model.state_dict().items())
    model.load_state_dict({name: value + 1 for name, value in before.items()})
    assert model.head.bias.device == here.device
    assert np.array_equal(host(model.head.bias), before["head.bias"] + 1)


def test_freeze_and_thaw():
    model = Tiny()
    assert model.blocks[0].freeze() is model.blocks[0]
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == ["blocks.0.weight", "blocks.0.bias"]
    model.freeze()
    assert not model(np.ones((2, 3))).requires_grad
    model.thaw()
    assert all(p.requires_grad for p in model.parameters()) and not model.mean.requires_grad


def test_static():
    assert not nn.Module.static and not Tiny.static
    layers = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.ReLU, nn.GELU, nn.Tanh, nn.Flatten)
    assert all(layer.static for layer in (*layers, nn.Sequential))


# -- state -------------------------------------------------------------------------------------------------


def test_state_is_a_copy_and_loads_in_place():
    nn.seed(1)
    model, other = Tiny(), Tiny()
    state = model.state_dict()
    assert list(state) == [*names(model), "mean"] and state["scale"].shape == ()
    assert all(type(v) is np.ndarray for v in state.values())
    views = {name: p.data for name, p in other.named_parameters()}
    state["mean"] += 3
    assert model.mean.data.tolist() == [0, 0, 0]
    other.load_state_dict(state)
    assert all(p.data is views[name] for name, p in other.named_parameters())
    assert all(np.array_equal(p.data, state[name]) for name, p in other.named_parameters())
    assert other.mean.data.tolist() == [3, 3, 3]
    other.load_state_dict({name: Tensor(value) for name, value in state.items()})


def test_a_state_that_does_not_fit_is_refused_whole():
    model = Tiny()
    before = model.state_dict()
    state = {name: value + 1 for name, value in before.items()}
    del state["scale"], state["heads.a"]
    state["extra"] = np.zeros(1)
    state["first.bias"] = np.zeros(3)
    state["first.weight"] = state["first.weight"].astype("float32")
    state["mean"] = 3.0
    with pytest.raises(ValueError) as caught:
        model.load_state_dict(state)
    assert str(caught.value) == (
        "state: expected the 10 names of Tiny, got 2 missing: scale, heads.a; 1 unexpected: extra; "
        "3 mismatched: first.weight (expected float64 (4, 3), got float32 (4, 3)), "
        "first.bias (expected float64 (4,), got float64 (3,)), "
        "mean (expected float64 (3,), got float); "
        "nothing was loaded, check that the state is of this model"
    )
    after = model.state_dict()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s.pop("mean"),
            r"state: expected the 10 names of Tiny, got 1 missing: mean; nothing was loaded",
        ),
        (lambda s: s.update(gru=np.zeros(1)), r"got 1 unexpected: gru; nothing"),
        (
            lambda s: s.update({"heads.a": np.ones((1, 2))}),
            r"got 1 mismatched: heads.a \(expected float64 \(2,\), got float64 \(1, 2\)\); nothing",
        ),
    ],
)
def test_each_kind_of_misfit_has_its_message(change, message):
    model = Tiny()
    state = model.state_dict()
    change(state)
    with pytest.raises(ValueError, match=message):
        model.load_state_dict(state)


def test_empty_and_scalar_parameters_keep_their_shapes():
    model = nn.Module()
    model.empty, model.none, model.scalar = (nn.Parameter(np.zeros(s)) for s in ((0,), (3, 0), ()))
    state = model.state_dict()
    assert [v.shape for v in state.values()] == [(0,), (3, 0), ()]
    copy.deepcopy(model).load_state_dict(state)


def test_a_model_without_parameters():
    model = nn.Sequential(lambda x: x * 2)
    assert names(model) == [] and model.state_dict() == {}
    model.load_state_dict({})
    assert model(3) == 6


def test_a_whole_model_against_plain_numpy():
    model = Tiny()
    x = np.random.default_rng(0).standard_normal((5, 3))
    w = {name: p.data for name, p in model.named_parameters()}
    h = x @ w["first.weight"].T + w["first.bias"]
    h = np.maximum(2 * h @ w["blocks.0.weight"].T + w["blocks.0.bias"], 0) @ w["blocks.2.0.weight"].T
    expected = (h @ w["heads.b.weight"].T + w["heads.b.bias"]) * w["heads.a"]
    assert np.allclose(model(x, scale=2.0).data, expected, rtol=0, atol=1e-14)


def test_containers_that_hold_themselves_are_searched_once():
    model = nn.Module()
    model.parts = [nn.Linear(2, 2, bias=False)]
    model.parts.append(model.parts)
    model.table = {"parts": model.parts, "model": model}
    assert names(model) == ["parts.0.weight"]
    model.again = model.table["me"] = model.table
    assert names(model) == ["parts.0.weight"]


def test_what_is_assigned_is_counted_for_who_wants_to_know():
    model, changes = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), Changes()
    model[1].p = 0.1
    for _, module in model.named_modules():
        module.report_to(changes)
    assert (changes.version, changes.modes) == (0, 0)
    model[1].p = 0.2
    assert (changes.version, changes.modes) == (1, 0)
    model.train()
    assert (changes.version, changes.modes) == (1, 0)  # they train already
    model.eval()
    assert (changes.version, changes.modes) == (1, 3)
    model[0].extra = nn.Linear(2, 2)
    assert changes.version == 2
    changes.anything()
    assert changes.version == 3
    assert [name for name, _ in model.named_modules()] == ["", "0", "0.extra", "1"]


def test_a_module_shows_what_is_in_it():
    assert (
        repr(Tiny())
        == """\
Tiny(
  scale=(), mean=(3,)
  (first): Linear(inputs=3, outputs=4, bias=True)
  (blocks.0): Linear(inputs=4, outputs=4, bias=True)
  (blocks.1): ReLU()
  (blocks.2.0): Linear(inputs=4, outputs=4, bias=False)
  (heads.b): Linear(inputs=4, outputs=2, bias=True)
)"""
    )
    shared = nn.Tanh()
    model = nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), shared), shared, nn.Sequential(), nn.TransformerBlock(4, 2)
    )
    assert (
        str(model)
        == """\
Sequential(
  (0): Sequential(
    (0): Linear(inputs=2, outputs=2, bias=True)
    (1): Tanh()
  )
  (2): Sequential()
  (3): TransformerBlock(
    (norm1): LayerNorm(shape=(4,), eps=1e-05)
    (attention): MultiHeadAttention(
      width=4, heads=2, causal=False
      (qkv): Linear(inputs=4, outputs=12, bias=True)
      (projection): Linear(inputs=4, outputs=4, bias=True)
    )
    (norm2): LayerNorm(shape=(4,), eps=1e-05)
    (up): Linear(inputs=4, outputs=16, bias=True, activation='gelu')
    (down): Linear(inputs=16, outputs=4, bias=True)
  )
)"""
    )
    assert repr(model[0][0]) == "Linear(inputs=2, outputs=2, bias=True)", "its path in a model is not its own"


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (lambda: nn.Embedding(7, 3), "Embedding(count=7, width=3)"),
        (lambda: nn.LayerNorm((2, 3), eps=0.5), "LayerNorm(shape=(2, 3), eps=0.5)"),
        (lambda: nn.Dropout(0.25), "Dropout(p=0.25)"),
        (
            lambda: nn.Conv2d(4, 6, (3, 1), stride=2, padding=1, groups=2),
            (
                "Conv2d(inputs=4, outputs=6, size=(3, 1), stride=(2, 2), padding=(1, 1), dilation=(1, 1), groups=2, "
                "bias=True)"
            ),
        ),
        (lambda: nn.MaxPool2d(2), "MaxPool2d(size=(2, 2), stride=(2, 2), padding=(0, 0))"),
        (lambda: nn.AvgPool2d(3, 1, 1), "AvgPool2d(size=(3, 3), stride=(1, 1), padding=(1, 1))"),
        (
            lambda: nn.BatchNorm1d(5, affine=False),
            "BatchNorm1d(channels=5, eps=1e-05, momentum=0.1, affine=False, global_stats=True)",
        ),
        (
            lambda: nn.BatchNorm2d(5, global_stats=False),
            "BatchNorm2d(channels=5, eps=1e-05, momentum=0.1, affine=True, global_stats=False)",
        ),
        (lambda: nn.GroupNorm(2, 4), "GroupNorm(groups=2, channels=4, eps=1e-05)"),
        (lambda: nn.RMSNorm(4), "RMSNorm(width=4, eps=1e-06)"),
    ],
)
def test_a_layer_shows_its_arguments(layer, text):
    assert repr(layer()) == text


def test_any_module_can_be_shown():
    class Named(nn.Module):
        def extra_repr(self):
            return "answer=42"

    class Unordered(nn.Module):
        def __init__(self):
            self.layers = {nn.Linear(2, 2)}

    assert repr(Named()) == "Named(answer=42)"
    assert "Unordered object at" in repr(Unordered()), "no error where somebody looks for one"
    deep = nn.Linear(1, 1)
    for _ in range(2000):
        deep = nn.Sequential(deep)
    lines = repr(deep).splitlines()
    assert len(lines) == 4001 and lines[2000].endswith(" (0): Linear(inputs=1, outputs=1, bias=True)")
