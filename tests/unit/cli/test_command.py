"""The line for each MPI, and what the user's own settings leave of it."""

import pytest

from mpdp.cli import command
from mpdp.cli.command import Host, build, count_gpus, parse_hosts
from mpdp.cli.mpi_library import MpiLibrary

MPICH = MpiLibrary("mpich", "MPICH", (5, 0, 2), "")
OPEN_5 = MpiLibrary("openmpi", "Open MPI", (5, 0, 11), "")
OPEN_4 = MpiLibrary("openmpi", "Open MPI", (4, 1, 4), "")
INTEL = MpiLibrary("intel", "Intel MPI", (2021, 18, 0), "")
BLAS = (
    "OMP_NUM_THREADS=2 OPENBLAS_NUM_THREADS=2 MKL_NUM_THREADS=2 BLIS_NUM_THREADS=2 VECLIB_MAXIMUM_THREADS=2"
)
ROOT = "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"


def line(library, n=4, hosts=(), cores=8, root=False, environ=None, remote_shell=True):
    return str(
        build(
            library,
            "mpirun",
            ["python", "t.py"],
            n,
            hosts=hosts,
            cores=cores,
            root=root,
            environ=environ or {},
            remote_shell=remote_shell,
        )
    )


@pytest.mark.parametrize(
    "library, options, expected",
    [
        (MPICH, {}, f"{BLAS} mpirun -disable-auto-cleanup -n 4 python t.py"),
        (MPICH, {"root": True}, f"{BLAS} mpirun -disable-auto-cleanup -n 4 python t.py"),
        (
            OPEN_5,
            {"root": True},
            (
                f"{ROOT} PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_btl='^ofi' {BLAS} "
                "mpirun --bind-to none -n 4 python t.py"
            ),
        ),
        (
            OPEN_5,
            {},
            (
                f"PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_btl='^ofi' {BLAS} "
                "mpirun --bind-to none -n 4 python t.py"
            ),
        ),
        (
            OPEN_4,
            {"root": True},
            (
                f"{ROOT} OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_btl='^ofi' {BLAS} "
                "mpirun --bind-to none -n 4 python t.py"
            ),
        ),
        (INTEL, {}, f"I_MPI_PIN=0 {BLAS} mpirun -n 4 python t.py"),
    ],
    ids=["mpich", "mpich as root", "open mpi 5 as root", "open mpi 5", "open mpi 4", "intel"],
)
def test_each_mpi_gets_what_it_needs(library, options, expected):
    assert line(library, **options) == expected


def test_what_the_user_has_set_stays():
    environ = {
        "OMP_NUM_THREADS": "3",
        "OMPI_MCA_btl": "tcp,self",
        "PRTE_MCA_rmaps_default_mapping_policy": "slot",
    }
    assert line(OPEN_5, environ=environ) == "mpirun --bind-to none -n 4 python t.py"
    assert "MKL_NUM_THREADS" not in line(MPICH, environ={"MKL_NUM_THREADS": "4"})
    assert "OMP_NUM_THREADS=2" in line(MPICH, environ={"MKL_NUM_THREADS": "4"})


@pytest.mark.parametrize(
    "n, cores, threads", [(1, 8, 8), (2, 8, 4), (3, 8, 2), (8, 8, 1), (16, 8, 1), (2, 1, 1)]
)
def test_blas_threads_are_cores_over_local_ranks(n, cores, threads):
    assert f"OMP_NUM_THREADS={threads} " in line(MPICH, n=n, cores=cores)


def test_hosts():
    hosts = (Host("a", 2), Host("b", None))
    assert "OMP_NUM_THREADS=4 " in line(MPICH, n=4, hosts=hosts)  # two ranks a host
    assert line(MPICH, hosts=hosts, environ={"OMP_NUM_THREADS": "1"}) == (
        "mpirun -disable-auto-cleanup -hosts a:2,b -n 4 python t.py"
    )
    assert line(OPEN_5, hosts=hosts, environ={"OMP_NUM_THREADS": "1", "PYTHONPATH": "x"}).endswith(
        "mpirun --bind-to none --host a:2,b -x PYTHONPATH -x OMP_NUM_THREADS -n 4 python t.py"
    )


@pytest.mark.parametrize("text", ["", "a,", "a:", "a:0", "a:x", "-x", "a,,b", "a:-1"])
def test_bad_hosts(text):
    with pytest.raises(ValueError, match="hosts: expected NAME or NAME:SLOTS with commas between, got "):
        parse_hosts(text)


@pytest.mark.parametrize(
    "visible, count",
    [("0,1,2", 3), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-1234, GPU-5678", 2), ("NoDevFiles", 1)],
)
def test_visible_gpus(visible, count):
    assert count_gpus({"CUDA_VISIBLE_DEVICES": visible}) == count


def test_gpus_as_nvidia_smi_lists_them(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-2)'\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(command.os, "listdir", _no_folder)
    assert count_gpus({"PATH": str(tmp_path)}) == 2
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert count_gpus({"PATH": str(tmp_path)}) == 0
    assert count_gpus({"PATH": "/nonexistent"}) == 0


def _no_folder(path):
    raise FileNotFoundError(path)


def test_open_mpi_4_without_a_remote_shell_is_told_so():
    assert "OMPI_MCA_plm_rsh_agent=sh " in line(OPEN_4, remote_shell=False)
    for text in (line(OPEN_4), line(OPEN_5, remote_shell=False), line(MPICH, remote_shell=False)):
        assert "plm_rsh_agent" not in text
    assert "plm_rsh_agent" not in line(OPEN_4, hosts=(Host("a", 2), Host("b", 2)), remote_shell=False)
