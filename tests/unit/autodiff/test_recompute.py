"""A part that is computed again: same bits, same masks, less memory; and memory that backward gives back as it goes."""

import tracemalloc

import numpy as np
import pytest
from on_device import here, host, only_on_the_cpu, put, xp

import mpdp
from mpdp import autodiff, nn
from mpdp.autodiff import Parameter, SampleContext, Tape, Tensor, checkpoint, ops, recomputing, samples

pytestmark = pytest.mark.usefixtures("device")
RNG = np.random.default_rng(0)


def draw(*shape):
    return put(RNG.standard_normal(shape).astype(np.float32))


class Block(nn.Module):
    def __init__(self, width, p=0.3):
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.down(ops.gelu(self.up(self.norm(x))) * 0.5) * ops.tanh(x))


class Deep(nn.Module):
    """The input of each block is used inside of it twice and after it once more; the last weight is tied."""

    def __init__(self, again, width=8, depth=3, nested=False):
        mpdp.seed(3)
        self.blocks = [Block(width) for _ in range(depth)]
        self.scale = Parameter(np.ones(width, np.float32))
        self.again, self.nested = again, nested
        if again and not nested:
            self.blocks = [nn.checkpoint(block) for block in self.blocks]
        self.bind_names()

    def forward(self, x):
        def tail(x, y):
            for block in self.blocks:
                inner = checkpoint(block.forward) if self.nested else block
                x, y = inner(x) * self.scale, x + y
            return x * y

        if self.nested:
            return checkpoint(tail)(x * 1.0, x) + x
        return tail(x * 1.0, x) + x


def gradients(model, x, context=True):
    """Return output and all gradients as bytes; weights and inputs take part."""
    model.to(here.device)
    leaf = Tensor(x, requires_grad=True)
    if context:
        with samples(SampleContext(seed=1, step=4, start=2, count=len(x))):
            out = model(leaf)
    else:
        out = model(leaf)
    tape = Tape(out)
    tape.backward(put(np.linspace(-1, 1, out.size, dtype=np.float32).reshape(out.shape)))
    found = [host(out).tobytes(), host(leaf.grad).tobytes()]
    return found + [host(p.grad).tobytes() for p in model.parameters()]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("context", [True, False])
def test_gradients_have_the_same_bits(context, nested):
    x = draw(6, 8)
    plain = gradients(Deep(False), x, context)
    assert gradients(Deep(True, nested=nested), x, context) == plain
    assert gradients(Deep(False), x * 2, context) != plain


def test_bound_parameters_and_accumulation_have_the_same_bits():
    """Two micro-batches, with gradients written into arenas of a world."""
    found = []
    for again in (False, True):
        from on_device import world

        model = Deep(again)
        parallel = mpdp.DataParallel(model, world(), seed=5)
        random = np.random.default_rng(1)
        for count in (6, 4):
            x = put(random.standard_normal((count, 8)).astype(np.float32))
            parallel.backward((parallel(x) * 1.0).sum(), final=count == 4)
        found.append(host(parallel.arena.array).tobytes())
    assert found[0] == found[1]


def test_a_user_function_and_what_it_may_return():
    w = Parameter(draw(4))
    x = Tensor(draw(4), requires_grad=True)
    out = checkpoint(lambda a, b, flag: (a * b).exp() if flag else a)(x, w, True)
    out.backward(put(np.ones(4, np.float32)))
    np.testing.assert_allclose(host(x.grad), host(w.data) * np.exp(host(x.data) * host(w.data)), rtol=1e-5)
    computed = x * 2.0
    assert host(checkpoint(lambda a: a)(computed)).tolist() == host(computed).tolist()
    checkpoint(lambda a: a)(computed).sum().backward()
    plain = checkpoint(lambda a: a * 2.0)(Tensor(draw(3)))
    assert not plain.requires_grad
    with mpdp.no_grad():
        assert not checkpoint(lambda a: a * w)(x).requires_grad
    with pytest.raises(TypeError, match=r"checkpoint of .*: expected one tensor, got tuple"):
        checkpoint(lambda a: (a, a))(x)
    with pytest.raises(
        ValueError, match=r"expected to get every computed tensor as an argument, got one from"
    ):
        outside = w * 2.0
        checkpoint(lambda a: a * outside)(x)
    with pytest.raises(
        TypeError, match=r"module: expected an nn.Module, got function; use autodiff.checkpoint"
    ):
        nn.checkpoint(lambda a: a)


def test_the_same_tensor_twice_and_keywords():
    def double(a, b, *, c):
        return a * b + c

    found = []
    for wrap in (checkpoint, lambda f: f):
        x = Tensor(draw_fixed(), requires_grad=True)
        y = x * 3.0
        wrap(double)(y, y, c=y).sum().backward()
        found.append(host(x.grad).tobytes())
    assert found[0] == found[1]


def draw_fixed():
    return put(np.linspace(-1, 2, 5, dtype=np.float32))


def test_a_part_that_changes_is_an_error():
    w, calls = Parameter(draw(3)), []

    def fickle(x):
        calls.append(1)
        return x * w if len(calls) == 1 else (x * w).exp()

    out = checkpoint(fickle)(Tensor(draw(3), requires_grad=True))
    with pytest.raises(
        ValueError, match=r"checkpoint of .*fickle: expected the same operations as in forward"
    ):
        out.sum().backward()


def test_a_module_can_tell_that_it_runs_again():
    seen = []

    def watch(x):
        seen.append(recomputing())
        return x * 2.0

    checkpoint(watch)(Tensor(draw(3), requires_grad=True)).sum().backward()
    assert seen == [False, True] and not recomputing()


def test_the_signature_covers_what_is_inside_but_no_lengths():
    def signature(n, function):
        return Tape(checkpoint(function)(Tensor(draw(n, 2), requires_grad=True) * 1.0).sum())

    first = signature(3, lambda x: x.tanh())
    # the leaf itself has a shape; what stands for computed tensors has none
    assert first.signature != signature(3, lambda x: x.exp()).signature
    assert first.signature == signature(3, lambda x: x.tanh()).signature
    w = Parameter(draw(2), name="w")
    lengths = [Tape(checkpoint(lambda x: x.tanh())(put_rows(n) * w).sum()).signature for n in (3, 5)]
    assert lengths[0] == lengths[1]


def put_rows(n):
    return Tensor(draw(n, 2))


# -- memory -------------------------------------------------------------------------------------------------

WIDTH, ROWS, DEPTH = 64, 512, 12
ACTIVATION = WIDTH * ROWS * 4


class Chain(nn.Module):
    """Layers that each keep one activation of known size: x * x keeps x."""

    def __init__(self, groups, again):
        self.groups = [nn.Sequential(*[self.square] * (DEPTH // groups)) for _ in range(groups)]
        if again:
            self.groups = [nn.checkpoint(group) for group in self.groups]

    @staticmethod
    def square(x):
        return x * x - 0.5

    def forward(self, x):
        for group in self.groups:
            x = group(x)
        return x


def live_bytes():
    if here.device.kind == "cuda":
        return xp.get_default_memory_pool().used_bytes()
    return tracemalloc.get_traced_memory()[0]


@pytest.fixture
def traced(device):
    tracemalloc.start()
    yield
    tracemalloc.stop()


def test_backward_frees_activations_as_it_consumes_them(traced):
    """After each operation of backward, what lives has shrunk by what that operation had saved."""
    x = Tensor(put(np.ones((ROWS, WIDTH), np.float32)), requires_grad=True)
    start = live_bytes()
    tape = Tape(Chain(1, False)(x * 1.0).sum())
    full = live_bytes() - start
    assert DEPTH * ACTIVATION <= full <= (DEPTH + 2) * ACTIVATION
    assert tape.held_bytes() == DEPTH * ACTIVATION
    seen = []
    tape.backward(1.0, {i: lambda: seen.append(live_bytes() - start) for i in range(2 * DEPTH + 2)})
    assert len(seen) == 2 * DEPTH + 2
    # gradient and, at the end, the leaf's own: never a saved array that is used up
    for step in range(DEPTH):
        left = DEPTH - 1 - step  # after the product of this layer
        assert seen[2 + 2 * step] <= (left + 2.1) * ACTIVATION, (step, [s / ACTIVATION for s in seen])


def test_a_checkpointed_chain_holds_its_inputs_and_one_part(traced):
    x = Tensor(put(np.ones((ROWS, WIDTH), np.float32)), requires_grad=True)
    start = live_bytes()
    groups = 4
    tape = Tape(Chain(groups, True)(x * 1.0).sum())
    held = live_bytes() - start
    assert held <= (groups + 1.1) * ACTIVATION
    # inputs of parts, and what one part keeps beside its input
    assert tape.held_bytes() == (groups + DEPTH // groups - 1) * ACTIVATION
    if here.device.kind == "cpu":
        tracemalloc.reset_peak()
        tape.backward(1.0)
        peak = tracemalloc.get_traced_memory()[1] - start
        # inputs, one part's own arrays, a gradient, its product and the leaf's gradient
        assert peak <= (groups + DEPTH // groups + 3.1) * ACTIVATION, peak / ACTIVATION
    else:
        tape.backward(1.0)


def test_held_bytes_count_each_array_once_and_no_parameter():
    only_on_the_cpu("it saves other arrays")
    w = Parameter(np.ones((8, 8), np.float32))
    x = Tensor(np.ones((16, 8), np.float32))
    h = ops.linear(x, w)  # keeps x, and w which is counted elsewhere
    tape = Tape((h * h + h.exp()).sum())  # h once, exp(h)
    assert tape.held_bytes() == 3 * 16 * 8 * 4
    tape.backward(1.0)
    assert tape.held_bytes() == 0


def test_held_bytes_of_an_array_over_memory_of_another_library():
    """Its base has a dtype and no base, as a tensor of PyTorch."""
    only_on_the_cpu("NumPy's bases")

    class Foreign:
        def __init__(self):
            self.kept = np.ones((4, 4), np.float32)
            self.dtype = "foreign.float32"
            self.__array_interface__ = self.kept.__array_interface__

    x = Tensor(np.asarray(Foreign()))
    tape = Tape((x * Parameter(np.ones((4, 4), np.float32))).sum())
    assert tape.held_bytes() == 4 * 4 * 4


def test_autodiff_exports_it():
    assert autodiff.checkpoint is checkpoint
