"""Which transport host arrays get, on how many nodes, and what GPUs that stage get below."""

from types import SimpleNamespace

import pytest

from mpdp.comm import choose as choosing
from mpdp.comm.choose import choose
from mpdp.device import CPU, Device
from mpdp.errors import CommunicationError, DeviceError, on_all_ranks

GPU = Device("cuda", 0)
UNMAPPED = on_all_ranks(CommunicationError("shared memory: expected 4096 bytes of each rank, got none"))


class Mpi:
    """The ranks, of which nobody is asked anything."""

    transport = "mpi"

    def __init__(self, size):
        self.size = size

    def duplicate(self):
        return Mpi(self.size)

    def use_sizes(self):
        """What nothing was tuned for."""


@pytest.fixture
def found(monkeypatch):
    """Return what is chosen, with makers that make nothing."""

    def find(requested, device=CPU, size=4, num_nodes=1, error=None, unordered=None):
        def maker(name):
            def make(mpi, *node, log):
                assert list(node) == ([1] if name == "two_level" else [])
                if error is not None:
                    raise error
                return SimpleNamespace(transport=name, way="memfd")

            return make

        def refuse(host, device):
            raise on_all_ranks(DeviceError("device cuda:0: not here"))

        def stage(inner, device):
            return SimpleNamespace(transport=f"staged({inner.transport})")

        makers = {"cuda_ipc": refuse, "nccl": refuse, "staged": stage}
        monkeypatch.setattr(choosing, "SharedMemoryCommunicator", maker("shared_memory"))
        monkeypatch.setattr(choosing, "TwoLevelCommunicator", maker("two_level"))
        monkeypatch.setattr(choosing, "MAKERS", makers)
        monkeypatch.setattr(choosing, "unordered", lambda: unordered)
        comm, reason = choose(requested, Mpi(size), device, 1, num_nodes, lambda level, message: None)
        return comm.transport, reason

    return find


@pytest.mark.parametrize(
    ("situation", "transport", "reason"),
    [
        ({}, "shared_memory", "all ranks are on one node, by memfd"),
        ({"num_nodes": 2}, "two_level", "the ranks are on 2 nodes, memory by memfd"),
        ({"num_nodes": 3}, "two_level", "the ranks are on 3 nodes, memory by memfd"),
        ({"num_nodes": 4}, "mpi", "the ranks are on 4 nodes, one on each"),
        ({"error": UNMAPPED}, "mpi", f"not shared_memory: {UNMAPPED}"),
        ({"num_nodes": 2, "error": UNMAPPED}, "mpi", f"not two_level: {UNMAPPED}"),
        ({"unordered": "it needs x86-64"}, "mpi", "not shared_memory: it needs x86-64"),
    ],
)
def test_auto_on_cpus_and_below_staging(found, situation, transport, reason):
    assert found("auto", **situation) == (transport, reason)
    for requested in ("auto", "staged"):
        assert found(requested, GPU, **situation)[0] == f"staged({transport})"


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
@pytest.mark.parametrize("requested", ["two_level", "mpi"])
def test_what_is_asked_for_and_works(found, requested, num_nodes):
    transport, reason = found(requested, num_nodes=num_nodes)
    assert transport == requested and reason.startswith("as asked for")
    assert found(requested, GPU, num_nodes=num_nodes)[0] == f"staged({requested})"


@pytest.mark.parametrize(
    ("requested", "situation", "message"),
    [
        ("shared_memory", {"num_nodes": 2}, r"expected shared_memory to work, got: the ranks are on 2 nodes"),
        (
            "shared_memory",
            {"error": UNMAPPED},
            r"expected shared_memory to work, got: shared memory: .* none",
        ),
        (
            "two_level",
            {"num_nodes": 2, "error": UNMAPPED},
            r"expected two_level to work, got: shared memory: ",
        ),
        ("nccl", {}, r"expected auto, shared_memory, two_level or mpi on CPU ranks, got nccl"),
    ],
)
def test_what_is_asked_for_and_cannot_work_is_an_error(found, requested, situation, message):
    with pytest.raises(CommunicationError, match=message) as info:
        found(requested, **situation)
    assert info.value.agreed


@pytest.mark.parametrize("requested", ["auto", "cuda_ipc"])
def test_sizes_that_were_measured_on_gpus_go_to_cuda_ipc(monkeypatch, requested):
    given = []

    def make(host, device, **sizes):
        given.append(sizes)
        return SimpleNamespace(transport="cuda_ipc")

    monkeypatch.setitem(choosing.MAKERS, "cuda_ipc", make)
    sizes = {"small_bytes": 64 << 10, "chunk_bytes": 8 << 20}
    for tuned in ({}, {"cuda_ipc": sizes, "mpi": {"piece_bytes": 1 << 20}}):
        _, reason = choose(requested, Mpi(2), GPU, 0, 1, lambda level, line: None, 1, tuned)
        assert reason.endswith("; tuned: small_bytes 65536, chunk_bytes 8388608") == bool(tuned)
    assert given == [{}, sizes]
