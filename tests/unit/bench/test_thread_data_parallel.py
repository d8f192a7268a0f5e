"""The baseline that torch.nn.DataParallel is: exact, for any batch, with what it loses."""

import warnings

import numpy as np
import pytest

import mpdp
from mpdp import autodiff, nn
from mpdp.bench.thread_data_parallel import DataParallel, check_balance, scatter
from mpdp.device import Device
from mpdp.device_memory import DeviceInfo


def build():
    mpdp.seed(4)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def batch(count):
    random = np.random.default_rng(count)
    return random.standard_normal((count, 6)).astype(np.float32), random.integers(0, 3, count)


def gradients(module):
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 16])
def test_it_computes_what_one_device_computes(replicas, count):
    x, y = batch(count)
    alone, parallel = build(), DataParallel(build(), ["cpu"] * replicas)
    nn.cross_entropy(alone(x), y).backward()
    for times in (1, 2):  # a second pass adds
        output = parallel(x)
        assert output.shape == (count, 3)
        parallel.backward(nn.cross_entropy(output, y))
        for own, expected in zip(gradients(parallel.module), gradients(alone)):
            np.testing.assert_allclose(own, times * expected, rtol=1e-5, atol=1e-6)


def test_an_update_of_the_original_is_seen_by_all_replicas():
    x, y = batch(8)
    parallel, alone = DataParallel(build(), ["cpu"] * 3), build()
    for module, call, back in (
        (parallel.module, parallel, parallel.backward),
        (alone, alone, lambda loss: loss.backward()),
    ):
        for _ in range(5):
            back(nn.cross_entropy(call(x), y))
            for parameter in module.parameters():
                parameter.data -= 0.1 * parameter.grad
                parameter.grad = None
    np.testing.assert_allclose(parallel(x).numpy(), alone(x).numpy(), rtol=1e-4, atol=1e-5)


class Nested(nn.Module):
    def __init__(self):
        self.linear = nn.Linear(6, 2)
        self.steps = autodiff.Buffer(np.zeros(1))

    def forward(self, pair, scale=1.0, extra=None):
        self.steps.data += 1
        hidden = self.linear(pair[0]) * scale
        return {"sum": hidden + extra["bias"], "both": (hidden.sum(), [hidden * 2]), "note": "as it is"}


def test_nested_inputs_and_outputs_are_cut_and_gathered():
    mpdp.seed(0)
    module = Nested()
    x, _ = batch(5)
    bias = np.arange(10, dtype=np.float32).reshape(5, 2)
    parallel = DataParallel(module, ["cpu", "cpu"])
    made = parallel((x, "shared"), scale=2.0, extra={"bias": autodiff.Tensor(bias)})
    hidden = 2.0 * (x @ module.linear.weight.numpy().T + module.linear.bias.numpy())
    np.testing.assert_allclose(made["sum"].numpy(), hidden + bias, rtol=1e-5)
    np.testing.assert_allclose(made["both"][0].numpy(), [hidden[:3].sum(), hidden[3:].sum()], rtol=1e-4)
    np.testing.assert_allclose(made["both"][1][0].numpy(), 2 * hidden, rtol=1e-5)
    assert made["note"] == "as it is"
    parallel.backward(made["both"][0].sum() + made["both"][1][0].sum())
    np.testing.assert_allclose(module.linear.bias.grad, [3 * 2 * 5.0] * 2, rtol=1e-5)
    assert module.steps.numpy()[0] == 1  # the first replica's buffers stay, the other's are lost


def test_scatter_cuts_as_chunk_does():
    assert [len(part) for part in scatter(np.zeros(7), 4, 0)] == [2, 2, 2, 1]
    assert [len(part) for part in scatter(np.zeros(5), 4, 0)] == [2, 2, 1]
    assert [len(part) for part in scatter(np.zeros(0), 4, 0)] == [0]
    assert [part.shape for part in scatter(np.zeros((2, 6)), 3, 1)] == [(2, 2)] * 3


def test_recording_follows_the_caller():
    parallel = DataParallel(build(), ["cpu", "cpu"])
    with mpdp.no_grad():
        assert not parallel(batch(4)[0]).requires_grad
    assert parallel(batch(4)[0]).requires_grad


def test_an_error_of_a_replica_names_it():
    with pytest.raises(ValueError, match="linear") as raised:
        DataParallel(nn.Linear(5, 1), ["cpu", "cpu"])(batch(4)[0])
    assert raised.value.__notes__ == ["in replica 0 on cpu"]


def test_a_stray_parameter_is_refused():
    with pytest.raises(
        ValueError, match=r"expected all parameters and buffers on cuda:0, the first device, got 0.weight"
    ):
        DataParallel(build(), ["cuda:0", "cuda:1"])(batch(4)[0])
    with pytest.raises(ValueError, match="dim: expected an axis of 0 or more, got -1"):
        DataParallel(build(), ["cpu"], dim=-1)


def test_a_small_device_is_warned_about():
    def info(ordinal, total):
        return DeviceInfo(Device("cuda", ordinal), "a GPU", "", total, total)

    with pytest.warns(
        UserWarning,
        match=r"cuda:1: expected memory of at least 75% of the largest device's 100 bytes, got 74",
    ):
        check_balance([info(0, 100), info(1, 74)])
    with pytest.warns(
        UserWarning,
        match=r"cuda:0: expected multiprocessors of at least 75% of the largest device's 132 in number, got 98",
    ):
        check_balance([info(0, 100), info(1, 100)], [98, 132])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_balance([info(0, 100), info(1, 75)], [99, 132])
        check_balance([])


def test_without_devices_the_module_is_called(monkeypatch):
    monkeypatch.setattr("mpdp.bench.thread_data_parallel.visible", list)
    x, y = batch(4)
    parallel = DataParallel(build())
    parallel.backward(nn.cross_entropy(parallel(x), y))
    assert all(g is not None for g in gradients(parallel.module))


def test_on_a_gpu_it_computes_what_the_cpu_computes(gpu):
    x, y = batch(7)
    alone, parallel = build(), DataParallel(build().to("cuda:0"), ["cuda:0"] * 3)
    nn.cross_entropy(alone(x), y).backward()
    parallel.backward(
        nn.cross_entropy(parallel(x), parallel.module.parameters().__next__().device.xp.asarray(y))
    )
    for own, expected in zip(gradients(parallel.module), gradients(alone)):
        np.testing.assert_allclose(own.get(), expected, rtol=1e-3, atol=1e-4)
