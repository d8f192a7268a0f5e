"""Linear layers with their activation, forward and backward, against plain products on both devices."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from on_device import here, host, leave, put, use, xp

from mpdp.errors import MissingDependencyError
from mpdp.kernels.cublas_plain import PlainCublas
from mpdp.kernels.cublaslt import Problem
from mpdp.kernels.cuda_products import _laid_out, _packed
from mpdp.kernels.small_products import is_small, shape

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(d) for d in ("float32", "float64", "float16")] + [BF16]
TOLERANCE = {"float64": 1e-13, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
SHAPES = [(3, 4, 5), (1, 1, 1), (0, 4, 5), (3, 0, 5), (3, 4, 0), (65, 33, 17), (128, 64, 40), (300, 24, 264)]
SHAPES += [(9, 400, 360)]  # few rows, many weights
RNG = np.random.default_rng(5)
on_both = pytest.mark.usefixtures("device")


def draw(shape, dtype=np.float64):
    return RNG.standard_normal(shape).astype(dtype)


def activate(z, activation):
    """Return activation and slope, in float64."""
    if activation is None:
        return z, np.ones_like(z)
    if activation == "relu":
        return np.maximum(z, 0), (z > 0).astype(float)
    root = np.sqrt(2 / np.pi)
    t = np.tanh(root * (z + 0.044715 * z**3))
    return 0.5 * z * (1 + t), 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * root * (1 + 3 * 0.044715 * z * z)


def close(found, expected, dtype, scale=1.0):
    found = host(found)
    assert found.shape == expected.shape and found.dtype == dtype
    largest = max(1.0, np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(
        found.astype("f8"), expected, rtol=0, atol=scale * TOLERANCE[dtype.name] * largest
    )


@on_both
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_and_its_gradients(shape, dtype, activation):
    n, i, o = shape
    x, w, b, g = draw((n, i), dtype), draw((o, i), dtype) / 4, draw(o, dtype), draw((n, o), dtype)
    w = w.astype(dtype)
    k = here.kernels
    for bias in (b, None):
        z = x.astype("f8") @ w.astype("f8").T + (0 if bias is None else bias.astype("f8"))
        expected, slope = activate(z, activation)
        out, saved = k.linear(put(x), put(w), None if bias is None else put(bias), activation)
        close(out, expected, dtype, 2)
        assert (saved is None) == (activation is None)
        if activation == "relu":  # of what was rounded; one element in a thousand lies on the other side of 0
            slope = (host(out).astype("f8") > 0).astype(float)
        g_before = put(g)
        dz, sums = k.activation_backward(g_before, saved, activation, True)
        close(dz, slope * g.astype("f8"), dtype, 3)
        close(sums, host(dz).astype("f8").sum(0), dtype, 3)
        assert host(g_before).tobytes() == g.tobytes()
        assert k.activation_backward(put(g), None, None)[1] is None


@on_both
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("dtype", [np.dtype("float32"), np.dtype("float64"), BF16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (128, 96, 10), (7, 200, 512), (256, 512, 36), (33, 784, 70)])
def test_the_whole_backward_of_a_layer(shape, dtype, activation):
    """On a GPU one kernel does all of it where the layer is small and float32."""
    n, i, o = shape
    k = here.kernels
    x, w, g = put(draw((n, i), dtype)), put(draw((o, i), dtype) / 4).astype(dtype), put(draw((n, o), dtype))
    _, saved = k.linear(x, w, None, activation)
    _, slope = activate(host(x).astype("f8") @ host(w).astype("f8").T, activation)
    if activation == "relu":  # of what was rounded
        slope = (host(saved).astype("f8") > 0).astype(float)
    dz = host(g).astype("f8") * slope
    exact = dz @ host(w).astype("f8"), dz.T @ host(x).astype("f8"), dz.sum(0)
    for kinds in itertools.product(("new", "over", "onto", "unwanted"), repeat=3):
        if activation == "gelu" and kinds != ("new", "onto", "over"):
            continue  # what was saved is written over
        before = [put(draw(e.shape, dtype)) for e in exact]
        into = tuple(
            {"new": (None, 0.0), "over": (out.copy(), 0.0), "onto": (out.copy(), 1.0), "unwanted": None}[kind]
            for kind, out in zip(kinds, before)
        )
        found = k.linear_backward(g, saved, activation, x, w, into)
        for kind, pair, array, value, old in zip(kinds, into, found, exact, before):
            if kind == "unwanted":
                assert array is None
                continue
            assert kind == "new" or array is pair[0]
            # Sums are taken of the gradient as it was rounded.
            close(
                array,
                value + (host(old).astype("f8") if kind == "onto" else 0),
                dtype,
                40 if dtype == BF16 else 8,
            )


@on_both
def test_the_backward_of_a_layer_repeats_its_bits_and_keeps_nan():
    k = here.kernels
    x, w, g = (put(draw(s, "float32")) for s in ((128, 512), (512, 512), (128, 512)))
    kept = put(np.maximum(draw((128, 512), "float32"), 0))
    wanted = ((None, 0.0),) * 3
    first, again = (
        [host(a).tobytes() for a in k.linear_backward(g, kept, "relu", x, w, wanted)] for _ in range(2)
    )
    assert first == again
    g[5, 7] = np.nan
    of_x, of_weight, of_bias = (host(a) for a in k.linear_backward(g, kept, "relu", x, w, wanted))
    assert np.isnan(of_x[5]).all() and np.isnan(of_weight[7]).all() and np.isnan(of_bias[7])
    assert np.isnan(of_x).sum() == 512 and np.isnan(of_weight).sum() == 512 and np.isnan(of_bias).sum() == 1


@on_both
@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize(
    ("dtype", "written"),
    [(BF16, "float32"), ("float16", "float32"), ("float32", "float64"), ("float64", "float64")],
)
@pytest.mark.parametrize("shape", [(700, 33), (5, 3), (0, 3), (5000, 64), (4096, 384)])
def test_sums_are_written_and_added_into_wider_memory(shape, dtype, written, beta):
    g = draw(shape, dtype)
    before = draw(shape[1], written) if beta else np.full(shape[1], np.nan, written)
    exact = g.astype("f8").sum(0) + (before if beta else 0)
    for gap in (1, 2):
        memory = xp.zeros(gap * shape[1], written)
        out = memory[::gap]
        out[...] = put(before)
        changed, sums = here.kernels.activation_backward(put(g), None, None, True, out, beta)
        assert sums is out and host(changed).tobytes() == g.tobytes()
        # 16-bit floats are added in float32
        np.testing.assert_allclose(host(out), exact, rtol=0, atol=4e-5 * np.abs(exact).max(initial=1))


@on_both
def test_a_step_repeats_its_bits():
    x, w, b, g = (draw(s, BF16) for s in ((4096, 96), (200, 96), (200,), (4096, 200)))
    k = here.kernels

    def run():
        out, saved = k.linear(put(x), put(w), put(b), "gelu")
        dz, sums = k.activation_backward(put(g), saved, "gelu", True)
        weight = k.gemm(dz.T, put(x), xp.zeros((200, 96), np.float32), 1.0)
        return [host(a).tobytes() for a in (out, dz, sums, k.gemm(dz, put(w)), weight)]

    assert run() == run()


@on_both
@pytest.mark.parametrize("dtype", [np.dtype("float32"), BF16], ids=str)
@pytest.mark.parametrize("start", [1, 2, 3, 8])
def test_unaligned_views(dtype, start):
    """Views that begin anywhere in a buffer, as parameters and slices do."""
    whole = put(draw(4000, dtype))
    x, w, b = (whole[start : start + n] for n in (24 * 16, 40 * 16, 40))
    x, w = x.reshape(24, 16), w.reshape(40, 16)
    for activation in (None, "relu", "gelu"):
        z = host(x).astype("f8") @ host(w).astype("f8").T + host(b).astype("f8")
        out, _ = here.kernels.linear(x, w, b, activation)
        close(out, activate(z, activation)[0], dtype, 4)
    into = xp.zeros(2000, np.float32)[start : start + 24 * 24].reshape(24, 24)
    here.kernels.gemm(x, x.T, into, 1.0)
    close(into, host(x).astype("f8") @ host(x).astype("f8").T, np.dtype("float32"), 4)


@on_both
def test_nan_passes_through_an_activation():
    x = draw((64, 64), "float32")
    x[3, 5] = np.nan
    for activation in (None, "relu", "gelu"):
        out, _ = here.kernels.linear(put(x), put(x), put(x[0] * 0), activation)
        assert np.isnan(host(out)[3]).all() and np.isnan(host(out)[:, 3]).all()


# -- on a GPU only ------------------------------------------------------------------------------------------


def test_products_are_captured_and_computed_by_a_timed_plan():
    use("cuda")
    k, cuda = here.kernels, xp.cuda
    try:
        x, w, b = (put(draw(s, BF16)) for s in ((512, 64), (128, 64), (128,)))
        k.plan_book.timed = True
        stream = cuda.Stream(non_blocking=True)
        cuda.get_current_stream().synchronize()
        with stream:
            first = host(k.linear(x, w, b, "gelu")[0])
            assert k.plan_book.missing >= 1
            k.plan_book.measure()
            eager = k.linear(x, w, b, "gelu")[0]
            close(eager, first.astype("f8"), BF16, 2)
            stream.begin_capture()
            out, _ = k.linear(x, w, b, "gelu")
            graph = stream.end_capture()
            out.fill(0)
            graph.launch(stream)
            assert host(out).tobytes() == host(eager).tobytes()
        stream.synchronize()
    finally:
        k.plan_book.timed = False
        k.plan_book.forget_missing()
        leave()


# -- how operands lie, without a GPU ------------------------------------------------------------------------


def read(x, layout, batch):
    """Return what cuBLAS would read of an array's memory by a layout."""
    transposed, down, step = layout
    rows, columns = x.shape[-2:]
    flat = np.lib.stride_tricks.as_strided(x, (10**6,), (x.itemsize,))
    outer, inner = (columns, rows) if transposed else (rows, columns)
    at = (
        np.arange(int(np.prod(batch)))[:, None, None] * step
        + (np.arange(outer) * down)[:, None]
        + np.arange(inner)
    )
    values = flat[at]
    return values.swapaxes(-1, -2) if transposed else values


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.swapaxes(-1, -2),
        lambda x: x[..., 1:3],
        lambda x: x[..., :1],
        lambda x: x[:, :1],
        lambda x: x[:1],
        lambda x: x[..., ::2],
        lambda x: x[..., ::-1],
        lambda x: x[::2],
        lambda x: x.transpose(1, 0, 2),
        lambda x: np.broadcast_to(x[:, :1], x.shape),
    ],
)
def test_layouts_read_what_the_array_holds(view):
    memory = np.zeros(10**6)
    memory[: 2 * 5 * 7] = np.arange(70)
    x = view(memory[:70].reshape(2, 5, 7))
    for batch in ((2,), (3, 2), (5,), (4, 1)):
        if x.shape[0] not in (1, batch[-1]):
            continue
        layout = _laid_out(x.shape, x.strides, 8, batch)
        if layout is None:
            continue
        whole = np.broadcast_to(x, (*batch, *x.shape[-2:])).reshape(-1, *x.shape[-2:])
        assert np.array_equal(read(x, layout, batch), whole)


def test_which_layouts_cannot_be_read():
    x = np.zeros((2, 3, 5, 7))
    for plain, batch in ((x, (2, 3)), (x[0], (3,)), (x[:, :1], (2, 1)), (x[:1, :1], (4, 3)), (x[0, 0], (6,))):
        assert _laid_out(plain.shape, plain.strides, 8, batch) is not None
    for odd, batch in ((x.swapaxes(0, 1), (3, 2)), (x[..., ::2], (2, 3)), (x[:, :1], (2, 3)), (x[0], (2, 3))):
        found = _laid_out(odd.shape, odd.strides, 8, batch)
        assert found is None, (odd.shape, odd.strides)


def test_packs_fit_width_and_addresses():
    class At:
        def __init__(self, address):
            self.data = type("Data", (), {"ptr": address})

    for dtype, width, address, expected in (
        (BF16, 64, 256, 8), (BF16, 60, 256, 4), (BF16, 64, 264, 4), (BF16, 33, 256, 1), (BF16, 64, 258, 1),
        (np.dtype("f4"), 64, 256, 4), (np.dtype("f8"), 64, 256, 2), (np.dtype("f8"), 7, 256, 1),
    ):  # fmt: skip
        assert _packed(dtype, width, At(512), At(address)) == expected


def test_a_capture_without_nvmath_names_the_install_line():
    class Refuses:
        def gemmEx(self, *arguments):
            raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported.")

        gemmStridedBatchedEx = gemmEx

    plain = PlainCublas.__new__(PlainCublas)
    plain._cublas, plain._handle = Refuses(), lambda: 0
    problem = Problem("float32", "float32", False, 2, 3, 4, 0, 4, 0, 0, 3, 0)
    assert plain.plan(problem._replace(epilogue="BIAS")) is None
    for batch in (1, 2):
        with pytest.raises(MissingDependencyError, match=r"product: expected nvmath-python .* pip install"):
            plain.plan(problem._replace(batch=batch)).run(0, 0, 0, False, 0)


MORE = [
    (128, 512, 784),
    (128, 512, 512),
    (10, 512, 128),
    (128, 10, 512),
    (512, 784, 128),
    (1, 1, 1),
    (65, 7, 33),
]


@pytest.mark.parametrize("multiprocessors", [8, 132])
@pytest.mark.parametrize("sizes", [*MORE, (128, 512, 10), (4000, 3, 20), (7, 9, 1023)])
def test_small_products_are_cut_in_slices_that_cover_the_inner_length(sizes, multiprocessors):
    problem = Problem("float32", "float32", False, *sizes, 0, sizes[2], 0, 0, sizes[1], 0)
    assert is_small(problem) == (sizes != (512, 784, 128)) and not is_small(problem._replace(tf32=True))
    (down, across, groups), split, part = shape(*sizes, multiprocessors)
    assert part % 4 == 0 and part * split >= sizes[2] > part * (split - 1)
    assert down % 16 == across % 8 == 0 and 64 // groups % 8 == 0  # what a tensor core takes
    assert (
        4 * max(groups * down * (across + 8), 64 * (down + across + 16)) <= 48 << 10
    )  # bytes of shared memory
    assert down * across % split == 0


@on_both
@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("turned", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("sizes", [*MORE, (33, 17, 129), (64, 64, 3000), (300, 200, 65), (5, 1000, 16)])
def test_products_of_float32(sizes, turned, beta):
    rows, columns, inner = sizes
    for start in (0, 1):  # one of them is not aligned
        a, b = (
            draw((inner, rows) if turned[0] else (rows, inner), "f4"),
            draw((columns, inner) if turned[1] else (inner, columns), "f4"),
        )
        before = draw((rows, columns), "f4") if beta else np.full((rows, columns), np.nan, "f4")
        memory = put(np.concatenate([np.zeros(start, "f4"), a.ravel(), b.ravel(), before.ravel()]))
        left = memory[start : start + a.size].reshape(a.shape)
        right = memory[start + a.size : start + a.size + b.size].reshape(b.shape)
        out = memory[start + a.size + b.size :].reshape(rows, columns)
        left, right = left.T if turned[0] else left, right.T if turned[1] else right
        here.kernels.gemm(left, right, out, beta)
        exact = host(left).astype("f8") @ host(right).astype("f8") + (before if beta else 0)
        close(out, exact, np.dtype("f4"), 4)


def test_keys_tell_problems_apart():
    problem = Problem("float32", "float32", False, 2, 3, 4, 0, 4, 0, 0, 3, 0)
    others = [problem._replace(**{name: 7}) for name in Problem._fields]
    keys = [p.key() for p in (problem, *others)]
    assert len(set(keys)) == len(keys)
    assert all(a == b or a.key() != b.key() for a, b in itertools.product(others, others))
