"""Which transport GPUs get, and what is said when one that was asked for cannot work."""

from types import SimpleNamespace

import pytest

from mpdp.comm.choose_gpu import choose_for_gpus, host_of
from mpdp.comm.solo import SoloCommunicator
from mpdp.device import Device
from mpdp.errors import CommunicationError, DeviceError, on_all_ranks

GPU = Device("cuda", 0)
UNMAPPED = on_all_ranks(DeviceError("device cuda:0: no peer access"))
NO_NCCL = on_all_ranks(CommunicationError("nccl: expected NCCL's library, found none"))
SHARED = on_all_ranks(
    CommunicationError("nccl: expected a GPU of its own for each rank, got ranks 0, 1 on GPU 5")
)

TWO_NODES = "not cuda_ipc: the ranks are on 2 nodes, and memory is mapped inside one"


def choose(requested, num_nodes=1, ranks_per_device=1, cuda_ipc=None, nccl=None):
    def maker(name, error):
        def make(host, device):
            if error is not None:
                raise error
            return SimpleNamespace(transport=name, host=host)

        return make

    def name_shared(host, device):
        raise SHARED

    makers = {
        "cuda_ipc": maker("cuda_ipc", cuda_ipc),
        "nccl": maker("nccl", nccl),
        "staged": maker("staged", None),
    }
    comm, reason = choose_for_gpus(
        requested,
        SoloCommunicator(),
        GPU,
        num_nodes,
        ranks_per_device,
        makers=makers,
        name_shared=name_shared,
    )
    return comm.transport, reason


@pytest.mark.parametrize(
    ("situation", "transport", "reason"),
    [
        ({}, "cuda_ipc", "all ranks are on one node and have each other's GPU memory mapped"),
        (
            {"ranks_per_device": 4},
            "cuda_ipc",
            "all ranks are on one node and have each other's GPU memory mapped",
        ),
        (
            {"cuda_ipc": UNMAPPED},
            "nccl",
            "no two ranks share a GPU; not cuda_ipc: device cuda:0: no peer access",
        ),
        (
            {"num_nodes": 2},
            "nccl",
            f"no two ranks share a GPU; {TWO_NODES}",
        ),
        (
            {"num_nodes": 2, "ranks_per_device": 2},
            "staged",
            f"GPU arrays travel through host memory; {TWO_NODES}; not {SHARED}",
        ),
        (
            {"num_nodes": 2, "nccl": NO_NCCL},
            "staged",
            f"GPU arrays travel through host memory; {TWO_NODES}; not nccl: expected NCCL's library, found none",
        ),
    ],
)
def test_auto(situation, transport, reason):
    assert choose("auto", **situation) == (transport, reason)


@pytest.mark.parametrize("requested", ["cuda_ipc", "nccl", "staged"])
def test_what_is_asked_for_and_works(requested):
    assert choose(requested) == (requested, "as asked for")


@pytest.mark.parametrize(
    ("requested", "situation", "message"),
    [
        (
            "cuda_ipc",
            {"cuda_ipc": UNMAPPED},
            r"expected cuda_ipc to work, got: .* no peer access",
        ),
        ("cuda_ipc", {"num_nodes": 3}, r"expected cuda_ipc to work, got: the ranks are on 3 nodes"),
        (
            "nccl",
            {"ranks_per_device": 2},
            r"expected nccl to work, got: expected a GPU .* got ranks 0, 1 on GPU 5",
        ),
        ("nccl", {"nccl": NO_NCCL}, r"expected nccl to work, got: expected NCCL's library, found none"),
    ],
)
def test_what_is_asked_for_and_cannot_work_is_an_error(requested, situation, message):
    with pytest.raises(CommunicationError, match=message) as info:
        choose(requested, **situation)
    assert info.value.agreed


def test_an_error_of_one_rank_alone_is_no_reason_to_choose_another():
    class Two(SoloCommunicator):
        size = 2

        def __init__(self):
            super().__init__()
            self.size = 2

    def broken(host, device):
        raise DeviceError("out of order")

    with pytest.raises(DeviceError, match="out of order"):
        choose_for_gpus("auto", Two(), GPU, 1, 1, makers={"cuda_ipc": broken})


def test_the_communicator_that_carries_host_arrays():
    class Around(SoloCommunicator):
        def __init__(self, **inner):
            super().__init__()
            vars(self).update(inner)

    plain = SoloCommunicator()
    assert host_of(plain) is plain
    assert host_of(Around(transport="cuda_ipc", host=plain)) is plain
    assert host_of(Around(transport="staged(nccl)", inner=Around(transport="nccl", host=plain))) is plain
    levels = Around(transport="two_level", inner=plain)
    assert host_of(levels) is levels
    assert host_of(Around(transport="staged(two_level)", inner=levels)) is levels
