"""Joining the launcher's world from one process: arguments, left-over variables, threads of BLAS."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mpdp
from mpdp import cores, world
from mpdp.cli.mpi_library import probe
from mpdp.errors import LaunchError

ROOT = Path(mpdp.__file__).resolve().parents[1]


def python(code, **environ):
    """Run code in a fresh interpreter without a launcher's variables."""
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "MPI_LOCAL", "SLURM", "MPDP"))
    }
    clean["PYTHONPATH"] = str(ROOT)
    clean["CUDA_VISIBLE_DEVICES"] = ""  # "auto" is the CPU, also on a machine with GPUs
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_world_of_one_needs_no_mpi():
    done = python(
        "import sys, mpdp; w = mpdp.init(); assert not {'mpi4py', 'cupy'} & sys.modules.keys();"
        "print(w.rank, w.size, w.local_rank, w.local_size, w.node, w.num_nodes, w.device, w.timeout, w.axes)"
    )
    assert (done.stdout, done.stderr, done.returncode) == ("0 1 0 1 0 1 cpu 300.0 {'data': 1}\n", "", 0)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"},
    ],
)
def test_left_over_variables_are_said_once_and_not_believed(environ):
    """I6: runs as one process with one warning, and waits for nobody."""
    done = python("import mpdp; print(mpdp.init().size); mpdp.init()", **environ)
    assert (done.stdout, done.returncode) == ("1\n", 0)
    assert done.stderr.count("warning init: found") == 1


def test_a_launcher_of_another_mpi_is_named_before_mpi_starts():
    """MPI_Init would end the process with a message of its own, or make a world of one."""
    try:
        family = probe().family
    except LaunchError:
        pytest.skip("no MPI")
    if family == "openmpi":
        environ = {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
        names = "the mpirun of MPICH or Intel MPI has started this process, and mpi4py loads Open MPI"
    else:
        environ = {f"OMPI_COMM_WORLD_{name}": value for name, value in (("SIZE", "2"), ("RANK", "0"))}
        names = "the mpirun of Open MPI has started this process, and mpi4py loads "
    done = python("import mpdp; mpdp.init(timeout=5)", **environ)
    assert done.returncode != 0
    assert (
        f"[0/2] error before init: LaunchError: MPI: expected launcher and library of one MPI, got two: {names}"
        in (done.stderr)
    )
    assert "start the job with `mpdp run`" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "tpu"}, r'device: expected "cpu", "cuda" or "cuda:<ordinal>", got \'tpu\''),
        (
            {"transport": "pigeon"},
            r"transport: expected one of auto, shared_memory, two_level, mpi, cuda_ipc, nccl, staged, .* got 'pigeon'",
        ),
        ({"timeout": 0}, r"timeout: expected a number of seconds above 0, got 0"),
        ({"timeout": float("inf")}, r"timeout: expected a number of seconds above 0, got inf"),
        ({"timeout": "5"}, r"timeout: expected a number of seconds above 0, got '5'"),
        ({"timeout": True}, r"timeout: expected a number of seconds above 0, got True"),
        ({"timeout": 7.0}, r"timeout: expected .* as in the first call of init, got 7.0"),
    ],
)
def test_bad_arguments(arguments, message):
    mpdp.init()
    with pytest.raises(ValueError, match=message):
        mpdp.init(**arguments)


def test_init_is_idempotent():
    assert mpdp.init() is mpdp.init(device="cpu") is mpdp.current_world()


def test_an_axis_must_exist():
    assert mpdp.init().axis("data").size == mpdp.init().size
    with pytest.raises(ValueError, match=r"axis: expected one of data, got 'pipeline'"):
        mpdp.init().axis("pipeline")


def test_a_launcher_of_nonsense_is_an_error():
    done = python(
        "import mpdp; mpdp.init()", PMI_RANK="5", PMI_SIZE="2", MPI_LOCALRANKID="0", MPI_LOCALNRANKS="2"
    )
    assert done.returncode == 1
    assert "LaunchError: PMI_RANK: expected a number in 0..1 from the launcher, got '5'" in done.stderr


def test_a_closed_stderr_is_no_reason_to_stop():
    done = python(
        "import sys, mpdp.world; sys.stderr.close(); mpdp.world.say(0, 1, 'info', 'x'); print('on')"
    )
    assert done.stdout == "on\n"


@pytest.mark.parametrize(
    ("affinity", "machine", "quota", "local_size", "expected"),
    [
        (2, 2, None, 1, 2),
        (2, 2, None, 2, 1),
        (2, 2, None, 4, 1),
        (16, 16, None, 2, 8),
        (16, 16, None, 3, 5),
        (1, 16, None, 2, 1),
        (16, 16, 4, 2, 2),
        (64, 64, 1, 1, 1),
    ],
)
def test_threads_a_rank(monkeypatch, affinity, machine, quota, local_size, expected):
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: range(affinity))
    monkeypatch.setattr(cores.os, "cpu_count", lambda: machine)
    monkeypatch.setattr(cores, "_quota", lambda: quota)
    assert cores.per_rank(local_size) == expected


def test_the_users_own_setting_of_threads_stands():
    assert cores.cap(2, {"OMP_NUM_THREADS": "7"}) is None
    assert cores.cap(1, {}) is None
    assert world.blas_threads() >= 1


def test_importing_loads_neither_numpy_nor_mpi_nor_cupy():
    done = python(
        "import sys, mpdp; heavy = {'numpy', 'mpi4py', 'cupy', 'tqdm'} & sys.modules.keys(); assert not heavy, heavy;"
        "assert set(mpdp.__all__) <= set(dir(mpdp)); from mpdp import nn, Trainer; assert mpdp.nn is nn;"
        "import mpdp.world; assert mpdp.world.init is mpdp.init; print('on')"
    )
    assert (done.stdout, done.returncode) == ("on\n", 0), done.stderr
    done = python("import mpdp; mpdp.nonsense")
    assert "module 'mpdp' has no attribute 'nonsense'" in done.stderr
