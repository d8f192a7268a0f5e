"""Dtype rules of operations in 16 bits, and parameters with working copies: what is read, and where gradients go."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
from on_device import here, host, put, xp

from mpdp import nn
from mpdp.autodiff import Parameter, Tape, Tensor, ops, register
from mpdp.autodiff.recording import uses_copies, working_copies

pytestmark = pytest.mark.usefixtures("device")
BF16 = np.dtype(ml_dtypes.bfloat16)
RNG = np.random.default_rng(0)
HALVES = [BF16, np.dtype(np.float16)]
MASK = RNG.random((4, 6)) < 0.5

# name: (operation of 16-bit inputs, shapes, dtype of the result; None is that of the inputs)
RULES = {
    "add": (lambda a, b: a + b, [(4, 6), (6,)], None),
    "subtract": (lambda a, b: a - b, [(4, 6), (4, 1)], None),
    "multiply": (lambda a, b: a * b, [(4, 6), (4, 6)], None),
    "divide": (lambda a, b: a / b, [(4, 6), (4, 6)], None),
    "number": (lambda a: 1.5 - a * 2, [(4, 6)], None),
    "power": (lambda a: a**2, [(4, 6)], None),
    "exp": (ops.exp, [(4, 6)], None),
    "tanh": (ops.tanh, [(4, 6)], None),
    "sigmoid": (ops.sigmoid, [(4, 6)], None),
    "relu": (ops.relu, [(4, 6)], None),
    "gelu": (ops.gelu, [(4, 6)], None),
    "dropout": (lambda a: ops.dropout(a, put(MASK), 0.3), [(4, 6)], None),
    "maximum": (ops.maximum, [(4, 6), (4, 6)], None),
    "where": (lambda a, b: ops.where(put(MASK), a, b), [(4, 6), (4, 6)], None),
    "absolute": (ops.absolute, [(4, 6)], None),
    "sum": (lambda a: a.sum(axis=0), [(4, 6)], None),
    "mean": (lambda a: a.mean(), [(4, 6)], None),
    "max": (lambda a: a.max(axis=1), [(4, 6)], None),
    "softmax": (ops.softmax, [(4, 6)], None),
    "log_softmax": (ops.log_softmax, [(4, 6)], None),
    "layer_norm": (lambda a, w, b: ops.layer_norm(a, w, b), [(4, 6), (6,), (6,)], None),
    "matmul": (ops.matmul, [(4, 6), (6, 3)], None),
    "batched": (ops.matmul, [(2, 4, 6), (2, 6, 3)], None),
    "linear": (ops.linear, [(4, 6), (3, 6), (3,)], None),
    "embedding": (lambda w: ops.embedding(w, put(np.array([[1, 3], [3, 0]]))), [(4, 6)], None),
    "reshape": (lambda a: a.reshape(6, 4), [(4, 6)], None),
    "transpose": (lambda a: a.T, [(4, 6)], None),
    "getitem": (lambda a: a[1:3, ::2], [(4, 6)], None),
    "pick": (lambda a: a[put(np.array([1, 1, 3]))], [(4, 6)], None),
    "concatenate": (lambda a, b: ops.concatenate([a, b], 0), [(4, 6), (1, 6)], None),
    "stack": (lambda a, b: ops.stack([a, b]), [(4, 6), (4, 6)], None),
    "cross_entropy": (lambda a: nn.cross_entropy(a, put(np.array([0, 5, 2, 1]))).sum, [(4, 6)], "float32"),
    "mse": (lambda a, b: nn.mse(a, b).sum, [(4, 6), (4, 6)], "float32"),
    "astype": (lambda a: a.astype("float32"), [(4, 6)], "float32"),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_an_operation_keeps_its_rule(name, dtype):
    """The result, and each gradient, are those of float32 on the same numbers to a rounding or three."""
    operation, shapes, result = RULES[name]
    values = [(RNG.random(shape) + 0.5).astype(dtype) for shape in shapes]
    found, expected = [], []
    for wide, into in ((False, found), (True, expected)):
        leaves = [Tensor(put(v.astype(np.float32) if wide else v), requires_grad=True) for v in values]
        out = operation(*leaves)
        assert out.dtype == (np.float32 if wide else (result or dtype))
        into.append(host(out).astype(np.float64))
        seed = np.linspace(0.5, 1.0, out.size).reshape(out.shape).astype(dtype)
        out.backward(put(seed.astype(np.float32) if wide or result else seed))
        for leaf in leaves:
            assert leaf.grad.dtype == leaf.dtype
            into.append(host(leaf.grad).astype(np.float64))
    step = 2.0**-8 if dtype == BF16 else 2.0**-11
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=4 * step, atol=4 * step * max(1.0, np.abs(b).max()))


def test_dtypes_never_mix_in_silence():
    half, single, double = (Tensor(xp.ones((2, 2), d)) for d in (BF16, np.float32, np.float64))
    for other in (single, double):
        with pytest.raises(
            TypeError, match=r"add: expected floating inputs of one dtype, got bfloat16, float"
        ):
            half + other
    with pytest.raises(
        TypeError,
        match=r"linear: .* of one dtype, got bfloat16, float32; convert one .*, or call the model through its trainer",
    ):
        ops.linear(half, single)
    with pytest.raises(
        TypeError, match=r"layer_norm: expected floating inputs of one dtype, got float32, bfloat16"
    ):
        ops.layer_norm(single, half[0])
    with pytest.raises(TypeError, match=r"layer_norm: expected .* got bfloat16, float64"):
        ops.layer_norm(half, double[0])
    with pytest.raises(TypeError, match=r"squared_error: expected .* got bfloat16, float64"):
        nn.mse(half, double)
    assert ops.layer_norm(half, single[0], single[0]).dtype == BF16
    assert nn.mse(half, single).dtype == np.float32


class Arena:
    """The smallest owner of an arena with working copies."""

    update, dirty, stale, arriving = 1, False, False, None

    def __init__(self, *parameters, dtype=BF16, gradients=np.float32):
        for p in parameters:
            copy = xp.empty(p.shape, dtype)
            p.bind(xp.empty(p.shape, np.float32), xp.full(p.shape, np.nan, gradients), self, copy)
            here.kernels.store(p.data, p._copy)
        self.stale = False


def thirds(*shape):
    return Parameter(put(np.full(shape, 1 / 3, np.float32)))


ROUNDED = float(np.float32(1 / 3).astype(BF16))


def test_operations_read_copies_inside_of_the_context_alone():
    w = thirds(2, 2)
    Arena(w)
    assert not uses_copies()
    assert (w * 1.0).dtype == np.float32 and float((w * 1.0).data[0, 0]) == np.float32(1 / 3)
    with working_copies():
        assert uses_copies() and w.dtype == np.float32 and w.data.dtype == np.float32
        out = w * 1.0
        assert out.dtype == BF16 and float(out.data[0, 0]) == ROUNDED
        with working_copies(False):
            assert (w * 1.0).dtype == np.float32
        free = thirds(2, 2)  # a parameter that nothing has bound
        assert (free * 1.0).dtype == np.float32
    assert not uses_copies()


def test_wide_inputs_are_masters():
    w = thirds(4)
    Arena(w)
    x = put(RNG.standard_normal((3, 4)).astype(BF16))
    with working_copies():
        out = ops.layer_norm(x, w)
        exact = w.astype("float32")
        assert out.dtype == BF16 and exact.dtype == np.float32
        assert float(exact.data[0]) == np.float32(1 / 3)
        own = register("scaled", lambda k, a, b: ((a * b).astype(a.dtype), (a, b)), _scaled_back, wide=(1,))
        scaled = own(put(np.ones(4, BF16)), w)
        plain = register("plain", lambda k, a, b: (a * b, (a, b)), _scaled_back)(put(np.ones(4, BF16)), w)
    assert scaled.dtype == plain.dtype == BF16
    w.grad.fill(np.nan)
    (exact * 2.0).sum().backward()
    assert host(w.grad).tolist() == [2.0] * 4
    w._binding.update += 1
    scaled.sum().backward()
    assert host(w.grad).tolist() == [1.0] * 4


def _scaled_back(k, saved, g, wants):
    a, b = saved
    return (
        None if wants[0] is None else (g * b).astype(a.dtype),
        None if wants[1] is None else (g * a).astype(b.dtype),
    )


def test_gradients_of_copies_are_float32_and_not_rounded():
    """2048 rows whose gradients differ in size: in bfloat16 the small ones would be lost."""
    rows = np.full((2048, 3), 2.0**-9, np.float32)
    rows[0] = 1.0
    w, b = thirds(2, 3), thirds(2)
    Arena(w, b)
    for update in (1, 2):
        w._binding.update = update
        with working_copies():
            out = ops.linear(put(rows.astype(BF16)), w, b)
            twice = ops.linear(put(rows.astype(BF16)), w, b)
        Tape((out.astype("float32") + twice.astype("float32")).sum()).backward(1.0)
        assert w.grad.dtype == b.grad.dtype == np.float32
        assert host(w.grad).tolist() == [[2 * (1 + 2047 * 2.0**-9)] * 3] * 2
        assert host(b.grad).tolist() == [4096.0] * 2


def test_a_leaf_twice_in_one_operation_and_rules_that_return_copies_dtype():
    w = thirds(3)
    Arena(w)
    with working_copies():
        out = (w * w).astype("float32").sum()
    out.backward()
    assert host(w.grad).tolist() == [2 * ROUNDED] * 3


def test_16_bit_gradient_memory():
    w = thirds(3)
    Arena(w, gradients=BF16)
    with working_copies():
        (w.reshape(1, 3) @ put(np.ones((3, 1), BF16))).astype("float32").sum().backward()
    assert w.grad.dtype == BF16 and host(w.grad).astype(float).tolist() == [1.0] * 3


def test_handing_out_data_marks_the_copies():
    w = thirds(2)
    arena = Arena(w)
    with working_copies():
        (w * 1.0).sum().backward()
    w.numpy(), w.shape, w.dtype, w.grad
    repr(w)
    assert not arena.stale
    w.data[0] = 1.0
    assert arena.stale
    arena.stale = False
    w.data = put(np.ones(2, np.float32))
    assert arena.stale and host(w.data).tolist() == [1, 1]


def test_copies_of_a_parameter_are_free():
    w = thirds(2)
    Arena(w)
    for twin in (copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        with working_copies():
            assert (twin * 1.0).dtype == np.float32
    with pytest.raises(ValueError, match=r"copy_view: expected shape \(2,\) of Parameter, got \(3,\)"):
        w.bind(xp.zeros(2, np.float32), None, w._binding, xp.zeros(3, BF16))


def test_modules_in_16_bits():
    """Embedding, layer norm, gelu, tied head: one dtype inside, float32 masters outside."""
    from mpdp.nn.models import GPT

    model = GPT(layers=1, width=8, heads=2, context=4, vocabulary=10).to(here.device)
    Arena(*model.parameters())
    with working_copies():
        out = model(put(np.zeros((3, 4), np.int64)))
    assert out.dtype == BF16
    loss = nn.cross_entropy(out, put(np.ones((3, 4), np.int64)))
    assert loss.sum.dtype == np.float32
    Tape(loss.sum).backward(1.0)
    assert all(np.isfinite(host(p.grad)).all() for p in model.parameters())
    assert model.state_dict()["tokens.weight"].dtype == np.float32
