"""The models: names and numbers of parameters, a forward and backward pass, sizes that do not fit."""

import math

import numpy as np
import pytest
from on_device import here, host, put

import mpdp
from mpdp import nn
from mpdp.nn import models
from mpdp.nn.models import resnet, transformer

pytestmark = pytest.mark.usefixtures("device")
random = np.random.default_rng(6)


def shapes(model):
    return {name: p.shape for name, p in model.named_parameters()}


def count(model):
    return sum(math.prod(shape) for shape in shapes(model).values())


def test_mlp():
    assert list(shapes(models.mlp()).values()) == [(512, 784), (512,), (512, 512), (512,), (10, 512), (10,)]
    assert list(shapes(models.mlp((3, 2)))) == ["0.weight", "0.bias"]
    with pytest.raises(ValueError, match=r"sizes: expected two numbers of features or more, got \(3,\)"):
        models.mlp([3])


def test_convnet():
    model = models.convnet(dtype="float64").to(here.device)
    assert shapes(model) == {
        "conv1.weight": (32, 1, 3, 3),
        "conv1.bias": (32,),
        "conv2.weight": (64, 32, 3, 3),
        "conv2.bias": (64,),
        "linear1.weight": (128, 9216),
        "linear1.bias": (128,),
        "linear2.weight": (10, 128),
        "linear2.bias": (10,),
    }
    x = put(random.standard_normal((2, 1, 28, 28)))
    spelled = nn.MaxPool2d(2)(model.conv2(model.conv1(x).relu()).relu())
    expected = model.linear2(model.linear1(model.flatten(spelled)).relu())
    np.testing.assert_allclose(host(model(x)), host(expected), rtol=0, atol=1e-12)
    assert model(x[:0]).shape == (0, 10)
    assert models.convnet(3, 2, 6)(np.zeros((1, 2, 6, 6), "float32")).shape == (1, 3)
    with pytest.raises(ValueError, match=r"size: expected images of 6 pixels or more, got 5"):
        models.convnet(size=5)


def test_the_names_of_resnets_are_torchvisions(monkeypatch):
    monkeypatch.setattr(resnet, "_by_outputs", nn.init.zeros)  # random numbers for all would take seconds
    model = models.resnet50()
    names = list(shapes(model))
    assert names[:5] == [
        "conv1.weight",
        "bn1.weight",
        "bn1.bias",
        "layer1.0.conv1.weight",
        "layer1.0.bn1.weight",
    ]
    assert names[-2:] == ["fc.weight", "fc.bias"] and len(names) == 161
    assert shapes(model)["layer3.0.downsample.0.weight"] == (1024, 512, 1, 1)
    assert model.layer2[0].conv2.stride == (2, 2) and model.layer2[0].conv1.stride == (1, 1)
    assert {name.split(".")[-1] for name, _ in model.named_buffers()} == {"running_mean", "running_var"}
    assert count(model) == 25_557_032
    assert count(models.resnet18()) == 11_689_512
    assert count(models.resnet18(10, channels=1)) == 11_689_512 - 64 * 2 * 49 - 990 * 513
    assert [m.communicates for m in (models.resnet18().bn1, models.resnet18(global_stats=False).bn1)] == [
        True,
        False,
    ]


@pytest.mark.parametrize("block", [resnet.BasicBlock, resnet.Bottleneck])
def test_gradients_of_resnets(block):
    mpdp.seed(0)
    model = models.ResNet(block, (1, 1, 1, 1), 4, dtype="float64").to(here.device)
    x = put(np.random.default_rng(0).standard_normal((4, 3, 33, 40)))
    y = put(np.array([0, 3, 1, 2]))
    nn.cross_entropy(model(x), y).backward()
    gradients = [host(p.grad) for p in model.parameters()]
    length = math.sqrt(sum((g * g).sum() for g in gradients))
    starts = [p.data.copy() for p in model.parameters()]
    eps, values = 1e-8, []  # small: many ReLUs are near their kink
    for sign in (1, -1):
        for p, start, g in zip(model.parameters(), starts, gradients):
            p.data = start + put(sign * eps / length * g)
        values.append(float(nn.cross_entropy(model(x), y)))
    assert (values[0] - values[1]) / (2 * eps) == pytest.approx(length, rel=1e-6)


def test_gpts(monkeypatch):
    monkeypatch.setattr(transformer, "_NORMAL", nn.init.zeros)  # as above

    def formula(layers, width, context, vocabulary):
        block = 4 * width + 12 * width * width + 9 * width  # norms, four products, their biases
        return (vocabulary + context) * width + layers * block + 2 * width

    assert count(models.gpt("chargpt")) == formula(6, 384, 256, 128) == 10_795_008
    names = list(shapes(models.gpt("chargpt", layers=1)))
    assert names == [
        "tokens.weight",
        "positions.weight",
        "blocks.0.norm1.weight",
        "blocks.0.norm1.bias",
        "blocks.0.attention.qkv.weight",
        "blocks.0.attention.qkv.bias",
        "blocks.0.attention.projection.weight",
        "blocks.0.attention.projection.bias",
        "blocks.0.norm2.weight",
        "blocks.0.norm2.bias",
        "blocks.0.up.weight",
        "blocks.0.up.bias",
        "blocks.0.down.weight",
        "blocks.0.down.bias",
        "norm.weight",
        "norm.bias",
    ]
    assert transformer.PRESETS["gpt2"] == {
        "layers": 12,
        "width": 768,
        "heads": 12,
        "context": 1024,
        "vocabulary": 50304,
    }
    assert count(models.gpt("gpt2", layers=1)) == formula(1, 768, 1024, 50304)
    assert formula(12, 768, 1024, 50304) == 124_475_904
    with pytest.raises(ValueError, match=r"preset: expected one of chargpt, gpt2, got 'gpt3'"):
        models.gpt("gpt3")
    with pytest.raises(ValueError, match=r"sizes: expected some of layers, .*, got 'depth'"):
        models.gpt("gpt2", depth=3)


def test_dropout_in_a_gpt():
    model = models.gpt("chargpt", layers=1, width=8, heads=2, context=4, vocabulary=5, dropout=0.5)
    assert sum(module.draws_samples for _, module in model.named_modules()) == 4
    assert not any(module.draws_samples for _, module in models.gpt("chargpt", layers=1).named_modules())
