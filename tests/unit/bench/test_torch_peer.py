"""PyTorch as a peer: what passes the pipe, with a module of our own in torch's place, and what is said without it."""

import sys
from types import SimpleNamespace

import pytest

from mpdp.bench import peer_process
from mpdp.bench.torch_peer import TorchPeer, TorchWay, find_torch
from mpdp.comm.solo import SoloCommunicator
from mpdp.device import CPU
from mpdp.errors import CommunicationError, MissingDependencyError

WORLD = SimpleNamespace(rank=0, size=1, comm=SoloCommunicator(), device=CPU, num_nodes=1)
TORCH = """
import numpy
from numpy import float32
from . import distributed
print("a greeting on stdout")
__version__ = "9.9"
class Tensor(numpy.ndarray):
    def numel(self): return self.size
    def to(self, dtype): return self.astype(dtype)
    def zero_(self): self[...] = 0
    def copy_(self, other): self[...] = other
def zeros(count, dtype, device): return numpy.zeros(count, dtype).view(Tensor)
def zeros_like(tensor): return numpy.zeros_like(tensor)
def arange(count, device): return numpy.arange(count).view(Tensor)
def equal(one, other): return numpy.array_equal(one, other)
"""
DISTRIBUTED = """
import os
class TCPStore:
    port = 1234
    def __init__(self, host, port, is_master, wait_for_workers): pass
def init_process_group(backend, store, rank, world_size): assert backend == "gloo"
def all_reduce(tensor):
    if tensor.size == 3: tensor[1] += 1
    if tensor.size == 5: os._exit(7)
"""


@pytest.fixture
def peer(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)
    (tmp_path / "torch" / "distributed.py").write_text(DISTRIBUTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = TorchPeer(WORLD, sys.executable)
    yield made
    made.close()
    assert made._process.returncode is not None


def test_torch_takes_turns(peer):
    assert (peer.version, peer.backend) == ("9.9", "gloo")
    way = TorchWay(peer)
    assert way.name == "torch gloo"
    for count, right in ((4, True), (3, False)):
        peer.ask("prepare", count=count, dtype="float32")
        way.fill(zeros=True)
        start, end = way.run(2)
        assert 0 < end - start < 60
        assert way.is_right() is right


def test_what_torch_cannot_do_is_an_error_and_it_goes_on(peer):
    with pytest.raises(CommunicationError, match=r"torch: expected an answer of gloo from .*, got Attribute"):
        peer.ask("prepare", count=4, dtype="int3")
    peer.ask("prepare", count=4, dtype="float32")
    assert TorchWay(peer).is_right()


def test_the_end_of_its_process_is_an_error(peer):
    with pytest.raises(CommunicationError, match="got the end of its process; see what it printed"):
        peer.ask("prepare", count=5, dtype="float32")
    assert peer._process.wait(10) == 7


def test_a_python_that_is_not_there_or_has_no_torch(tmp_path, monkeypatch):
    with pytest.raises(
        CommunicationError, match=r"expected a Python at .*missing, got .*--torch-python PATH"
    ):
        TorchPeer(WORLD, str(tmp_path / "missing"))
    (tmp_path / "torch.py").write_text("raise ImportError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(CommunicationError, match="got ImportError: broken"):
        TorchPeer(WORLD, sys.executable)


def test_which_python_has_torch(monkeypatch):
    monkeypatch.setattr(peer_process.importlib.util, "find_spec", lambda name: None)
    assert find_torch(WORLD, "/a/python", True) == "/a/python"
    assert find_torch(WORLD, None, False) is None
    with pytest.raises(MissingDependencyError, match=r"pip install torch, or name a Python .*--torch-python"):
        find_torch(WORLD, None, True)
    monkeypatch.setattr(peer_process.importlib.util, "find_spec", lambda name: object())
    assert find_torch(WORLD, None, False) == sys.executable
