"""The benchmark's arguments and the object it writes."""

import json
import math

import numpy as np
import pytest
import traces

from mpdp import bench
from mpdp.bench.workloads import build
from mpdp.kernels import random


def test_the_mlp_is_the_one_of_the_comparisons():
    workload = build("mlp", 0)
    shapes = {name: p.shape for name, p in workload.model.named_parameters()}
    assert list(shapes.values()) == [(512, 784), (512,), (512, 512), (512,), (10, 512), (10,)]
    assert workload.batch[0].shape == (128, 784)
    assert workload.batch[0].dtype == "float32"
    assert workload.items == 128
    assert (workload.optimizer.lr, workload.optimizer.describe()["momentum"]) == (0.01, 0.9)
    with pytest.raises(
        ValueError, match=r"workload: expected one of mlp, convnet, chargpt, gpt2, resnet50, got 'x'"
    ):
        build("x", 0)


def test_the_convnet_is_the_one_of_the_comparisons():
    workload = build("convnet", 0)
    assert sum(p.size for p in workload.model.parameters()) == 320 + 18_496 + 1_179_776 + 1_290
    assert workload.batch[0].shape == (64, 1, 28, 28) and workload.batch[0].dtype == "float32"
    assert (workload.items, workload.unit) == (64, "samples")
    assert (workload.optimizer.lr, workload.optimizer.describe()["momentum"]) == (0.01, 0.9)
    other = build("convnet", 1, 2).batch
    assert other[0].shape == (2, 1, 28, 28) and not np.array_equal(other[0], workload.batch[0][:2])


def test_the_chargpt_is_the_one_of_the_comparisons():
    workload = build("chargpt", 0, 1)
    shapes = {name: p.shape for name, p in workload.model.named_parameters()}
    assert shapes["tokens.weight"] == (128, 384)
    assert shapes["positions.weight"] == (256, 384)
    assert shapes["blocks.5.up.weight"] == (1536, 384)
    assert sum(math.prod(s) for s in shapes.values()) == 10_795_008
    assert workload.batch[0].shape == (1, 256)
    assert (workload.items, workload.unit) == (256, "tokens")
    assert build("chargpt", 0).items == 4 * 256
    assert workload.optimizer.describe()["weight_decay"] == 0.01


def test_gpt2_and_resnet50_are_those_of_the_comparisons(monkeypatch):
    for draw in ("normal", "uniform"):  # their values do not matter, and 124 million take long
        monkeypatch.setattr(random, draw, lambda key, count, *form: np.zeros(count, *form[2:]))
    gpt2 = build("gpt2", 0, 2)
    assert gpt2.batch[0].shape == gpt2.batch[1].shape == (2, 1024) and gpt2.items == 2 * 1024
    assert sum(p.size for p in gpt2.model.parameters()) == 124_475_904
    assert 50_000 < gpt2.batch[0].max() < 50_304
    resnet = build("resnet50", 0, 2)
    assert sum(p.size for p in resnet.model.parameters()) == 25_557_032
    assert resnet.batch[0].shape == (2, 3, 224, 224)
    assert (resnet.items, resnet.unit, resnet.optimizer.describe()["momentum"]) == (2, "images", 0.9)
    for global_stats in (False, True):
        model = build("resnet50", 0, 1, global_stats=global_stats).model
        norms = [m for _, m in model.named_modules() if hasattr(m, "global_stats")]
        assert len(norms) == 53 and all(m.global_stats is global_stats for m in norms)


def test_one_json_object(tmp_path, capsys):
    path = tmp_path / "result.json"
    trace = tmp_path / "trace.json"
    words = ["train", "mlp", "--quick", "--seconds", "0.05", "--batch", "4"]
    words += ["--json", str(path), "--trace", str(trace)]
    assert bench.main(words) == 0
    traces.load(trace, 1)
    result = json.loads(path.read_text())
    assert result.keys() >= {
        "workload",
        "device",
        "ranks",
        "step_us",
        "items_per_second",
        "unit",
        "blas_threads",
        "communication_us",
        "exposed_communication_us",
    }
    assert result["ranks"] == 1
    assert result["batch_per_rank"] == 4
    assert result["items_per_second"] == pytest.approx(4 * result["ranks"] / result["step_us"] * 1e6)
    assert capsys.readouterr().out.startswith("mlp on 1 x cpu: ")
    assert bench.main([*words[:7], "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["workload"] == "mlp"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["train"],
        ["train", "x"],
        ["train", "mlp", "--batch", "0"],
        ["train", "mlp", "--device", "gpu"],
        ["x"],
    ],
)
def test_usage_errors_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize("flag", ["--json", "--trace"])
def test_a_file_that_cannot_be_written_is_found_before_anything_is_measured(
    tmp_path, monkeypatch, capsys, flag
):
    monkeypatch.setattr("mpdp.bench.train.measure", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(SystemExit) as caught:
        bench.main(["train", "mlp", flag, str(tmp_path / "nowhere" / "x.json")])
    assert caught.value.code == 2 and "nowhere" in capsys.readouterr().err
