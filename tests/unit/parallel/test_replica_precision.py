"""A wrapped model in each precision: what is kept, what keeps working copies right, and what is refused."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from on_device import here, host, put, world

import mpdp
from mpdp import nn, optim
from mpdp.autodiff import ops
from mpdp.errors import NonFiniteError

pytestmark = pytest.mark.usefixtures("device")
HALVES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
X = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)


class Net(nn.Module):
    """A norm, a tied weight, and a layer that is used on demand."""

    def __init__(self, spare=False):
        mpdp.seed(0)
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.again = self.first  # tied
        self.spare, self.use = nn.Linear(4, 4), spare

    def forward(self, x):
        x = ops.tanh(self.again(self.norm(self.first(x))))
        return self.spare(x) if self.use else x


def wrap(precision, model=None, **options):
    if precision == "float16":  # small enough that nothing here overflows unasked
        options.setdefault("loss_scale", optim.LossScale(initial=256.0))
    return mpdp.DataParallel(model or Net(), world(), precision=precision, **options)


def loss(output):
    return nn.mse(output, put(np.zeros(output.shape, np.float32)))


def update(parallel, optimizer, **options):
    parallel.backward(loss(parallel(put(X))))
    return parallel.step(optimizer, **options)


def copies_are_right(parallel):
    copies = parallel._replica.copies
    return host(copies).tobytes() == host(parallel.weights).astype(copies.dtype).tobytes()


@pytest.mark.parametrize("precision", HALVES)
def test_what_is_kept_in_which_dtype(precision):
    parallel, optimizer = wrap(precision), optim.AdamW(lr=0.01)
    assert parallel(put(X)).dtype == HALVES[precision]
    update(parallel, optimizer)
    assert parallel.weights.dtype == parallel.arena.array.dtype == np.float32
    assert all(flat.dtype == np.float32 for flat in optimizer.state.values())
    assert all(p.data.dtype == np.float32 for p in parallel.model.parameters())
    assert all(v.dtype == np.float32 for v in parallel.model.state_dict().values())
    assert parallel._replica.copies.dtype == HALVES[precision]
    assert parallel.precision.name == precision and parallel.precision.scaled == (precision == "float16")


@pytest.mark.parametrize("precision", HALVES)
def test_copies_follow_the_optimizer(precision):
    parallel, optimizer = wrap(precision), optim.SGD(lr=0.1, momentum=0.9)
    assert copies_are_right(parallel)
    for _ in range(3):
        before = host(parallel.weights).copy()
        update(parallel, optimizer)
        assert not np.array_equal(before, host(parallel.weights)) and copies_are_right(parallel)
        assert not parallel._replica.binding.stale  # nothing had to be rounded again


@pytest.mark.parametrize("how", ["data", "in place", "state", "broadcast", "freeze", "thaw"])
def test_copies_follow_whoever_else_writes(how):
    parallel, optimizer = wrap("bfloat16"), optim.SGD(lr=0.1, momentum=0.9)
    update(parallel, optimizer)
    weight = parallel.model.first.weight
    if how == "data":
        weight.data = put(np.full((4, 4), 1 / 3, np.float32))
    elif how == "in place":
        weight.data[...] = 1 / 3
    elif how == "state":
        parallel.model.load_state_dict({k: v / 3 for k, v in parallel.model.state_dict().items()})
    elif how == "broadcast":
        weight.data[...] = 1 / 3
        parallel.broadcast()
        assert copies_are_right(parallel)
    else:
        parallel.freeze("norm.weight", "first.bias")
        assert copies_are_right(parallel)
        frozen = host(parallel.model.norm.weight.data).copy()
        update(parallel, optimizer)
        assert np.array_equal(host(parallel.model.norm.weight.data), frozen)
        if how == "thaw":
            parallel.thaw("norm.weight", "first.bias")
    parallel(put(X))
    assert copies_are_right(parallel)
    update(parallel, optimizer)
    assert copies_are_right(parallel)


def test_unused_parameters_keep_weight_and_copy():
    parallel, optimizer = wrap("bfloat16"), optim.AdamW(lr=0.1, weight_decay=0.5)
    before = host(parallel.model.spare.weight.data).copy()
    update(parallel, optimizer)
    assert np.array_equal(host(parallel.model.spare.weight.data), before) and copies_are_right(parallel)


def test_the_norms_weights_are_not_rounded():
    """1 + 2^-10 is 1 in bfloat16; a norm's weight of it shows in a float32 sum, and its gradient is float32."""
    model = nn.LayerNorm(4)
    model.weight.data = np.full(4, 1 + 2.0**-10, np.float32)
    parallel = wrap("bfloat16", model)
    seen = []
    real = here.kernels.layer_norm
    try:
        here.kernels.layer_norm = lambda x, weight, bias, eps: (
            seen.append(weight) or real(x, weight, bias, eps)
        )
        out = parallel(put(X))
    finally:
        del here.kernels.layer_norm
    assert (
        seen[0].dtype == np.float32 and float(seen[0][0]) == 1 + 2.0**-10 and out.dtype == HALVES["bfloat16"]
    )


def test_outside_of_the_wrapper_the_model_is_float32():
    parallel = wrap("bfloat16")
    assert parallel.model(put(X)).dtype == np.float32
    assert parallel(put(X)).dtype == HALVES["bfloat16"]


def test_inputs_are_rounded_wherever_they_lie():
    class Many(nn.Module):
        def __init__(self):
            self.layer = nn.Linear(4, 2)

        def forward(self, pair, *, extra, index, tensor):
            a, b = pair
            assert a.dtype == b.dtype == extra["c"].dtype == tensor.dtype == HALVES["bfloat16"]
            assert index.dtype == np.int64
            return self.layer(tensor + extra["c"])

    x = put(X)
    parallel = wrap("bfloat16", Many())
    from mpdp.autodiff import Tensor

    leaf = Tensor(x, requires_grad=True)
    out = parallel((x, x), extra={"c": x}, index=put(np.arange(6)), tensor=leaf)
    parallel.backward(loss(out))
    assert leaf.grad.dtype == np.float32


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16", "float16"])
@pytest.mark.parametrize("reduce_dtype", [None, "float32", "bfloat16", "float16", "float64"])
def test_reduce_dtype(precision, reduce_dtype):
    found = []
    for dtype in (reduce_dtype, "float32"):
        parallel, optimizer = wrap(precision, reduce_dtype=dtype), optim.SGD(lr=0.5)
        assert parallel.arena.array.dtype.name == (dtype or "float32")
        update(parallel, optimizer, clip_norm=1.0)
        found.append(host(parallel.model.first.weight.data))
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=4e-3)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16", "float16"])
def test_clipping_is_to_the_same_norm(precision):
    """A gradient is scaled by the loss scale and 2^-k; its norm is not."""
    parallel, optimizer = wrap(precision, nominal_count=64), optim.SGD(lr=1.0)
    before = host(parallel.weights).copy()
    update(parallel, optimizer, clip_norm=1e-3)
    np.testing.assert_allclose(np.linalg.norm(host(parallel.weights) - before), 1e-3, rtol=2e-3)


def test_float16_survives_small_gradients_by_its_scale():
    """Gradients of 2^-30 are 0 in float16; times 65536 they are not."""
    moved = []
    for initial in (1.0, 2.0**16):
        parallel = wrap("float16", nn.Linear(4, 4), loss_scale=optim.LossScale(initial=initial))
        before = host(parallel.weights).copy()
        parallel.backward(((parallel(put(X)).astype("float32") * 2.0**-30).sum(), 1.0))
        parallel.step(optim.SGD(lr=2.0**30))
        moved.append(bool((host(parallel.weights) != before).any()))
    assert moved == [False, True]


def test_an_overflow_is_skipped_until_the_scale_is_at_its_bottom():
    parallel = wrap("float16", nn.Linear(4, 4), loss_scale=optim.LossScale(initial=4.0, smallest=1.0))
    optimizer = optim.SGD(lr=0.1, momentum=0.9)
    before = host(parallel.weights).copy()

    def overflow():
        parallel.backward(((parallel(put(X)).astype("float32") * 1e6).sum(), 1.0))
        return parallel.step(optimizer)

    assert np.isfinite(overflow()) and np.isfinite(overflow())
    assert parallel.loss_scale.value == 1.0 and parallel.loss_scale.skipped == parallel.step_count == 2
    assert np.array_equal(host(parallel.weights), before) and not host(optimizer.state["momentum"]).any()
    assert optimizer.updates.tolist() == [0, 0]
    with pytest.raises(
        NonFiniteError, match=r"first in .*, and the loss scale cannot fall below 1; nothing was"
    ):
        overflow()
    assert np.array_equal(host(parallel.weights), before) and parallel.step_count == 2
    update(parallel, optimizer)
    assert not np.array_equal(host(parallel.weights), before)


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_others_stop_at_a_gradient_that_is_not_finite(precision):
    parallel = wrap(precision, nn.Linear(4, 4))
    before = host(parallel.weights).copy()
    # the root of 0 has an infinite slope, and 0 times that is NaN
    parallel.backward(((parallel(put(X)).astype("float32") * 0.0).sqrt().sum(), 1.0))
    with pytest.raises(
        NonFiniteError, match=r"gradient: expected finite values at step 0, got NaN or infinity"
    ):
        parallel.step(optim.SGD(lr=0.1))
    assert np.array_equal(host(parallel.weights), before)


def test_a_loss_that_is_not_finite_stops_float16_too():
    parallel = wrap("float16", nn.Linear(4, 4))
    x = put(np.full((2, 4), 6e4, np.float32))
    parallel.model.weight.data = put(np.ones((4, 4), np.float32))
    with pytest.raises(
        NonFiniteError, match=r"loss: expected a finite sum .* samples; float16 ends at 65504"
    ):
        parallel.backward((parallel(x).astype("float32").sum(), 1.0))
    assert parallel.loss_scale.skipped == 0


def test_replica_checks_cover_copies_and_scale(monkeypatch):
    parallel = wrap("float16")
    seen = {}
    monkeypatch.setattr(
        "mpdp.parallel.replica.check_replicas",
        lambda comm, layout, flats, arrays, step: seen.update(flats, **arrays),
    )
    parallel.check_replicas()
    assert {"weight", "working copy", "loss scale (value)", "loss scale (finite)"} <= seen.keys()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"precision": "half"},
            ValueError,
            r"precision: expected one of float32, float64, tf32, bfloat16, float16",
        ),
        (
            {"precision": "float64"},
            TypeError,
            r"expected parameters of dtype float64 for float64, got float32",
        ),
        (
            {"precision": "bfloat16", "loss_scale": optim.LossScale()},
            ValueError,
            r'loss_scale: expected None with precision="bfloat16", got one; only "float16" needs it',
        ),
        (
            {"precision": "float16", "loss_scale": 8},
            TypeError,
            r"loss_scale: expected an optim.LossScale, got int",
        ),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        mpdp.DataParallel(Net(), world(), **options)


@pytest.mark.parametrize("precision", [None, "float32", "float64", "tf32", "bfloat16", "float16"])
def test_a_model_without_parameters_is_told_so_in_every_precision(precision):
    class Twice(nn.Module):
        def forward(self, x):
            return x * 2.0

    parallel = wrap(precision, Twice())
    output = parallel(put(X.astype("float64" if precision == "float64" else "float32")))
    with pytest.raises(ValueError, match=r"model: expected at least one trainable parameter, got none"):
        parallel.backward((output.astype("float32") if precision != "float64" else output).sum())


def test_bfloat16_layers_are_refused():
    with pytest.raises(TypeError, match=r"expected parameters of dtype float32 for bfloat16, got bfloat16"):
        wrap("bfloat16", nn.Linear(4, 4, dtype=ml_dtypes.bfloat16))


@pytest.mark.parametrize("precision", HALVES)
def test_a_loss_in_16_bits_is_refused(precision):
    parallel = wrap(precision)
    with pytest.raises(
        TypeError, match=rf'loss: expected float32 under precision="{precision}", got {precision}'
    ):
        parallel.backward((parallel(put(X)) ** 2).mean())
    update(parallel, optim.SGD(lr=0.1))  # and the next update is whole


def test_parameters_keep_their_dtype_without_a_precision():
    for dtype in ("float16", "float32", "float64"):
        parallel = mpdp.DataParallel(nn.Linear(4, 4, dtype=dtype), world())
        assert parallel.precision.name == dtype and parallel._replica.copies is None
        assert parallel.loss_scale is None


# -- memory -------------------------------------------------------------------------------------------------


def table():
    """Return (precision, dtype of the gradients, bytes with SGD, momentum, AdamW) as the guide prints them."""
    guide = (Path(__file__).resolve().parents[3] / "docs" / "guide.md").read_text()
    rows = re.findall(
        r"^\| (`\".*) \| (float32|float64|16 bits) \| (\d+) \| (\d+) \| (\d+) \| (.*) \|$", guide, re.M
    )
    for names, reduced, *sizes, sharded in rows:
        kept, shared = map(int, re.fullmatch(r"(\d+) \+ (\d+)/N", sharded).groups())
        assert kept + shared == int(sizes[-1])  # on one rank nothing is shared
        for name in re.findall(r'"(\w+)"', names):
            yield name, name if reduced == "16 bits" else reduced, *map(int, sizes)


def test_the_table_has_every_precision():
    assert {row[0] for row in table()} == {"float32", "tf32", "bfloat16", "float16", "float64"}
    assert len(list(table())) == 7


@pytest.mark.parametrize(("precision", "reduce_dtype", "plain", "momentum", "adam"), list(table()))
def test_bytes_of_a_parameter(precision, reduce_dtype, plain, momentum, adam):
    """What the table of the guide says, for a model that fills its layout."""
    rules = (
        (optim.SGD(lr=0.1), plain),
        (optim.SGD(lr=0.1, momentum=0.9), momentum),
        (optim.AdamW(lr=0.1), adam),
    )
    for optimizer, size in rules:
        dtype = "float64" if precision == "float64" else "float32"
        parallel = wrap(precision, nn.Linear(64, 64, bias=False, dtype=dtype), reduce_dtype=reduce_dtype)
        output = parallel(put(np.ones((2, 64), dtype)))
        parallel.backward(nn.mse(output, put(np.zeros((2, 64), dtype))))
        parallel.step(optimizer)
        memory = parallel.memory()
        assert sum(memory[part] for part in ("parameters", "gradients", "optimizer")) == 4096 * size
        assert memory.keys() == {"parameters", "gradients", "optimizer", "activations", "workspace", "peak"}
        assert memory["peak"] >= 4096 * size


def test_activations_are_the_largest_of_all_shares():
    parallel = wrap("float32", nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    seen = []
    for rows in (2, 6, 3):
        parallel.backward(loss(parallel(put(X[:rows]))), final=rows == 3)
        seen.append(parallel.memory()["activations"])
    assert seen[0] < seen[1] == seen[2]
    # inputs of both layers, the result of tanh which is the second one's, and the loss's differences
    if here.device.kind == "cpu":
        assert seen[1] == X.nbytes + 6 * 8 * 4 + 6 * 2 * 4
