"""Operations of a step, against numbers counted by hand."""

import math

import numpy as np
import pytest

from mpdp.bench import WORKLOADS
from mpdp.bench.flops import products, step_flops
from mpdp.bench.workloads import build
from mpdp.kernels import random


def test_mlp():
    # 802,816 = 2 x 784 x 512 of the first layer, whose input needs no gradient; 786,432 = 3 x 512 x 512; 15,360
    assert step_flops("mlp", 128) == 128 * 2 * (802_816 + 786_432 + 15_360)


def test_convnet():
    one = 2 * (2 * 194_688 + 3 * 10_616_832 + 3 * 1_179_648 + 3 * 1_280)  # products of the four layers
    assert step_flops("convnet", 64) == 64 * one


def test_gpt2():
    weights = (
        12 * 12 * 768**2 + 50_304 * 768
    )  # of all products, a layer's being 3 + 1 + 4 + 4 times 768 x 768
    pairs = 1024 * 1025 // 2
    attention = 3 * 2 * 2 * 64 * pairs * (12 * 12 * 16)  # three passes, two products, two operations
    assert step_flops("gpt2", 16) == 6 * weights * 16 * 1024 + attention == 13_075_860_160_512


def test_resnet50_is_the_one_of_4089184256_multiplications():
    # The figure that torchvision gives for an image of 224 x 224; 118,013,952 are those of the first convolution.
    assert sum(product.forward for product in products("resnet50", 1)) == 2 * 4_089_184_256
    assert step_flops("resnet50", 256) == 256 * 2 * (3 * 4_089_184_256 - 118_013_952)


@pytest.mark.parametrize("name", WORKLOADS)
def test_products_are_those_of_the_models_weights(name, monkeypatch):
    for draw in ("normal", "uniform"):  # their values do not matter, and 124 million take long
        monkeypatch.setattr(random, draw, lambda key, count, *form: np.zeros(count, *form[2:]))
    weights = [p.shape for _, p in build(name, 0, 1).model.named_parameters() if len(p.shape) > 1]
    if name in ("chargpt", "gpt2"):
        weights = [shape for i, shape in enumerate(weights) if i != 1]  # positions are added, not multiplied
    expected = sum(math.prod(shape) for shape in weights)
    counted = sum(p.n * p.k * p.count for p in products(name, 1) if p.name != "attention")
    assert counted == expected
