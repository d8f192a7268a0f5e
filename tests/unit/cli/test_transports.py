"""What the doctor says about transports, on machines that this one is not."""

from types import SimpleNamespace

import pytest

from mpdp.cli import doctor, transports
from mpdp.cli.transports import foresee, lines, links, nccl_version
from mpdp.comm.flags import unordered
from mpdp.errors import MissingDependencyError

HERE = "mpi" if unordered() else "shared_memory"
BOTH = [[True, True], [True, True]]
APART = [[True, True], [False, True]]


class Runtime:
    """CUDA's runtime with two GPUs, of which the second cannot address the first."""

    class CUDARuntimeError(RuntimeError):
        pass

    def __init__(self, mps):
        self.mps = mps

    def deviceCanAccessPeer(self, one, other):
        assert one != other  # CUDA refuses to be asked that
        return int(APART[one][other])

    def deviceGetAttribute(self, attribute, device):
        if self.mps is None:
            raise self.CUDARuntimeError("cudaErrorInvalidValue")
        return int(self.mps)


def cupy(mps=None):
    return SimpleNamespace(cuda=SimpleNamespace(runtime=Runtime(mps)))


@pytest.mark.parametrize("mps", [True, False])
def test_links_are_what_the_driver_says(mps):
    found = links(cupy(mps), 2, {})
    assert found["peer_access"] == APART and found["mps"] is mps
    assert links(cupy(True), 0, {}) == {"peer_access": [], "mps": False, "nccl": found["nccl"]}


@pytest.mark.parametrize(("text", "runs"), [("self", True), ("no such process", False), ("", False)])
def test_an_older_driver_is_not_asked_whether_mps_runs(tmp_path, text, runs):
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text(f"{text}\n")
    assert links(cupy(), 1, {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})["mps"] is runs
    assert links(cupy(), 1, {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "missing")})["mps"] is False


def test_versions_of_nccl():
    def missing():
        raise MissingDependencyError("nccl: expected NCCL's library, found none")

    assert nccl_version(lambda: SimpleNamespace(get_version=lambda: 22907)) == "2.29.7"
    assert nccl_version(missing) is None


@pytest.mark.parametrize(
    ("peers", "nccl", "nodes", "transport", "reason"),
    [
        (BOTH, None, 1, "cuda_ipc", "all ranks are on one node, whose GPUs have peer access"),
        (
            APART,
            "2.29.7",
            1,
            "nccl",
            "not cuda_ipc: no peer access between GPUs 0 and 1; staged where ranks share a GPU",
        ),
        (
            APART,
            None,
            1,
            f"staged({HERE})",
            "not cuda_ipc: no peer access between GPUs 0 and 1; not nccl: it is not installed",
        ),
        (BOTH, "2.29.7", 3, "nccl", "not cuda_ipc: the ranks are on 3 nodes; staged where ranks share a GPU"),
        (
            BOTH,
            None,
            3,
            f"staged({HERE.replace('shared_memory', 'two_level')})",
            "not cuda_ipc: the ranks are on 3 nodes; not nccl: it is not installed",
        ),
    ],
)
def test_what_auto_would_take_for_gpus(peers, nccl, nodes, transport, reason):
    gpus = {"peer_access": peers, "mps": False, "nccl": nccl}
    assert foresee(gpus, nodes, {})["gpu"] == {"transport": transport, "reason": reason}
    shared = foresee(gpus, nodes, {}, ranks=3, ranks_per_gpu=2)
    if transport == "cuda_ipc":
        assert shared["gpu"]["transport"] == transport
    else:
        assert shared["gpu"]["transport"] == f"staged({shared['cpu']['transport']})"
        assert shared["gpu"]["reason"].endswith("; not nccl: 2 ranks share a GPU")


def test_what_auto_would_take_for_cpu_ranks():
    assert foresee({}, 1, {})["cpu"]["transport"] == HERE
    assert foresee({}, 1, {})["gpu"] is None
    several = foresee({}, 2, {}, ranks=3)["cpu"]
    assert several == {"transport": HERE.replace("shared_memory", "two_level"), "reason": several["reason"]}
    assert "the ranks are on 2 nodes" in several["reason"] or HERE == "mpi"
    assert foresee({}, 2, {}, ranks=2)["cpu"] == {
        "transport": "mpi",
        "reason": "the ranks are on 2 nodes, one on each",
    }
    said = foresee({"peer_access": BOTH, "nccl": None}, 1, {"MPDP_TRANSPORT": "mpi"})
    assert said["cpu"] == said["gpu"] == {"transport": "mpi", "reason": "MPDP_TRANSPORT says so"}


def test_the_lines_for_people():
    gpus = {"peer_access": APART, "mps": True, "nccl": "2.29.7"}
    first, *others = lines(gpus, foresee(gpus, 1, {}))
    assert first == "peer access: none between GPUs 0 and 1; CUDA MPS: runs; NCCL: 2.29.7"
    assert [line.partition(" (")[0] for line in others] == [
        f'transport "auto" for CPU ranks: {HERE}',
        'transport "auto" for GPU ranks: nccl',
    ]
    gpus = {"peer_access": [[True]], "mps": False, "nccl": None}
    assert lines(gpus, {})[0] == "peer access: one GPU; CUDA MPS: does not run; NCCL: none"
    gpus = {"peer_access": BOTH, "mps": False, "nccl": None}
    assert lines(gpus, {})[0].startswith("peer access: between all GPUs; ")
    assert lines({}, {}) == []


def test_the_doctor_says_it(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_gpus", lambda problems: {"devices": [], **links(cupy(True), 2, {})})
    monkeypatch.setattr(transports, "unordered", lambda: None)
    report, _ = doctor.examine()
    assert report["gpus"]["peer_access"] == APART and report["gpus"]["mps"] is True
    assert report["auto"]["cpu"] == {"transport": "shared_memory", "reason": "all ranks are on one node"}
    assert report["auto"]["gpu"]["transport"] in ("nccl", "staged(shared_memory)")
    table = doctor._table(report)
    assert "peer access: none between GPUs 0 and 1; CUDA MPS: runs" in table
    assert 'transport "auto" for CPU ranks: shared_memory (all ranks are on one node)' in table
