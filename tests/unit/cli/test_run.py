"""`mpdp run`: arguments and their errors, with the search for an MPI replaced."""

import io
import os
import subprocess
import sys

import pytest

from mpdp.cli import mpi_library, run
from mpdp.cli.mpi_library import MpiLibrary
from mpdp.errors import LaunchError


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


@pytest.fixture
def mpich(monkeypatch):
    monkeypatch.setattr(
        mpi_library, "probe", lambda: MpiLibrary("mpich", "MPICH", (5, 0, 2), "/v/lib/libmpi.so.12")
    )
    monkeypatch.setattr(mpi_library, "find_launcher", lambda library: "/v/bin/mpirun")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_dry_run_prints_the_line_and_nothing_else(script, mpich, capsys):
    assert run.main(["-n", "3", "--dry-run", script, "-n", "4", "--epochs=5", "a b"]) == 0
    out, err = capsys.readouterr()
    assert (
        out == f"/v/bin/mpirun -disable-auto-cleanup -n 3 {sys.executable} {script} -n 4 --epochs=5 'a b'\n"
    )
    assert err == ""


@pytest.mark.parametrize(
    "environ, n",
    [({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3), ({"CUDA_VISIBLE_DEVICES": ""}, 2)],
    ids=["gpus", "none"],
)
def test_without_n_there_is_a_rank_a_gpu_and_two_where_there_is_none(
    script, mpich, capsys, monkeypatch, environ, n
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert run.main(["--dry-run", script]) == 0
    assert f" -n {n} " in capsys.readouterr().out


def test_threads_heed_the_quota_of_a_container(script, mpich, capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("mpdp.cores._quota", lambda: 1)
    assert run.main(["--dry-run", "-n", "1", script]) == 0
    assert "OMP_NUM_THREADS=1 " in capsys.readouterr().out


def test_with_hosts_there_is_a_rank_a_slot(script, mpich, capsys):
    assert run.main(["--dry-run", "--hosts", "a:2,b", script]) == 0
    assert "-hosts a:2,b -n 3 " in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["no_such_file.py"], "script: expected a file that exists, got 'no_such_file.py'; check the path"),
        (["."], "script: expected a file that exists, got '.'"),
        (["-n", "0", "{script}"], "n: expected a number of processes of at least 1, got '0'"),
        (["-n", "-2", "{script}"], "n: expected a number of processes of at least 1, got '-2'"),
        (["-n", "two", "{script}"], "n: expected a number of processes of at least 1, got 'two'"),
        (["--hosts", "a:0", "{script}"], "hosts: expected NAME or NAME:SLOTS with commas between, got 'a:0'"),
        (
            ["-n", "5", "--hosts", "a:2,b:2", "{script}"],
            "n: expected at most the 4 processes of --hosts, got 5",
        ),
        (["-n", "2"], "the following arguments are required: script.py"),
        (["--no-such-flag", "{script}"], "--no-such-flag"),
    ],
)
def test_a_usage_error_exits_2_and_says_it_once(script, arguments, message, capsys):
    with pytest.raises(SystemExit) as info:
        run.main([argument.format(script=script) for argument in arguments])
    assert info.value.code == 2
    assert capsys.readouterr().err.count(message) == 1


def test_a_missing_mpi_is_one_clear_line(script, monkeypatch, capsys):
    def probe():
        raise LaunchError("MPI: expected a library that mpi4py can load, got none; install one")

    monkeypatch.setattr(mpi_library, "probe", probe)
    assert run.main(["-n", "2", script]) == 1
    assert capsys.readouterr().err == (
        "mpdp run: error: MPI: expected a library that mpi4py can load, got none; install one\n"
    )


@pytest.mark.parametrize("closed", [(0,), (1,), (0, 1, 2)])
def test_closed_streams_are_held_open(closed):
    """mpirun fails on a descriptor that is closed, and pipes of its own would take the place of one."""
    code = (
        "import os, sys; from mpdp.cli.run import hold_streams; hold_streams(); "
        "sys.exit(os.open(os.devnull, os.O_RDONLY) - 3)"
    )

    def close():
        for number in closed:
            os.close(number)

    done = subprocess.run([sys.executable, "-c", code], preexec_fn=close, check=False, timeout=60)
    assert done.returncode == 0


def test_a_stream_that_takes_nothing_does_not_stop_the_job(script, mpich, monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    started = []
    monkeypatch.setattr("mpdp.cli.supervise.supervise", lambda command, n: started.append(n) or 0)
    monkeypatch.setattr(sys, "stderr", Full())
    assert run.main(["-n", "3", script]) == 0
    assert started == [3]
