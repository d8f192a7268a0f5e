"""Every operation in float64 against central differences, with broadcast, empty and size-1 shapes."""

from pathlib import Path

import numpy as np
import pytest
from on_device import host, put, xp

from mpdp import autodiff
from mpdp.autodiff import Operation, Tensor, check, ops

pytestmark = pytest.mark.usefixtures("device")
random = np.random.default_rng(7)


def array(*shape):
    """Return numbers away from 0 and from each other's ties, of both signs."""
    values = random.permutation(np.linspace(0.3, 2.0, int(np.prod(shape)))).reshape(shape)
    return put(values * random.choice([-1.0, 1.0], shape))


def positive(*shape):
    return put(np.abs(host(array(*shape))) + 0.1)


SHAPES = [(3, 4), (1, 4), (3, 1), (1, 1), (4,), (1,), (), (0, 4), (2, 0), (2, 3, 4)]
PAIRS = [
    ((3, 4), (3, 4)),
    ((3, 4), (4,)),
    ((4,), (3, 4)),
    ((3, 4), (3, 1)),
    ((3, 1), (1, 4)),
    ((3, 4), ()),
    ((), (3, 4)),
    ((), ()),
    ((1,), (1,)),
    ((1, 1), (4,)),
    ((0, 4), (4,)),
    ((0, 4), (1, 4)),
    ((2, 3, 4), (3, 1)),
    ((2, 1, 4), (5, 1, 3, 1)),
]

BINARY = {
    "add": ops.add,
    "subtract": ops.subtract,
    "multiply": ops.multiply,
    "divide": ops.divide,
    "maximum": ops.maximum,
    "minimum": ops.minimum,
}
UNARY = {
    "negative": ops.negative,
    "absolute": ops.absolute,
    "exp": ops.exp,
    "tanh": ops.tanh,
    "sigmoid": ops.sigmoid,
    "relu": ops.relu,
    "gelu": ops.gelu,
    "square": lambda x: x**2,
    "cube": lambda x: x**3,
    "reciprocal": lambda x: x**-1,
    "to the 0": lambda x: x**0,
    "to the 1": lambda x: x**1,
    "scalar left": lambda x: 2.5 - 3 * x + 1 / x,
    "scalar right": lambda x: (x + 1.5) * 2 - x / 4,
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "astype": lambda x: x.astype("float64"),
    "reversed": lambda x: x.T,
    "flat": lambda x: x.reshape(-1),
    "leading axis": lambda x: x[None],
    "self product": lambda x: x * x,
    "self sum": lambda x: x + x,
    "diamond": lambda x: (x * 2).tanh() * (x * 2) + x,
}


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_binary(name, left, right):
    check(BINARY[name], array(*left), array(*right))


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_power_and_where(left, right):
    check(ops.power, positive(*left), array(*right))
    condition = put(random.random(np.broadcast_shapes(left, right)) < 0.5)
    check(lambda a, b: ops.where(condition, a, b), array(*left), array(*right))


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("shape", SHAPES)
def test_unary(name, shape):
    check(UNARY[name], array(*shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_log_sqrt_and_a_number_to_a_power(shape):
    check(ops.log, positive(*shape))
    check(ops.sqrt, positive(*shape))
    check(lambda x: 2.0**x, array(*shape))
    check(lambda x: x**0.5, positive(*shape))


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 2), (-1, 0), (0, 1, 2), ()])
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 3, 1), (0, 3, 4)])
def test_reductions(shape, axis, keepdims):
    check(lambda x: ops.sum(x, axis, keepdims), array(*shape))
    check(lambda x: ops.mean(x, axis, keepdims), array(*shape))
    if 0 not in shape:
        check(lambda x: ops.max(x, axis, keepdims), array(*shape))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((3, 4), (4, 5)),
        ((1, 1), (1, 1)),
        ((0, 4), (4, 5)),
        ((3, 0), (0, 5)),
        ((3, 4), (4, 0)),
        ((4,), (4, 5)),
        ((3, 4), (4,)),
        ((4,), (4,)),
        ((2, 3, 4), (4,)),
        ((4,), (2, 4, 5)),
        ((2, 3, 4), (2, 4, 5)),
        ((2, 3, 4), (4, 5)),
        ((3, 4), (2, 4, 5)),
        ((2, 1, 3, 4), (5, 4, 6)),
        ((1, 3, 4), (2, 4, 5)),
        ((0, 3, 4), (4, 5)),
    ],
)
def test_matmul(left, right):
    check(ops.matmul, array(*left), array(*right))


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (0, 4), (4,), (2, 3, 4), (2, 0, 4)])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_linear(shape, activation):
    def linear(x, weight, bias=None):
        return ops.linear(x, weight, bias, activation=activation)

    check(linear, array(*shape), array(5, 4), array(5))
    check(
        linear, array(*shape), array(5, 4) + 0.013
    )  # without this, some sums are 0, where ReLU has no slope
    check(lambda x, w: linear(x, w, None), array(*shape), array(1, 4) + 0.013)


def test_linear_leaves_out_what_is_not_wanted():
    x, w, b = array(3, 4), array(5, 4), array(5)
    check(lambda x: ops.linear(x, w, b, activation="gelu"), x)
    check(lambda w: ops.linear(x, w, b, activation="relu"), w)
    check(lambda b: ops.linear(x, w, b, activation="gelu"), b)
    with pytest.raises(ValueError, match=r'activation: expected None, "relu" or "gelu", got \'tanh\''):
        ops.linear(x, w, b, activation="tanh")


def test_linear_without_inputs_or_outputs():
    check(ops.linear, array(3, 0), array(5, 0), array(5))
    check(ops.linear, array(3, 4), array(0, 4), array(0))


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (3, 1), (2, 3, 4)])
def test_softmax(shape, axis):
    check(lambda x: ops.softmax(x, axis), 5 * array(*shape))
    check(lambda x: ops.log_softmax(x, axis), 5 * array(*shape))


def test_softmax_of_no_rows():
    check(ops.softmax, array(0, 4))
    check(ops.log_softmax, array(0, 4))


@pytest.mark.parametrize(
    ("shape", "normal"),
    [((3, 4), (4,)), ((2, 3, 4), (4,)), ((2, 3, 4), (3, 4)), ((0, 4), (4,)), ((4,), (4,))],
)
def test_layer_norm(shape, normal):
    check(ops.layer_norm, array(*shape), array(*normal), array(*normal))
    check(lambda x, w: ops.layer_norm(x, w), array(*shape), array(*normal))
    check(lambda x: ops.layer_norm(x, shape=normal), array(*shape))
    check(lambda x, b: ops.layer_norm(x, None, b, shape=normal), array(*shape), array(*normal))


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 5), (1, 1), (0, 4), (3, 0)])
def test_layer_norm_of_a_sum(shape):
    weight, bias = array(shape[-1]), array(shape[-1])
    inputs = array(*shape), array(*shape)

    def both(x, added, weight=None, bias=None):
        total, normal = ops.add_layer_norm(x, added, weight, bias, shape=shape[-1])
        return total.tanh() * 0.5 + normal * (normal + total)

    check(both, *inputs, weight, bias)
    check(both, *inputs)
    check(lambda x, a, w: ops.add_layer_norm(x, a, w)[1], *inputs, weight)
    check(lambda x, a: ops.add_layer_norm(x, a, weight, bias)[0], *inputs)
    check(lambda x, w, b: ops.add_layer_norm(x, x, w, b)[1] + x, inputs[0], weight, bias)
    whole = array(*shape)
    check(lambda x, a, w: both(x, a, None, w), *inputs, bias)
    check(lambda x, w: sum(ops.add_layer_norm(x, 1.5 * x, w, w)), inputs[0], whole)


def test_sums_that_do_not_fit_a_layer_norm():
    with pytest.raises(
        ValueError, match=r"added: expected x's shape \(3, 4\), got \(4,\); broadcast it first"
    ):
        ops.add_layer_norm(array(3, 4), array(4), array(4))
    with pytest.raises(ValueError, match=r"add_layer_norm: expected x to end in axes \(3,\), got \(3, 4\)"):
        ops.add_layer_norm(array(3, 4), array(3, 4), array(3))


def test_layer_norm_of_width_one_and_none():
    check(ops.layer_norm, array(3, 1), array(1), array(1))
    check(ops.layer_norm, array(3, 0), array(0), array(0))


@pytest.mark.parametrize("index", [[0, 2, 2, 1], [[1], [1]], [3], [], 2])
def test_embedding(index):
    check(ops.embedding, array(4, 3), put(np.array(index, np.int64)))


@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (0, 3), (3, 0)])
def test_token_embedding(shape):
    index = put(random.integers(0, 4, shape))
    check(lambda tokens, positions: ops.token_embedding(tokens, positions, index), array(4, 3), array(5, 3))


def test_embedding_without_width():
    check(ops.embedding, array(4, 0), put([1, 1]))


INDEX = {
    "integer": 1,
    "negative": -1,
    "slice": slice(1, 3),
    "step": slice(None, None, -2),
    "empty slice": slice(2, 2),
    "pair": (1, 2),
    "ellipsis": (..., 0),
    "new axis": (slice(None), None, 1),
    "list": [0, 2, 0],
    "array": np.array([2, 2, -1, -3]),
    "unsigned array": np.array([[2], [0]], np.uint8),
    "two arrays": (np.array([0, 1, 0]), np.array([3, 3, 3])),
    "array and slice": (slice(0, 2), np.array([0, 0])),
    "boolean": np.array([True, False, True]),
    "no index": np.zeros(0, np.int64),
}


@pytest.mark.parametrize("name", INDEX)
def test_getitem(name):
    index = INDEX[name]
    if isinstance(index, tuple):
        index = tuple(put(part) if isinstance(part, np.ndarray) else part for part in index)
    elif isinstance(index, np.ndarray):
        index = put(index)
    check(lambda x: x[index], array(3, 4))


def test_shapes():
    check(lambda x: x.reshape(4, 3), array(3, 4))
    check(lambda x: x.reshape((2, -1)), array(3, 4))
    check(lambda x: x.transpose(2, 0, 1), array(2, 3, 4))
    check(lambda x: x.transpose((0, -1, 1)), array(2, 3, 4))
    check(lambda x: x.T @ x, array(3, 4))
    check(lambda a, b: ops.concatenate([a, b, a], axis=-1), array(3, 4), array(3, 1))
    check(lambda a, b: ops.concatenate([a, b]), array(0, 4), array(2, 4))
    check(lambda a, b: ops.stack([a, b], axis=1), array(3, 4), array(3, 4))
    check(lambda a, b: ops.stack([a, b], axis=-1), array(), array())


def test_dropout():
    mask = put(random.random((3, 4)) < 0.5)
    check(lambda x: ops.dropout(x, mask, 0.25), array(3, 4))
    check(lambda x: ops.dropout(x, mask[:0], 0.25), array(0, 4))


@pytest.mark.parametrize("target", [[1, 0, 4], [1, -100, 2], [-100, -100, -100]])
def test_cross_entropy(target):
    check(lambda x: ops.cross_entropy(x, put(target)), 5 * array(3, 5))


def test_cross_entropy_of_other_shapes():
    check(lambda x: ops.cross_entropy(x, put([[1, 0], [4, -100]])), array(2, 2, 5))
    check(lambda x: ops.cross_entropy(x, put(3)), array(5))
    check(lambda x: ops.cross_entropy(x, put(np.zeros(0, np.int64))), array(0, 5))
    check(lambda x: ops.cross_entropy(x, put([0, 0])), array(2, 1))
    check(lambda x: ops.cross_entropy(x.T, put([1, 0, 2])), array(5, 3))
    check(lambda x: ops.cross_entropy(x, put([1, 0, 4]), ignore_index=0), array(3, 5))


@pytest.mark.parametrize("shape", [(3, 4), (1,), (), (0, 4)])
def test_squared_error_and_mean_of_sum(shape):
    check(ops.squared_error, array(*shape), array(*shape))
    check(lambda x: ops.mean_of_sum(x.sum(), put(float(x.size))), array(*shape))


def test_every_operation_of_the_package_is_checked_here_or_in_a_file_beside():
    here = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    missing = [name for name in ops.__all__ if f"ops.{name}" not in here and f".{name}(" not in here]
    assert set(missing) <= {"getitem", "to"}, missing  # written as x[index]; test_transfer


DTYPED = {
    "add": (lambda x: x + 1.5, (3, 4)),
    "numpy scalar": (lambda x: x * np.float64(1.5), (3, 4)),
    "divide": (lambda x: 1 / x, (3, 4)),
    "power": (lambda x: x**2 + x**3, (3, 4)),
    "integers": (lambda x: x * xp.arange(4), (3, 4)),
    "booleans": (lambda x: (x.data > 0) * x, (3, 4)),
    "bias": (lambda x: x + x[0], (3, 4)),
    "column": (lambda x: x * x[:, :1], (3, 4)),
    "maximum": (lambda x: ops.maximum(x, 0.5), (3, 4)),
    "where": (lambda x: ops.where(x.data > 0, x, 0.0), (3, 4)),
    "matmul": (lambda x: x @ x.T, (3, 4)),
    "linear": (lambda x: ops.linear(x, x, x[:, 0]), (3, 4)),
    "sum": (lambda x: x.sum(0), (3, 4)),
    "mean": (lambda x: x.mean(), (3, 4)),
    "max": (lambda x: x.max(1), (3, 4)),
    "exp": (lambda x: x.exp(), (3, 4)),
    "log": (lambda x: x.exp().log().sqrt(), (3, 4)),
    "sigmoid": (lambda x: x.sigmoid() + x.tanh() + x.relu() + x.gelu(), (3, 4)),
    "softmax": (lambda x: ops.softmax(x) + ops.log_softmax(x), (3, 4)),
    "layer_norm": (lambda x: ops.layer_norm(x, x[0], x[1]), (3, 4)),
    "embedding": (lambda x: ops.embedding(x, put([0, 0, 2])), (3, 4)),
    "layer_norm of a sum": (lambda x: sum(ops.add_layer_norm(x, x, x[0], x[1])), (3, 4)),
    "token_embedding": (lambda x: ops.token_embedding(x, x, put([[0, 0, 2]])), (3, 4)),
    "self_attention": (lambda x: ops.self_attention(x, 1, causal=True), (2, 3, 6)),
    "getitem": (lambda x: x[[0, 0, 1]], (3, 4)),
    "concatenate": (lambda x: ops.concatenate([x, x]), (3, 4)),
    "dropout": (lambda x: ops.dropout(x, xp.ones((3, 4), bool), 0.3), (3, 4)),
    "0-d": (lambda x: x * x + x, ()),
}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", DTYPED)
def test_dtypes_are_kept(name, dtype):
    function, shape = DTYPED[name]
    values = positive(*shape)
    x = Tensor(values.astype(dtype), requires_grad=True)
    out = function(x)
    assert out.dtype == dtype
    out.backward(np.ones(out.shape))
    assert x.grad.dtype == dtype and isinstance(x.grad, xp.ndarray)
    exact = Tensor(values, requires_grad=True)
    function(exact).backward(np.ones(out.shape))
    tolerance = {"float16": 2e-2, "float32": 1e-5, "float64": 1e-14}[dtype]
    assert np.allclose(host(x.grad), host(exact.grad), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "loss"), [("float16", "float32"), ("float32", "float32"), ("float64", "float64")]
)
def test_losses_of_16_bits_are_summed_in_32(dtype, loss):
    logits = Tensor(xp.full((70_000, 3), 8, dtype), requires_grad=True)
    total = ops.cross_entropy(logits, xp.zeros(70_000, np.int64))
    assert total.dtype == loss and abs(float(total) / (70_000 * np.log(3)) - 1) < 1e-4
    total.backward()
    assert logits.grad.dtype == dtype
    error = ops.squared_error(logits, xp.zeros_like(logits.data))
    assert error.dtype == loss and float(error) == 70_000 * 3 * 64


def test_sums_of_float16_do_not_saturate():
    ones = Tensor(xp.ones((5000, 2), "float16"), requires_grad=True)
    assert ones.sum(0).data.tolist() == [5000, 5000]
    bias = Tensor(xp.zeros(2, "float16"), requires_grad=True)
    (ones.detach() + bias).backward(np.ones((5000, 2)))
    assert bias.grad.tolist() == [5000, 5000]


def test_what_is_checked_is_an_operation():
    assert isinstance(ops.add, Operation) and autodiff.ops is ops


def test_joining_integers_and_floats_keeps_the_floats_dtype():
    joined = ops.concatenate([np.ones(2, "float32"), np.arange(3)])
    assert joined.dtype == "float32" and joined.data.tolist() == [1, 1, 0, 1, 2]
