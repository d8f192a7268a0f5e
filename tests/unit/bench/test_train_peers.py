"""``mpdp bench train`` with a peer of our own in torch's place: turns, ratios, losses, and what is said without it."""

import json
import shutil
import sys

import numpy as np
import pytest

from mpdp import bench
from mpdp.bench import losses, peer_process
from mpdp.bench.workloads import build
from mpdp.errors import CommunicationError, MissingDependencyError
from mpdp.kernels import random

# It does what a peer does, and its steps take a second each by its own word.
PEER = """
import sys
from conversation import Conversation
FACTOR = {factor}
class Work:
    def imports(self): return 0
    def join(self, host, port): return "9.9"
    def prepare(self):
        if "--clip-norm" in sys.argv: raise RuntimeError("no clipping here")
        return dict(peak_bytes=123, parameters=1)
    def block(self, warm_up, steps): return dict(seconds=1.0)
    def losses(self, count, path):
        import numpy
        from mpdp import Trainer
        from mpdp.bench.workloads import build
        work = build("mlp", 0, 4)
        x, y = work.batch
        arrays = {{name: p.data.copy() for name, p in work.model.named_parameters()}}
        arrays["4.bias"] += 0.25
        for name, p in work.model.named_parameters(): p.data = arrays[name].copy()
        trainer = Trainer(work.model, work.loss, work.optimizer)
        found = [trainer.step((x, y)) * FACTOR for _ in range(count)]
        numpy.savez(path, x=x, y=y, losses=numpy.array(found), **arrays)
        return dict(losses=found)
conversation = Conversation()
work = Work()
if conversation.begin(work.imports, work.join): conversation.serve(work)
"""


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """Return a function that puts a peer in torch's place."""
    folder = tmp_path / "peers"
    folder.mkdir()
    shutil.copy(peer_process.PEERS / "conversation.py", folder)
    monkeypatch.setattr(peer_process, "PEERS", folder)

    def make(factor=1.0):
        (folder / "torch_train.py").write_text(PEER.format(factor=factor))
        return ["--peers", "torch", "--peer-python", sys.executable]

    return make


QUICK = ["train", "mlp", "--batch", "4", "--blocks", "3", "--seconds", "0.02"]


def test_a_table_with_ratios(peers, tmp_path, capsys):
    path = tmp_path / "result.json"
    assert bench.main([*QUICK, *peers(), "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    ours, theirs = result["sides"]
    assert (ours["name"], theirs["name"], theirs["version"]) == ("mpdp", "torch", "torch-9.9")
    assert theirs["block_step_us"] == [1e6] * 3 and len(ours["block_step_us"]) == 3
    assert ours["ratio"] == 1.0
    assert theirs["ratio"] == pytest.approx(sorted(1e6 / us for us in ours["block_step_us"])[1])
    assert theirs["peak_bytes"] == 123
    assert theirs["items_per_second"] == pytest.approx(4.0)
    assert theirs["flops_per_second"] == pytest.approx(result["flops"]) == 4 * 2 * 1_604_608
    ceiling = result["ceiling_flops_per_second"]
    assert ours["utilisation"] == pytest.approx(result["flops"] / ours["step_us"] * 1e6 / ceiling)
    assert set(ours["breakdown_us"]) >= {"products", "loss", "optimizer", "rest"}
    assert 0 < ours["breakdown_us"]["products"] < 20 * ours["step_us"]
    assert (result["communication_us"], result["communication_cost_us"], result["captures"]) == (0.0, 0.0, 0)
    out = capsys.readouterr().out.splitlines()
    assert out[2].split()[:2] == ["system", "step"]
    assert [line.split()[0] for line in out[3:5]] == ["mpdp", "torch"]
    assert "1,000,000.0" in out[4]


def test_what_a_peer_cannot_do_is_an_error(peers):
    with pytest.raises(
        CommunicationError, match=r"got RuntimeError: no clipping here.*leave torch out of --peers"
    ):
        bench.main([*QUICK, *peers(), "--clip", "both"])


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (1.01, 1)])
def test_losses_from_the_peers_weights(peers, tmp_path, factor, status, capsys):
    path, weights = tmp_path / "result.json", tmp_path / "weights.npz"
    words = ["train", "mlp", "--losses", "5", "--weights", str(weights), "--json", str(path)]
    assert bench.main([*words, *peers(factor)]) == status
    result = json.loads(path.read_text())
    assert len(result["losses"]) == result["updates"] == 5
    assert result["largest_relative_difference"] == pytest.approx(1 - 1 / factor, abs=1e-12)
    assert ("within" in capsys.readouterr().out) == (status == 0)
    assert bench.main([*words]) == status  # again, from the file
    with pytest.raises(ValueError, match=r"weights: expected 6 losses or more in .*, got 5"):
        bench.main(["train", "mlp", "--losses", "6", "--weights", str(weights)])


def test_weights_of_another_model_are_an_error():
    model = build("mlp", 0, 1).model
    arrays = {name: p.data for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"weights: expected shape \(10,\) for 4.bias, got \(9,\)"):
        losses.take_up(model, "mlp", arrays | {"4.bias": arrays["4.bias"][:9]})
    with pytest.raises(
        ValueError, match=r"weights: expected the parameters of convnet, got differences in 4\.bias"
    ):
        losses.take_up(build("convnet", 0, 1).model, "convnet", arrays)


def test_names_of_the_peers_gpt_are_all_of_ours(monkeypatch):
    monkeypatch.setattr(random, "normal", lambda key, count, *form: np.zeros(count, *form[2:]))
    theirs = ["tok.weight", "pos.weight", "norm.weight", "norm.bias"]
    for i in range(6):
        for layer in ("norm1", "qkv", "proj", "norm2", "up", "down"):
            theirs += [f"blocks.{i}.{layer}.weight", f"blocks.{i}.{layer}.bias"]
    ours = [name for name, _ in build("chargpt", 0, 1).model.named_parameters()]
    assert sorted(losses.our_name("chargpt", name) for name in theirs) == sorted(ours)


def test_a_module_that_is_missing_is_an_error(monkeypatch):
    monkeypatch.setattr(peer_process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"jax: expected JAX on every rank.*--peer-python PATH"):
        bench.main([*QUICK, "--peers", "jax"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--peers", "tensorflow"], "expected some of torch,torch-compile"),
        (["--peers", "torch-graph"], "a CUDA graph needs --device cuda"),
        (["--blocks", "0"], "--blocks: expected 1 or more, got 0"),
        (["--seconds", "0"], "--seconds: expected more than 0"),
        (["--losses", "3"], "--losses, --weights: expected both or none"),
        (["--weights", "x.npz"], "--losses, --weights: expected both or none"),
        (["--losses", "-1", "--weights", "x.npz"], "--losses: expected 1 or more, got -1"),
        (["--precision", "float16", "--peers", "jax"], "expected jax for mlp only, and not in float16"),
        (["--precision", "int8"], "invalid choice"),
        (["--clip", "theirs"], "invalid choice"),
    ],
)
def test_usage_errors(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main(["train", "mlp", *words])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_graph_that_is_asked_for_on_the_cpu_is_an_error():
    with pytest.raises(ValueError, match="graph: expected"):
        bench.main([*QUICK, "--graph"])
