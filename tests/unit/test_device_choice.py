"""Which GPU a rank gets: the table of docs/devices.md, and the order in which a GPU is chosen and used."""

import re
import sys
from pathlib import Path

import fake_gpus
import pytest

import mpdp
from mpdp import guard, world
from mpdp.device import CPU, Device
from mpdp.device_choice import VISIBLE, GpuChoice, choose_device, choose_gpu, listed
from mpdp.errors import DeviceError, MissingDependencyError
from mpdp.launch import Announcement

SLICES = "MIG-1111,MIG-2222"

# (local rank, CUDA_VISIBLE_DEVICES, GPUs that CUDA then shows) -> (ordinal, new value of the variable, wraps)
TABLE = [
    ((0, None, 1), (0, None, False)),
    ((3, None, 8), (3, None, False)),
    ((5, None, 4), (1, None, True)),
    ((1, "2,3", 2), (1, None, False)),
    ((2, "2,3", 2), (0, None, True)),
    ((1, "GPU-8f3a,GPU-91bc", 2), (1, None, False)),
    ((3, "3", 1), (0, None, True)),
    ((2, "GPU-8f3a", 1), (0, None, True)),
    ((1, "0,1,-1,2", 2), (1, None, False)),
    ((0, SLICES, 1), (0, "MIG-1111", False)),
    ((1, SLICES, 1), (0, "MIG-2222", False)),
    ((2, SLICES, 1), (0, "MIG-1111", True)),
    ((4, "MIG-1111", 1), (0, None, True)),
    ((0, "", 0), "hides all"),
    ((0, "-1", 0), "hides all"),
    ((0, "NoDevFiles", 0), "hides all"),
    ((0, None, 0), "got none"),
    ((1, "7", 0), "got none"),
]


@pytest.mark.parametrize(("case", "expected"), TABLE)
def test_the_table(case, expected):
    if isinstance(expected, str):
        with pytest.raises(DeviceError, match=f"device cuda: expected a .*GPU.* {expected}"):
            choose_gpu(*case)
    else:
        assert choose_gpu(*case) == GpuChoice(*expected)


def test_the_documentation_has_the_same_table():
    text = (Path(__file__).resolve().parents[2] / "docs" / "devices.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (\d+) \| (.*?) \|", text, re.MULTILINE)
    assert len(rows) == len(TABLE) >= 12
    for (rank, visible, count, gpu), (case, expected) in zip(rows, TABLE):
        shown = None if visible == "unset" else visible.strip("`").replace("(empty)", "")
        assert (int(rank), shown, int(count)) == case
        assert gpu.startswith("error") if isinstance(expected, str) else gpu.startswith(f"{expected[0]}")
        if not isinstance(expected, str):
            assert ("shared" in gpu) == expected[2] and (f"`{expected[1]}`" in gpu) == (
                expected[1] is not None
            )


def test_listed():
    assert listed(None) is None and listed("") == [] and listed(" 1 , 0") == ["1", "0"]
    assert listed("GPU-8f3a-11, GPU-77") == ["GPU-8f3a-11", "GPU-77"] and listed("MIG-GPU-8f/1/0") == [
        "MIG-GPU-8f/1/0"
    ]


def test_auto_takes_a_gpu_only_where_there_is_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_device("auto", 0, {}) == (CPU, "")
    monkeypatch.undo()
    log = []
    fake_gpus.install(monkeypatch, 4, log)
    assert choose_device("auto", 5, {}) == (Device("cuda:1"), "CuPy sees 4 GPUs")
    log.clear()
    assert choose_device("auto", 0, {VISIBLE: ""}) == (CPU, "") and log == []
    fake_gpus.install(monkeypatch, 0)
    assert choose_device("auto", 0, {VISIBLE: "9"}) == (CPU, "CuPy sees no GPU: CUDA_VISIBLE_DEVICES is '9'")
    fake_gpus.install(monkeypatch, "driver is too old")
    assert choose_device("auto", 0, {}) == (CPU, "CuPy sees no GPU: driver is too old")


def test_a_device_that_was_asked_for(monkeypatch):
    fake_gpus.install(monkeypatch, 4)
    assert choose_device("cpu", 3, {})[0] == CPU
    assert choose_device("cuda", 3, {})[0] == Device("cuda:3")
    assert choose_device("cuda:2", 3, {})[0] == choose_device(Device("cuda", 2), 0, {})[0] == Device("cuda:2")
    assert choose_device(Device("cuda", 0), 3, {})[0] == Device("cuda:0")
    with pytest.raises(
        DeviceError, match=r"device: expected an ordinal below the 4 GPUs .*, got cuda:4; look at nv"
    ):
        choose_device("cuda:4", 0, {})
    fake_gpus.install(monkeypatch, "no driver")
    with pytest.raises(DeviceError, match=r"device cuda: expected a GPU that CUDA can use, got none"):
        choose_device("cuda", 0, {})
    with pytest.raises(DeviceError, match=r"below the 0 GPUs .* got cuda:1 \(no driver\)"):
        choose_device("cuda:1", 0, {})
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(
        MissingDependencyError, match=r'device cuda:0: expected CuPy .*pip install "mpdp\[cuda13\]"'
    ):
        choose_device("cuda", 0, {})


def test_a_rank_names_its_own_slice_before_cuda_is_asked(monkeypatch):
    log, environ = [], {VISIBLE: SLICES}
    fake_gpus.install(monkeypatch, 1, log)
    monkeypatch.setattr("mpdp.device_choice._count", lambda *a: log.append(environ[VISIBLE]) or (1, ""))
    assert choose_device("auto", 1, environ)[0] == Device("cuda:0")
    assert environ == {VISIBLE: "MIG-2222"} and set(log) == {"MIG-2222"}


class Stop(Exception):
    pass


@pytest.fixture
def joining(monkeypatch):
    """Join a world as local rank 1 of 4 up to the moment at which MPI would be initialised."""
    log = []
    fake_gpus.install(monkeypatch, 4, log)

    def start(launcher):
        log.append("mpi")
        raise Stop

    for part, value in (
        ("announcement", Announcement(4, 1, 1, 4, "hydra")),
        ("meet", lambda timeout: log.append("meet")),
    ):
        monkeypatch.setattr(guard.current, part, value)
    monkeypatch.setattr(world, "_import_mpi", start)
    monkeypatch.setattr(world.cores, "cap", lambda *a: None)
    monkeypatch.delenv(VISIBLE, raising=False)
    return log


@pytest.mark.parametrize(("asked", "ordinal"), [("auto", 1), ("cuda", 1), ("cuda:2", 2)])
def test_the_gpu_is_made_current_before_mpi_and_no_other_is_touched(joining, asked, ordinal):
    with pytest.raises(Stop):
        world._join(asked, "auto", 300.0)
    assert [entry for entry in joining if entry != "count"] == [f"use {ordinal}", "meet", "mpi"]


def test_the_cpu_is_chosen_without_asking_for_gpus(joining):
    with pytest.raises(Stop):
        world._join("cpu", "auto", 300.0)
    assert joining == ["meet", "mpi"]


def test_a_launcher_that_names_no_local_rank_runs_on_one_node():
    assert world._local_rank(None) == 0
    assert world._local_rank(Announcement(8, 5, None, None, "pmi")) == 5
    assert world._local_rank(Announcement(8, 5, 1, 4, "hydra")) == 1


def test_auto_says_what_it_took_once(monkeypatch, capsys):
    fake_gpus.install(monkeypatch, 2)
    monkeypatch.setattr(guard.current, "announcement", None)
    monkeypatch.delenv(VISIBLE, raising=False)
    joined = world._join("auto", "auto", 300.0)
    assert joined.device == Device("cuda:0") and joined.ranks_per_device == 1
    assert capsys.readouterr().err == "[0/1] info device cuda:0: CuPy sees 2 GPUs\n"
    world._join("cuda", "auto", 300.0)
    assert capsys.readouterr().err == ""


def test_ranks_that_share_a_gpu_are_counted(monkeypatch):
    """Three ranks of this node on GPUs 0, 1 and 0; another node has four on one."""
    fake_gpus.install(monkeypatch, 2)

    class Local:
        def Get_size(self):
            return 3

        def Allgather(self, mine, names):
            for row, ordinal in enumerate((0, 1, 0)):
                names[row] = list(world.identity(Device("cuda", ordinal)))
            assert (names[0] == mine).all()

        def Free(self):
            pass

    class Raw:
        def Split_type(self, kind, key):
            return Local()

        def Get_rank(self):
            return 0

        def Allreduce(self, mine, most, op):
            assert mine.tolist() == [2]
            most[0] = 4

    mpi = type("MPI", (), {"COMM_TYPE_SHARED": 0, "MAX": "max"})
    assert world._ranks_per_device(mpi, Raw(), Device("cuda")) == 4
    assert world._ranks_per_device(mpi, None, CPU) == 1


def test_another_device_than_in_the_first_call_is_refused():
    mpdp.init()
    with pytest.raises(ValueError, match=r"device: expected .* as in the first call of init, got cuda:77"):
        mpdp.init(device="cuda:77")
