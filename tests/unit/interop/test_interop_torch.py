"""PyTorch modules over an arena: what a step gives is what PyTorch gives on the whole batch.

Needs PyTorch, but for what is said where there is none.
"""

import sys

import numpy as np
import pytest
from on_device import world

import mpdp
from mpdp.errors import MissingDependencyError
from mpdp.interop.torch import DataParallel


def test_without_torch_the_install_line_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        MissingDependencyError, match=r"PyTorch: expected it .*, found none; .*pip install torch"
    ):
        DataParallel(object())


def test_importing_it_imports_no_torch():
    assert "torch" not in vars(sys.modules["mpdp.interop.torch"])


@pytest.fixture
def torch(device):
    found = pytest.importorskip("torch")
    if device.kind == "cuda" and not found.cuda.is_available():
        pytest.skip("PyTorch without CUDA")
    return found


@pytest.fixture
def build(torch, device):
    """Return a function that makes the same module each time, on the device of the test."""

    def make(*, dtype="float64", bias=True):
        torch.manual_seed(3)
        nn = torch.nn
        layers = nn.Sequential(nn.Linear(6, 8, bias=bias), nn.Tanh(), nn.Linear(8, 3))
        return layers.to(str(device), getattr(torch, dtype))

    return make


def samples(torch, device, count=10):
    random = np.random.default_rng(1)
    x = torch.tensor(random.standard_normal((count, 6)), device=str(device))
    return x, torch.tensor(random.integers(0, 3, count), device=str(device))


def loss_of(torch, module, x, y, reduction="sum"):
    return torch.nn.functional.cross_entropy(module(x), y, reduction=reduction)


def test_gradients_are_means_and_never_move(torch, device, build):
    parallel, plain = DataParallel(build(), world()), build()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (parallel.module, plain)]
    addresses = [p.grad.data_ptr() for p in parallel.module.parameters()]
    x, y = samples(torch, device)
    for step in range(6):
        if step % 2:  # whoever is used to it may call it
            optimizers[0].zero_grad()
        for part, final in ((slice(0, 7), False), (slice(7, 10), True)):
            parallel.backward(loss_of(torch, parallel.module, x[part], y[part]), len(y[part]), final)
        assert parallel.finish() == 10
        optimizers[1].zero_grad()
        loss_of(torch, plain, x, y, "mean").backward()
        for ours, theirs in zip(parallel.module.parameters(), plain.parameters()):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)
        for optimizer in optimizers:
            optimizer.step()
    assert addresses == [p.grad.data_ptr() for p in parallel.module.parameters()]
    for name, parameter in parallel.module.named_parameters():
        assert parameter.grad.data_ptr() == pointer(parallel.arena[name])


def pointer(array):
    return array.data.ptr if hasattr(array.data, "ptr") else array.ctypes.data


def test_chunks_start_while_backward_runs(torch, device, build):
    parallel = DataParallel(build(), world(), chunk_bytes=1024)
    started = []
    flush = parallel.reducer.flush
    parallel.reducer.flush = lambda upto: (started.append(upto), flush(upto))
    x, y = samples(torch, device)
    parallel.backward(loss_of(torch, parallel.module, x, y), 10)
    assert started[-1] == len(parallel.reducer.chunks)  # before finish()
    parallel.finish()


def test_tied_unused_scalar_and_empty_parameters(torch, device):
    nn = torch.nn

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 6, bias=False)
            self.second = nn.Linear(6, 6, bias=False)
            self.second.weight = self.first.weight
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.nothing = nn.Parameter(torch.zeros(0, 3))
            self.unused = nn.Parameter(torch.ones(4))
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

        def forward(self, x):
            return self.scale * self.second(self.first(x)) + self.nothing.sum()

    torch.manual_seed(0)
    module, plain = Odd().to(str(device), torch.float64), Odd().to(str(device), torch.float64)
    plain.load_state_dict(module.state_dict())
    parallel = DataParallel(module, world())
    x, _ = samples(torch, device)
    parallel.backward((module(x) ** 2).sum(), 10)
    parallel.finish()
    (plain(x) ** 2).sum().div(10).backward()
    for name in ("first.weight", "scale", "nothing"):
        ours, theirs = dict(module.named_parameters())[name], dict(plain.named_parameters())[name]
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=0)
    assert (module.unused.grad == 0).all() and module.frozen.grad is None
    assert module.second.weight.grad is module.first.weight.grad


def test_a_rank_without_samples(torch, device, build):
    parallel = DataParallel(build(), world())
    x, y = samples(torch, device)
    parallel.backward(loss_of(torch, parallel.module, x, y), 10, final=False)
    parallel.backward(None, 0)
    assert parallel.finish() == 10
    parallel.backward(None, 0)
    with pytest.raises(ValueError, match="count: expected a global count above 0, got 0"):
        parallel.finish()


def test_what_is_wrong_with_a_module(torch, device, build):
    with pytest.raises(TypeError, match=r"module: expected a torch.nn.Module, got Linear"):
        DataParallel(mpdp.nn.Linear(2, 2), world())
    frozen = build()
    for parameter in frozen.parameters():
        parameter.requires_grad = False
    with pytest.raises(ValueError, match="module: expected a parameter that requires a gradient, got none"):
        DataParallel(frozen, world())
    mixed = build()
    mixed[2].float()
    with pytest.raises(ValueError, match=r"one dtype of float16, .*, got 2.weight of float32 beside float64"):
        DataParallel(mixed, world())
    with pytest.raises(ValueError, match=r"one dtype of .*, got 0.weight of bfloat16 beside bfloat16"):
        DataParallel(build(dtype="bfloat16"), world())
    with pytest.raises(ValueError, match=r"module: expected it on \S+, got 0.weight on meta; call module.to"):
        DataParallel(build().to("meta"), world())


def test_what_is_wrong_with_a_step(torch, device, build):
    parallel = DataParallel(build(), world())
    x, y = samples(torch, device)
    with pytest.raises(
        ValueError, match=r'loss: expected a scalar .*, got shape \(10,\); .* reduction="sum"'
    ):
        parallel.backward(loss_of(torch, parallel.module, x, y, "none"), 10)
    with pytest.raises(ValueError, match="count: expected a number of samples of 0 or more, got -1"):
        parallel.backward(loss_of(torch, parallel.module, x, y), -1)
    moved = r"module: expected the gradient of 0.weight to stay the view it was given, got another tensor"
    weight = parallel.module[0].weight
    kept, weight.grad = weight.grad, torch.zeros_like(weight)
    with pytest.raises(ValueError, match=moved):
        parallel.backward(loss_of(torch, parallel.module, x, y), 10)
    weight.grad = kept
    parallel.backward(loss_of(torch, parallel.module, x, y), 10, final=False)
    weight.grad = None  # between micro-batches
    with pytest.raises(ValueError, match=moved):
        parallel.backward(loss_of(torch, parallel.module, x, y), 10)


def test_an_error_inside_of_backward_leaves_it_usable(torch, device, build):
    parallel, plain = DataParallel(build(), world()), build()
    x, y = samples(torch, device)

    def fail(gradient):
        raise RuntimeError("a bad hook")

    output = parallel.module[:2](x)
    output.register_hook(fail)
    with pytest.raises(RuntimeError, match="a bad hook"):
        parallel.backward(
            torch.nn.functional.cross_entropy(parallel.module[2](output), y, reduction="sum"), 10
        )
    parallel.backward(loss_of(torch, parallel.module, x, y), 10)
    assert parallel.finish() == 10
    loss_of(torch, plain, x, y, "mean").backward()
    for ours, theirs in zip(parallel.module.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def test_arrays_over_memory_of_torch_train(torch):
    """The batch's base is then a tensor, which has a dtype too."""
    x, y = torch.ones(4, 2), torch.zeros(4, dtype=torch.int64)
    trainer = mpdp.Trainer(mpdp.nn.Linear(2, 2), mpdp.nn.cross_entropy, mpdp.optim.SGD(lr=0.1))
    assert float(trainer.step((x.numpy(), y.numpy()))) > 0
    assert trainer.memory()["activations"] > 0
