"""`mpdp run`: arguments and their errors, with the search for an MPI replaced."""

import io
import os
import subprocess
import sys

import pytest

from mpdp.cli import mpi_library, run
from mpdp.cli.mpi_library import MpiLibrary
from mpdp.cli.supervise import Ended, Marks
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
        (
            ["python", "{script}"],
            "script: expected a script, got 'python'; leave it out, ranks run the Python",
        ),
        ([sys.executable, "{script}"], f"script: expected a script, got {sys.executable!r}; leave it out"),
        (["-n", "0", "{script}"], "n: expected a number of processes of at least 1, got '0'"),
        (["-n", "-2", "{script}"], "n: expected a number of processes of at least 1, got '-2'"),
        (["-n", "two", "{script}"], "n: expected a number of processes of at least 1, got 'two'"),
        (["--hosts", "a:0", "{script}"], "hosts: expected NAME or NAME:SLOTS with commas between, got 'a:0'"),
        (
            ["-n", "5", "--hosts", "a:2,b:2", "{script}"],
            "n: expected at most the 4 processes of --hosts, got 5",
        ),
        (["-n", "1" * 5000, "{script}"], "n: expected a number of processes of at least 1, got '111"),
        (["--max-restarts", "-1", "{script}"], "max-restarts: expected a number of 0 or more, got '-1'"),
        (
            ["--max-restarts", "3", "--exec", "{script}"],
            "--max-restarts: expected a parent that stays, got --exec",
        ),
        (["--min-ranks", "1", "{script}"], "--min-ranks: expected --max-restarts beside it, got none"),
        (
            ["-n", "2", "--max-restarts", "3", "--min-ranks", "3", "{script}"],
            "--min-ranks: expected at most the 2 ranks of the job, got 3",
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


@pytest.fixture
def jobs(monkeypatch):
    """Jobs that end with the given status; what was started."""
    monkeypatch.setattr("mpdp.cli.restarts.FIRST_WAIT", 0.0)
    monkeypatch.delenv("MPDP_RESTART", raising=False)
    started = []

    def play(*statuses):
        left = iter(statuses)

        def watch(command, n):
            started.append(
                (" ".join(command.words).partition(sys.executable)[0], n, command.settings["MPDP_RESTART"])
            )
            return Ended(next(left), False, Marks({}, {}, set(), False, updated=True))

        monkeypatch.setattr("mpdp.cli.supervise.watch", watch)
        return started

    return play


def test_a_job_is_started_again(script, mpich, jobs, monkeypatch, capsys):
    started = jobs(9, 1, 0)
    monkeypatch.setattr("mpdp.cli.restarts.Policy.wait", 0.0)
    assert run.main(["-n", "3", "--max-restarts", "2", script]) == 0
    assert started == [("/v/bin/mpirun -disable-auto-cleanup -n 3 ", 3, str(k)) for k in range(3)]
    assert capsys.readouterr().err.count("mpdp run: restart ") == 2


def test_hosts_that_do_not_answer_are_left_out(script, mpich, jobs, monkeypatch):
    """Their ranks are too, down to --min-ranks; a host that answers again gets its ranks back."""
    started = jobs(9, 9, 9, 9)
    answers = iter([True, False, True, True, False, False])
    monkeypatch.setattr(run, "_answers", lambda host: next(answers))
    assert run.main(["--hosts", "a:2,b:2", "--max-restarts", "9", "--min-ranks", "2", script]) == 9
    assert [line.split()[2:] for line, _, _ in started] == [
        ["-hosts", "a:2,b:2", "-n", "4"],
        ["-hosts", "a:2", "-n", "2"],
        ["-hosts", "a:2,b:2", "-n", "4"],
    ]


@pytest.mark.parametrize("code, expected", [(0, True), (1, False)])
def test_a_host_answers_if_the_launcher_can_start_a_process_there(monkeypatch, tmp_path, code, expected):
    """The launcher is a shell script that notes its line."""
    launcher = tmp_path / "mpirun"
    launcher.write_text(f"#!/bin/sh\necho $@ > {tmp_path}/line\nexit {code}\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(
        mpi_library, "probe", lambda: MpiLibrary("mpich", "MPICH", (5, 0, 2), "/v/lib/libmpi.so.12")
    )
    monkeypatch.setattr(mpi_library, "find_launcher", lambda library: str(launcher))
    assert run._answers(run.Host("b", 4)) is expected
    line = (tmp_path / "line").read_text()
    assert line == f"-disable-auto-cleanup -hosts b:1 -n 1 {sys.executable} -c pass\n"


def test_gpus_that_are_gone_take_their_ranks_along(script, mpich, jobs, monkeypatch):
    started = jobs(9, 0)
    monkeypatch.setattr(run, "count_gpus", lambda environ: 3 if started else 4)
    assert run.main(["-n", "4", "--max-restarts", "9", "--min-ranks", "2", script]) == 0
    assert [n for _, n, _ in started] == [4, 3]
